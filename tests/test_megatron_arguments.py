"""The arguments: added to Megatron's own parser, checked before any process group, carried to the config."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import upipe_autoload
from megatron_patch.options import UPipeOptions, check_arguments, flag, options_from
from tests.megatron_arguments import MODEL, UPIPE, needs_megatron, needs_training
from tests.megatron_cpu import namespace
from tests.ranks import run_in_process
from upipe_integrations import UPipeConfig


def _parsed(words: list[str], ranks: int) -> Any:
    """As a training script has them: parsed, validated, and the config made of them."""
    from tests.megatron_cpu import use_cpu_for_training

    upipe_autoload.megatron()
    use_cpu_for_training()
    from megatron.training import arguments

    os.environ.update(WORLD_SIZE=str(ranks), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *MODEL, *words]
    args = arguments.parse_args()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        arguments.validate_args(args)
    config = arguments.core_transformer_config_from_args(args)
    return args, config, printed.getvalue()


def _carried(words: list[str], ranks: int) -> tuple[Any, dict[str, Any], str]:
    args, config, printed = _parsed(words, ranks)
    shown = {name: value for name, value in vars(args).items() if "upipe" in name or name == "context_parallel_impl"}
    return config.upipe, shown, printed


@needs_training
def test_options_are_carried_to_the_config_and_printed():
    words = [*UPIPE, "--context-parallel-size", "2", "--upipe-chunk-heads", "4", "--upipe-memory", "fused"]
    options, shown, printed = run_in_process(_carried, [*words, "--upipe-overlap"], 2)
    assert options == UPipeOptions(UPipeConfig(chunk_heads=4, memory="fused", overlap=True))
    assert shown["upipe_chunk_heads"] == 4 and shown["upipe_kernel"] == "auto"
    assert re.search(r"upipe_chunk_heads \.+ 4\n", printed)
    assert re.search(r"upipe_memory \.+ fused\n", printed)


@needs_training
@pytest.mark.parametrize("chunk", [[], ["--upipe-chunk-heads", "auto"]])
def test_auto_is_the_number_of_ranks(chunk):
    options, shown, _ = run_in_process(_carried, [*UPIPE, "--context-parallel-size", "4", *chunk], 4)
    assert options.config.chunk_heads == shown["upipe_chunk_heads"] == 4


@needs_training
def test_selective_recomputation_of_attention_is_the_mode_that_recomputes():
    words = [*UPIPE, "--context-parallel-size", "2", "--recompute-granularity", "selective"]
    assert run_in_process(_carried, words, 2)[0].config.memory == "recompute"
    assert run_in_process(_carried, [*words, "--upipe-memory", "fused"], 2)[0].config.memory == "fused"
    assert run_in_process(_carried, [*words, "--recompute-modules", "mlp"], 2)[0].config.memory == "keep"


@needs_training
def test_without_the_argument_nothing_is_carried():
    options, shown, printed = run_in_process(_carried, [], 1)
    assert options is None
    assert shown.pop("context_parallel_impl") == "native"
    assert set(shown.values()) <= {None, False}
    assert "upipe: " not in printed


OPTIONS = """
import argparse, json
{first}
from megatron.training import arguments
parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
formatter = parser._get_formatter()
for group in parser._action_groups:
    if group.title == "upipe":  # the whole can't be printed: this release's own help has a stray %
        formatter.add_arguments(group._group_actions)
options = [[str(x) for x in (a.option_strings, a.dest, a.default, a.help)] for a in parser._actions]
import megatron_patch
megatron_patch.register()
parsed = arguments.add_megatron_arguments(argparse.ArgumentParser()).parse_args([])
print(json.dumps([options, formatter.format_help(), parsed.context_parallel_impl]))
"""


def _options(first: str) -> tuple[list[list[str]], str, str]:
    """Every option of Megatron's parser, and the help of ours; `first` is run before Megatron is imported.

    Then, with Megatron imported, ours are added, and a parser has their defaults. In a Python of its own, in which no
    entry point of an installed package has been called.
    """
    shown = _python("-c", OPTIONS.format(first=first), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    options, ours, implementation = json.loads(shown.stdout.splitlines()[-1])
    return options, ours, implementation


@pytest.fixture(scope="module")
def options() -> list[tuple[list[list[str]], str, str]]:
    """With ours added before Megatron is imported, and after it."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(_options, ("import megatron_patch; megatron_patch.register()", "")))


