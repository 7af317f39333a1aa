"""``upipe check`` of a model under a ds_config: what runs is the model's attention and the config's settings."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.ranks import run_in_process
from upipe_integrations import UPipeConfig
from upipe_integrations.commands import check as check_cli
from upipe_integrations.commands import main as cli
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.models import PRESETS, Attention, ModelConfig, find_config
from upipe_integrations.proof import check
from upipe_integrations.proof.check import Finding, Result

SMALL = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 32}


def _file(folder: Path, name: str, content: object) -> str:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def _cases(*words: str) -> list[check.Case]:
    options = cli._parser().parse_args(["check", *words])
    return list(check_cli._cases(options, check_cli._asked(options)))


# ---------------------------------------------------------------- what a config tells


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [{}]),
        ({"sliding_window": 8}, [{"window": 8}, {}]),
        ({"sliding_window": 8, "use_sliding_window": False}, [{}]),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, [{"window": 8}]),
        ({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}, [{"window": 8}, {}]),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, [{}]),
        ({"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 64}, [{"softcap": 50.0, "scale": 0.125}]),
        ({"attention_multiplier": 0.25, "attention_bias": True}, [{"scale": 0.25, "bias": True}]),
        ({"model_type": "qwen2"}, [{"bias": True}]),
        ({"model_type": "qwen3"}, [{"norm": True}]),
        ({"model_type": "gpt_oss"}, [{"sinks": True}]),
        ({"num_experts": 8}, [{}]),  # a plan refuses it; attention is what it is
    ],
)
def test_kinds_of_attention(fields, expected):
    kinds = ModelConfig("config.json", SMALL | fields).attention()
    assert kinds == tuple(Attention(6, 3, 16, 32, **kind) for kind in expected)


def test_presets_have_the_attention_of_their_family():
    kinds = {name: find_config(name).attention() for name in PRESETS}
    for name, model in PRESETS.items():
        shape = (model.heads, model.kv_heads, model.head_dim, model.hidden_size)
        family = {"bias": name.startswith("qwen2"), "norm": name.startswith("qwen3")}
        assert kinds[name] == (Attention(*shape, **family),)
        assert find_config(name).model() == model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank = 512: latent attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types has linear_attention"),
        ({"layer_types": []}, "layer_types = []: must be a list"),
        ({"layer_types": ["sliding_attention"]}, "lacks sliding_window"),
        ({"sliding_window": "8"}, "sliding_window = '8': must be a positive integer"),
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping = -1: must be a positive number"),
        ({"num_attention_heads": None}, "lacks num_attention_heads, which attention needs"),
        ({"hidden_size": None}, "lacks hidden_size, which attention needs"),
        ({"num_key_value_heads": 4}, "num_attention_heads = 6 with num_key_value_heads = 4"),
        ({"head_dim": "16"}, "head_dim = '16': must be a positive integer"),
    ],
)
def test_what_is_no_attention_of_ours_is_refused_by_field(fields, message, tmp_path, capsys):
    assert cli.main(["check", _file(tmp_path, "config.json", SMALL | fields)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


def test_a_plan_refuses_them_too(tmp_path, capsys):
    whole = SMALL | {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100}
    assert cli.main(["plan", _file(tmp_path, "config.json", whole), "--ranks", "2", "--seq-len", "1K"]) == 0
    capsys.readouterr()
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    assert cli.main(["plan", _file(tmp_path, "config.json", whole | layers)]) == 2
    assert "layer_types has linear_attention, which UPipe does not serve" in capsys.readouterr().err


# ---------------------------------------------------------------- what runs


def test_a_models_heads_are_its_own_and_all_modes_run():
    cases = _cases("qwen2.5-7b", "--ranks", "4")
    assert [case.memory for case in cases] == list(MEMORY)
    for case in cases:
        assert (case.heads, case.kv_heads, case.head_dim, case.chunk_heads, case.ranks) == (28, 4, 128, 4, 4)
        assert (case.seq_len, case.hidden_size, case.bias, case.norm) == (128, 128, True, False)


def test_the_partial_form_has_one_mode():
    (case,) = _cases("llama3-8b", "--partial")
    assert case.partial and case.memory == "keep"


def test_a_window_is_cut_to_the_sequence_and_the_rest_is_kept(tmp_path):
    fields = {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "attention_multiplier": 0.2}
    windowed, full = _cases(_file(tmp_path, "config.json", SMALL | fields), "--memory", "keep")
    assert (windowed.seq_len, windowed.spec.window, full.spec.window) == (64, 17, None)
    assert windowed.hidden_size == 32
    for case in (windowed, full):
        assert (case.spec.softcap, case.spec.scale) == (50.0, 0.2)


def test_the_ds_configs_settings_are_used_and_words_go_before_them(tmp_path):
    block = {"chunk_heads": 6, "memory": "blocks", "query_blocks": 3, "accumulate": "float32", "overlap": True}
    file = _file(tmp_path, "ds.json", {"sequence_parallel_size": 3, "upipe": block})
    (case,) = _cases("llama3.2-3b", "--ds-config", file)
    assert case.ranks == 3 and case.config() == UPipeConfig(**block)
    assert case.seq_len // 3 % (2 * 3) == 0  # blocks of rows, in a zigzag layout too
    words = ["--ranks", "2", "--chunk-heads", "4", "--memory", "keep,fused", "--query-blocks", "2", "--seq-len", "1K"]
    cases = _cases("llama3.2-3b", "--ds-config", file, *words)
    assert [(c.ranks, c.chunk_heads, c.memory, c.query_blocks, c.seq_len) for c in cases] == [
        (2, 4, "keep", 2, 1024),
        (2, 4, "fused", 2, 1024),
    ]
    assert all(case.accumulate == "float32" and case.overlap for case in cases)
    (sizes,) = _cases("--heads", "6", "--seq-len", "66", "--ds-config", file)
    assert sizes.config() == UPipeConfig(**block)


def test_a_ds_config_is_read_as_deepspeed_reads_it(tmp_path):
    pytest.importorskip("hjson")
    commented = '{\n  # stages of 8 heads\n  "upipe": {"chunk_heads": 8,},\n  "sequence_parallel_size": 4\n}'
    (case, *_) = _cases("llama3-8b", "--ds-config", _file(tmp_path, "ds.json", commented))
    assert (case.chunk_heads, case.ranks) == (8, 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"upip": {"chunk_heads": 4}}, "ds_config key 'upip': DeepSpeed knows no such key; did you mean 'upipe'?"),
        ({"upipe": {"chunk_head": 4}}, "upipe.chunk_head = 4: unknown key (did you mean 'chunk_heads'?)"),
        ({"upipe": {"chunk_heads": "4"}}, "upipe.chunk_heads = '4': must be an integer"),
        ({"upipe": {"chunk_heads": 3}}, "upipe.chunk_heads = 3: must be a multiple of the 2"),
        ({"upipe": {"chunk_heads": 4, "memory": "fuse"}}, "no such memory (did you mean 'fused'?)"),
        ({"upipe": {"chunk_heads": 4, "kernel": "flash-attn-3"}}, "it can't serve this model: it needs CUDA tensors"),
        ({"zero_optimization": {"stage": 3}}, "has no key 'upipe'"),
        ({"upipe": {"chunk_heads": 4}, "sequence_parallel_size": "8"}, "sequence_parallel_size = '8'"),
        ('{"upipe": {"chunk_heads": 4}, "upipe": {"chunk_heads": 8}}', "key 'upipe' stands twice"),
        ([1], "must be an object of settings"),
        ("{", "is not JSON"),
    ],
)
def test_a_wrong_ds_config_is_one_line(config, message, tmp_path, capsys):
    words = ["check", "llama3-8b", "--ranks", "2", "--device", "cpu", "--ds-config", _file(tmp_path, "ds.json", config)]
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a MODEL or --heads, and not both"),
        (["llama3-8b", "--heads", "8"], "needs a MODEL or --heads, and not both"),
        (["llama3-8b", "--window", "8"], "--window with a MODEL, which has its own layers"),
        (["llama3-8b", "--sinks"], "--sinks with a MODEL"),
        (["llama3-8b", "--ds-config", "none.json"], "--ds-config none.json: No such file or directory"),
        (["llama3-8b", "--ranks", "0"], "ranks = 0: must be positive"),
        (["llama3-8b", "--hidden", "0"], "hidden_size = 0: must be positive"),
        (["llama3-8b", "--ranks", "64"], "upipe.chunk_heads = 64: larger than the model's 32 query heads"),
    ],
)
def test_words_that_do_not_fit_are_one_line(words, message, capsys):
    assert cli.main(["check", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and printed.out == ""


# ---------------------------------------------------------------- what is said


def test_a_model_is_proven_in_every_mode(tmp_path, capsys):
    """On ranks; and a mode that the engine refuses is said to be, and counts only when it is asked for."""
    fields = {"model_type": "gpt_oss", "sliding_window": 4096, "attention_bias": True, "layer_types": None}
    config = _file(tmp_path, "config.json", SMALL | fields)
    words = ["check", config, "--packed", "24,40", "--layout", "contiguous"]
    assert cli.main(words) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert "reduced to take seconds: 64 tokens, window 17 of 4096" in printed
    for kind in ("window 17", "causal"):
        for mode in MEMORY:
            (line,) = [line for line in printed.splitlines() if line.startswith(f"memory {mode}, {kind} ")]
            assert line.endswith(" ok")
            assert int(line.removeprefix(f"memory {mode}, {kind}").split()[0]) >= 9  # sinks and biases among them
    assert f"ok: output and every gradient of {2 * len(MEMORY)} checks agree with one process" in printed


def _told(monkeypatch, capsys, *results: Result, words: tuple[str, ...] = ()) -> tuple[int, str, str]:
    monkeypatch.setattr(check, "check_all", lambda cases: iter(results))
    status = cli.main(["check", "llama3-8b", *words])
    return status, *capsys.readouterr()


RIGHT, WRONG, NAN = (
    Finding(name, error, 1e-10) for name, error in (("out", 1e-15), ("dwk", 1e-3), ("dx", float("nan")))
)


def test_one_difference_is_exit_1_and_named(monkeypatch, capsys):
    results = [Result((RIGHT,)) for _ in MEMORY]
    results[1] = Result((RIGHT, WRONG))
    results[2] = Result((WRONG, NAN))
    status, out, _ = _told(monkeypatch, capsys, *results)
    first, second, third, *_ = [line for line in out.splitlines() if line.startswith("memory ")]
    assert first.endswith(" ok") and second.endswith("DIFFERS") and "nan (dx)" in third and third.endswith("DIFFERS")
    assert status == 1
    assert f"DIFFERS: memory {MEMORY[1]}, causal (dwk); memory {MEMORY[2]}, causal (dwk)" in out


def test_a_refused_mode_is_said(monkeypatch, capsys):
    results = [Result((RIGHT,)) for _ in MEMORY]
    results[-1] = Result(refusal="it can't.")
    status, out, _ = _told(monkeypatch, capsys, *results)
    assert status == 0 and "not served: it can't." in out and f"of {len(MEMORY) - 1} checks agree" in out
    status, _, error = _told(monkeypatch, capsys, Result(refusal="it can't."), words=("--memory", "blocks"))
    assert status == 2 and error == "upipe check: memory blocks: it can't.\n"


def test_plugins_are_asked_through_their_entry_points(monkeypatch, capsys):
    asked = []

    def serves(fields, settings, ranks):
        asked.append((fields["model_type"], [config.memory for config in settings], ranks))
        if len(asked) == 2:
            raise ValueError("not that one.")
        if len(asked) == 3:
            raise ImportError("it is not installed")
        return "replaces 32 LlamaAttention"

    class Point:
        name = "host"

        def load(self):
            return serves

    found = {"upipe.serves": [Point()]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found[group])
    said = [_told(monkeypatch, capsys, Result((RIGHT,)), words=("--memory", "fused"))[1] for _ in range(3)]
    assert "host: replaces 32 LlamaAttention\n" in said[0]
    assert "host: REFUSES this model: not that one.\n" in said[1]
    assert "host: not asked: it is not installed\n" in said[2]
    assert asked == [("llama", ["fused"], 2)] * 3
    found["upipe.serves"] = []
    assert (
        "plugins: not asked, as this project is not installed"
        in _told(monkeypatch, capsys, *[Result((RIGHT,))] * len(MEMORY))[1]
    )


def _asked_of_deepspeed() -> list[str]:
    from deepspeed_plugin.serves import serves

    small = {
        "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    afmoe = {"model_type": "afmoe", "num_dense_layers": 1, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}
    said = []
    for fields, memory in (
        (find_config("llama3-8b").fields, "keep"),
        ({"model_type": "gemma2", **small}, "blocks"),
        ({"model_type": "afmoe", **small, **afmoe}, "fused"),
        ({"model_type": "mamba", **small}, "keep"),
        ({"model_type": "llama", **small, "attention_dropout": 0.1}, "keep"),
        (small, "keep"),
        ({"model_type": "lama", **small}, "keep"),
    ):
        try:
            said.append(serves(fields, [UPipeConfig(2, memory=memory)], 2))
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_the_deepspeed_plugin_says():
    pytest.importorskip("deepspeed")
    llama, gemma, gated, mamba, dropout, nameless, unknown = run_in_process(_asked_of_deepspeed)
    assert llama == "replaces 32 LlamaAttention"
    assert gemma == "replaces 2 Gemma2Attention"
    assert "upipe.memory = 'fused'" in gated and "changes the attended heads" in gated
    assert "MambaMixer" in mamba
    assert "attention_dropout = 0.1" in dropout
    assert "lacks model_type" in nameless
    assert unknown.startswith("Transformers can't build a lama: ")