@needs_training
def test_help_shows_the_arguments_and_is_otherwise_unchanged(options):
    (with_ours, ours, _), (without, nothing, _) = options
    assert "--context-parallel-impl {native,upipe}" in ours and "--upipe-chunk-heads N|auto" in ours
    for field in dataclasses.fields(UPipeConfig):
        assert f"--upipe-{field.name.replace('_', '-')}" in ours
    assert nothing == ""
    assert with_ours[: len(without)] == without, "ours come last, and change none of the others"
    assert {option[1] for option in with_ours[len(without) :]} == {
        "context_parallel_impl",
        *(f"upipe_{field.name}" for field in dataclasses.fields(UPipeConfig)),
    }


# ---------------------------------------------------------------- bad input

BAD = {
    "not a multiple": (
        "--upipe-chunk-heads 3",
        r"--upipe-chunk-heads = 3: must be a multiple of the 2 context-parallel",
    ),
    "too large": ("--upipe-chunk-heads 32", r"--upipe-chunk-heads = 32: larger than the model's 16 query heads"),
    "too large for a rank": (
        "--upipe-chunk-heads 16 --tensor-model-parallel-size 2",
        r"--upipe-chunk-heads = 16: larger than a tensor-parallel rank's \(of 2\) 8 query heads",
    ),
    "dropout": ("--attention-dropout 0.1", r"--attention-dropout = 0.1 .*Set --attention-dropout 0"),
    "groups": (
        "--num-query-groups 2 --tensor-model-parallel-size 4",
        r"--num-query-groups = 2 .* 4 tensor-parallel ranks.*--tensor-model-parallel-size that divides 2",
    ),
    "graphs": ("--cuda-graph-impl local", r"--cuda-graph-impl = 'local'"),
    "reset": ("--reset-attention-mask", r"--reset-attention-mask = True .*--dataloader-inter-document-masking"),
    "blocks": ("--upipe-memory blocks --upipe-query-blocks 0", r"--upipe-query-blocks = 0: must be positive"),
    "hierarchical": (
        "--hierarchical-context-parallel-sizes 2 1 --cp-comm-type a2a+p2p",
        r"--(hierarchical-context-parallel-sizes|cp-comm-type)",
    ),
}


def _refused(words: list[str], ranks: int) -> tuple[str, bool]:
    import torch.distributed as dist

    try:
        _parsed(words, ranks)
    except ValueError as error:
        return str(error), dist.is_initialized()
    return "nothing was raised", dist.is_initialized()


@needs_training
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_any_process_group(name):
    words, pattern = BAD[name]
    ranks = 8 if "--tensor-model-parallel-size" in words else 2
    message, started = run_in_process(_refused, [*UPIPE, "--context-parallel-size", "2", *words.split()], ranks)
    assert re.search(pattern, message), message
    assert not started


@needs_training
def test_an_option_without_the_switch_is_refused():
    message, _ = run_in_process(_refused, ["--upipe-chunk-heads", "4"], 1)
    assert "--upipe-chunk-heads without --context-parallel-impl upipe" in message


def _argparse(words: list[str]) -> str:
    upipe_autoload.megatron()
    from megatron.training import arguments

    sys.argv = ["pretrain_gpt.py", *MODEL, *words]
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
        arguments.parse_args()
    return printed.getvalue()


@needs_training
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--upipe-chunk-heads", "many"], "'many' is neither a positive number of query heads nor 'auto'"),
        (["--upipe-chunk-heads", "0"], "'0' is neither a positive number"),
        (["--context-parallel-impl", "ulysses"], "invalid choice: 'ulysses'"),
        (["--upipe-memory", "none"], "invalid choice: 'none'"),
    ],
)
def test_words_that_are_no_values_are_argparse_errors(words, message):
    assert message in run_in_process(_argparse, words)


# Settings that this machine's Megatron refuses itself, or has not: by their names alone.
RULES = {
    "multi_latent_attention": True,
    "experimental_attention_variant": "gated_delta_net",
    "fp8": "hybrid",
    "fp4": "e2m1",
    "hybrid_context_parallel": True,
    "dynamic_context_parallel": True,
    "enable_cuda_graph": True,
    "external_cuda_graph": True,
    "qk_clip": True,
    "log_max_attention_logit": True,
    "tp_comm_overlap": True,
    "delay_wgrad_compute": True,
    "cpu_offloading": True,
    "offload_modules": ["core_attn", "moe_act"],
    "fused_single_qkv_rope": True,
    "use_kitchen_attention": True,
    "batch_invariant_mode": True,
    "use_megatron_fsdp": True,
    "use_torch_fsdp2": True,
    "attention_backend": "fused",
}


@pytest.mark.parametrize("name", RULES)
def test_settings_that_do_not_go_with_upipe_are_refused_by_name(name):
    good = namespace(
        context_parallel_impl="upipe",
        context_parallel_size=2,
        num_attention_heads=16,
        num_query_groups=8,
        attention_dropout=0.0,
        cp_comm_type=["p2p"],
        cuda_graph_impl="none",
        offload_modules=["moe_act"],
        attention_backend="auto",
        deterministic_mode=True,  # kernels are told, or left: tests/test_kernels.py
    )
    options = options_from(good)
    assert options is not None and check_arguments(good, options) == []
    setattr(good, name, RULES[name])
    with pytest.raises(ValueError, match=rf"^{flag(name)} = .* with --context-parallel-impl upipe: .*\. \w.*\.$"):
        check_arguments(good, options)


def test_one_context_parallel_rank_is_noted():
    args = namespace(context_parallel_impl="upipe", upipe_chunk_heads=4, num_attention_heads=16, attention_dropout=0)
    (note,) = check_arguments(args, options_from(args))
    assert "--context-parallel-size 1: attention runs in stages of 4 heads" in note


def test_documents_that_are_cut_as_one_sequence():
    """As pretrain_gpt.py deals them out."""
    args = namespace(context_parallel_impl="upipe", context_parallel_size=2)
    assert options_from(args).documents_cut == "each"
    args.dataloader_inter_document_masking = True
    assert options_from(args).documents_cut == "whole"
    args.sft = True
    assert options_from(args).documents_cut == "each"


# ---------------------------------------------------------------- YAML


def _yaml(words: list[str]) -> tuple[Any, Any, str]:
    """A config from a YAML namespace, as Megatron builds it; and what is said to flags beside a YAML file."""
    upipe_autoload.megatron()
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training import arguments, yaml_arguments

    from tests.megatron_cpu import use_cpu_for_training

    use_cpu_for_training()
    plain = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=16, attention_dropout=0.0)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    fields |= {"activation_func": "gelu", "bias_activation_fusion": False, "init_method": None}
    fields |= {"embedding_init_method": None, "output_layer_init_method": None}
    parallel = ("context_parallel_size", "params_dtype", "overlap_p2p_comm")
    model_parallel = {name: fields.pop(name) for name in parallel} | {"context_parallel_size": 2}
    on = {"context_parallel_impl": "upipe", "upipe_chunk_heads": 4}
    configs = []
    for more in ({}, on):
        args = namespace(
            language_model=namespace(**fields), model_parallel=namespace(**model_parallel, **more), yaml_cfg="a.yaml"
        )
        configs.append(yaml_arguments.core_transformer_config_from_yaml(args).upipe)
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"upipe-{os.getpid()}.yaml"
    path.write_text("disable_msc_deprecated: false\nenable_msc: false\nfaulty: 1\n")
    sys.argv = ["pretrain_gpt.py", *MODEL, "--yaml-cfg", str(path), *UPIPE]
    try:
        arguments.parse_args()
    except ValueError as error:
        return *configs, str(error)
    finally:
        path.unlink()
    return *configs, "nothing was raised"


@needs_training
def test_yaml_configs():
    pytest.importorskip("yaml")
    without, options, message = run_in_process(_yaml, [])
    assert without is None
    assert options == UPipeOptions(UPipeConfig(chunk_heads=4))
    assert "--context-parallel-impl beside --yaml-cfg" in message and "under model_parallel" in message


# ---------------------------------------------------------------- models


def _models() -> dict[str, Any]:
    from megatron_patch import UPipeSelfAttention

    upipe_autoload.megatron()
    upipe_autoload.megatron()  # again: what is patched is not patched twice
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_model import GPTModel

    from tests.megatron_cpu import use_cpu
    from tests.megatron_models import Case, config_of, layer_spec, start

    use_cpu()
    start(Case())
    case = Case()
    found: dict[str, Any] = {}
    for name, options in {"with": UPipeOptions(UPipeConfig(chunk_heads=4)), "native": None, "absent": ...}.items():
        config = config_of(case)
        if options is not ...:
            config.upipe = options
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            model = GPTModel(
                config=config, transformer_layer_spec=layer_spec(case, config), vocab_size=64, max_sequence_length=32
            )
        found[name] = [isinstance(layer.self_attention, UPipeSelfAttention) for layer in model.decoder.layers]
        found[f"{name} says"] = printed.getvalue()
    config.upipe = UPipeOptions(UPipeConfig(chunk_heads=4))
    try:
        BertModel(config, 1, layer_spec(case, config), 64, 32)
    except ValueError as error:
        found["bert"] = str(error)
    return found


@needs_megatron
def test_models_are_converted_where_the_config_says_so():
    """Public fault 23: what is accepted is done, and said in one line; else nothing is."""
    pytest.importorskip("torch")
    found = run_in_process(_models_in_group)
    assert found["with"] == [True, True] and found["native"] == found["absent"] == [False, False]
    assert found["with says"] == (
        "upipe: 2 attention layers of GPTModel run in 4 stages of 4 of 16 query heads on 1 context-parallel ranks "
        "(memory keep, kernel auto)\n"
    )
    assert found["native says"] == found["absent says"] == ""
    assert "upipe with BertModel" in found["bert"] and "GPTModel, HybridModel" in found["bert"]


def _models_in_group() -> dict[str, Any]:
    import torch.distributed as dist

    from tests.ranks import free_port

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("gloo", rank=0, world_size=1)
    return _models()


# ---------------------------------------------------------------- ways in


def _python(*words: str, **environment: str) -> subprocess.CompletedProcess:
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, "COLUMNS": "120", **environment}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=120)


def test_importing_the_package_imports_no_megatron():
    code = """
import sys
import megatron_patch
megatron_patch.register()
print([name for name in sys.modules if name.startswith("megatron.")])
"""
    assert _python("-c", code).stdout == "[]\n"


def test_the_launcher_explains_itself():
    shown = _python("-m", "megatron_patch", "--help")
    assert shown.returncode == 0 and "torchrun --nproc-per-node 8 -m megatron_patch" in shown.stdout
    assert _python("-m", "megatron_patch").returncode == 2
    missing = _python("-m", "megatron_patch", "nowhere.py")
    assert missing.returncode == 2 and "nowhere.py: no such file" in missing.stderr


@needs_training
def test_the_launcher_adds_the_arguments_to_an_unmodified_script(tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import sys, helper\nfrom megatron.training.arguments import parse_args\n"
        "if __name__ == '__main__':\n    print(sys.argv[0], parse_args().upipe_chunk_heads)\n"
    )
    (tmp_path / "helper.py").write_text("")
    run = _python("-m", "megatron_patch", str(script), *MODEL, *UPIPE, "--upipe-chunk-heads", "8")
    assert run.stdout.splitlines()[-1] == f"{script} 8", run.stderr


@needs_training
def test_megatron_may_be_imported_first(options):
    assert [implementation for *_, implementation in options] == ["native", "native"]


# ---------------------------------------------------------------- the page


def test_the_page_names_every_argument_and_every_refusal():
    import argparse

    from megatron_patch.arguments import add_arguments
    from megatron_patch.options import RULES as rules

    page = (Path(__file__).parents[1] / "docs" / "megatron.md").read_text()
    options = [
        word for action in add_arguments(argparse.ArgumentParser())._actions[1:] for word in action.option_strings
    ]
    refused = [flag(name) for rule in rules for name in rule.names]
    assert [word for word in options + refused if f"`{word}" not in page] == []
