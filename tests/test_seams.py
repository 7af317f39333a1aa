"""What stands between a script and the engine: served as one unpatched process has it, or refused on every rank alike.

Many cases share one start of ranks. Models are Transformers' with UPipe in their attention, without an engine.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.attached import attached
from tests.engines import forget_ulysses, register_ulysses
from tests.models import make_batch, make_model, shard, worst
from tests.ranks import run_ranks
from tests.zoo import tiny_model

pytest.importorskip("deepspeed")

Tensors = dict[str, torch.Tensor]


# ---------------------------------------------------------------- one process, and its ranks


def _loss(logits: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def _gradients(model: torch.nn.Module) -> Tensors:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _one_process(model: torch.nn.Module, batch: Tensors, documents: list[list[int]] | None = None, **inputs) -> Tensors:
    """Loss and gradients of the unpatched model; each document of each batch row for itself, where they are given."""
    model.zero_grad(set_to_none=True)
    ids, labels = batch["input_ids"], batch["labels"]
    if documents is None:
        logits = model(input_ids=ids, use_cache=False, **inputs).logits
    else:
        rows = [
            torch.cat([model(input_ids=part, use_cache=False).logits for part in row[None].split(lengths, 1)], 1)
            for row, lengths in zip(ids, documents, strict=True)
        ]
        logits = torch.cat(rows)
    loss = _loss(logits, labels, int((labels != -100).sum()))
    loss.backward()
    return {"loss": loss.detach(), **_gradients(model)}


def _on_ranks(model: torch.nn.Module, batch: Tensors, positions: torch.Tensor, **inputs) -> Tensors:
    """The same of the model with UPipe, on shards."""
    model.zero_grad(set_to_none=True)
    given = {name: shard(t) if isinstance(t, torch.Tensor) and t.dim() == 2 else t for name, t in inputs.items()}
    ids, labels = shard(batch["input_ids"]), shard(batch["labels"])
    logits = model(input_ids=ids, position_ids=shard(positions), use_cache=False, **given).logits
    loss = _loss(logits, labels, int((batch["labels"] != -100).sum()))
    loss.backward()
    result = {"loss": loss.detach(), **_gradients(model)}
    for t in result.values():
        dist.all_reduce(t)
    return result


def _positions(documents: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])


def _numbers(documents: list[list[int]]) -> torch.Tensor:
    """`[B, S]`: the first document's tokens are 1, those of the second 2."""
    rows = [torch.repeat_interleave(torch.arange(1, 1 + len(row)), torch.tensor(row)) for row in documents]
    return torch.stack(rows)


def _message(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "accepted"


@contextmanager
def _upipe(model: torch.nn.Module, chunk_heads: int = 4, **settings) -> Iterator[torch.nn.Module]:
    attachment = attached(model, chunk_heads, dist.group.WORLD, **settings)
    try:
        yield model
    finally:
        attachment.undo()


# ---------------------------------------------------------------- served

_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}


def _long(head_dim: int) -> dict:
    half = head_dim // 2
    return {
        **_LONG,
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
        "long_factor": [4.0 + i for i in range(half)],
    }


def _rotary_models() -> dict[str, torch.nn.Module]:
    """Models with rotary types that depend on the length, for which 16 positions are short and 32 long."""
    phi3 = transformers.Phi3Config(
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=64,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
        rope_parameters=_long(6),
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    phimoe = transformers.PhimoeConfig(
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
        vocab_size=64,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
        rope_parameters={**_long(6), "short_mscale": 1.0, "long_mscale": 1.3},
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    return {
        "dynamic": make_model("llama", rope_parameters=_DYNAMIC, max_position_embeddings=16),
        "phi3 longrope": transformers.Phi3ForCausalLM(phi3),
        "phimoe longrope": transformers.PhimoeForCausalLM(phimoe).eval(),
    }


def _padded(batch: Tensors, real: tuple[int, ...]) -> tuple[Tensors, torch.Tensor]:
    """Batch and mask with as many real tokens in each row."""
    mask = torch.arange(batch["input_ids"].shape[1])[None] < torch.tensor(real)[:, None]
    labels = batch["labels"].masked_fill(~mask, -100)
    return {"input_ids": batch["input_ids"].masked_fill(~mask, 0), "labels": labels}, mask.long()


def _served() -> dict[str, float]:
    """The largest error of loss and gradients against one process, by case."""
    C, errors = dist.get_world_size(), {}

    def note(name: str, got: Tensors, wanted: Tensors) -> None:
        errors[name] = max(worst(got, wanted).values())

    # Lengths that go up and down: what a rotary embedding remembers of them must be alike too.
    lengths = (32, 8 * C, 64)
    for name, model in _rotary_models().items():
        batches = [make_batch(seq=S, seed=S) for S in lengths]
        plain = [_one_process(model, b, position_ids=torch.arange(b["input_ids"].shape[1])[None]) for b in batches]
        patched = _rotary_models()[name].train(model.training)
        patched.load_state_dict(model.state_dict())
        with _upipe(patched):
            for S, batch, wanted in zip(lengths, batches, plain, strict=True):
                note(f"{name} {S}", _on_ranks(patched, batch, torch.arange(S)[None]), wanted)

    model = make_model("llama")
    for documents in ([[16, 16]], [[8] * 4], [[16, 16], [32]], [[16, 16], [16, 16]], [[20, 12, 32]], [[32, 32]]):
        batch = make_batch(seq=sum(documents[0]), batch=len(documents))
        wanted = _one_process(model, batch, documents)
        beside = {"": {}, " numbered by a mask": {"attention_mask": _numbers(documents)}}
        if len(documents) == 1:
            ends = torch.tensor([0, *torch.tensor(documents[0]).cumsum(0)])
            beside[" with lengths"] = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends.int(), "max_length_q": 32}
        with _upipe(model):
            for how, inputs in beside.items():
                note(f"documents {documents}{how}", _on_ranks(model, batch, _positions(documents), **inputs), wanted)

    for family in ("llama", "mixtral"):
        model = make_model(family)
        for real in ((27, 32), (9, 27), (32, 16), (5, 9), (32, 31)):
            batch, mask = _padded(make_batch(seq=32, batch=2), real)
            plain = torch.arange(32).expand(2, 32)
            wanted = _one_process(model, batch, attention_mask=mask, position_ids=plain)
            collated = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as Transformers counts beside a mask
            with _upipe(model):
                for kind, positions in (("plain", plain), ("collated", collated)):
                    got = _on_ranks(model, batch, positions, attention_mask=mask)
                    note(f"{family} padded to {real}, {kind} positions", got, wanted)
                if real[0] % 2:
                    got = _on_ranks(model, batch, plain, attention_mask=mask.bool())
                    note(f"{family} padded to {real}, a mask of booleans", got, wanted)

    # Settings that a class reads in every forward, changed after UPipe was put in.
    model, batch, positions = make_model("mistral", sliding_window=24), make_batch(seq=32), torch.arange(32)[None]
    with _upipe(model):
        _on_ranks(model, batch, positions)
        model.config.sliding_window = 5
        for layer in model.model.layers:
            layer.self_attn.scaling *= 0.5
        got = _on_ranks(model, batch, positions)
    note("window and scale changed", got, _one_process(model, batch, position_ids=positions))
    return errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_legal_is_what_one_process_computes(ranks):
    for errors in run_ranks(ranks, _served):
        assert {name: error for name, error in errors.items() if not error < 2e-5} == {}
        assert len(errors) > 40


# ---------------------------------------------------------------- refused, on every rank alike


def _own_attention(module, query, key, value, attention_mask, **options):
    raise AssertionError("not run")


def _own_forward(self, *args, **kwargs):
    raise AssertionError("not run")


def _hook(*args):
    return None


def _at_setup(change: Callable[[torch.nn.Module], object]) -> str:
    """What is said of a model that is changed before UPipe is put in, and by undoing the change nothing."""
    model = make_model("llama")
    change(model)
    return _message(lambda: attached(model, 4, dist.group.WORLD))


def _later(change: Callable[[torch.nn.Module], object], **inputs) -> str:
    """What is said by a forward of a model that is changed after UPipe was put in, and ran."""
    model, batch, positions = make_model("llama"), make_batch(seq=32), torch.arange(32)[None]
    given = {"input_ids": shard(batch["input_ids"]), "position_ids": shard(positions), "use_cache": False}
    with _upipe(model):
        model(**given)
        change(model)
        return _message(lambda: model(**{**given, **inputs}))


def _as_it_is(model: torch.nn.Module) -> None:
    pass


@contextmanager
def _registered(name: str, function) -> Iterator[None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    transformers.AttentionInterface.register(name, function)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.clear()
        ALL_ATTENTION_FUNCTIONS._global_mapping.update(before)


@contextmanager
def _class_forward(function) -> Iterator[None]:
    kind = transformers.models.llama.modeling_llama.LlamaAttention
    before = kind.forward
    kind.forward = function
    try:
        yield
    finally:
        kind.forward = before


def _attention(model: torch.nn.Module):
    return model.model.layers[1].self_attn


def _refused() -> dict[str, str]:
    rank = dist.get_rank()
    said = {}
    # What is replaced is not the stock computation.
    own = {"own function": "mine", "own function by a known name": "sdpa"}
    for case, name in own.items():
        with _registered(name, _own_attention):
            said[case] = _at_setup(lambda model, name=name: model.set_attn_implementation(name))
            said[f"{case}, later"] = (
                _later(lambda model, name=name: model.set_attn_implementation(name)) if name == "mine" else said[case]
            )
    with _class_forward(_own_forward):
        said["class forward"] = _at_setup(_as_it_is)

    def patch(model):
        _attention(model).forward = types.MethodType(_own_forward, _attention(model))

    said["instance forward"], said["instance forward, later"] = _at_setup(patch), _later(patch)
    for layer in ("q_proj", "k_proj", "v_proj"):
        for kind in ("forward", "forward_pre", "full_backward"):

            def hook(model, layer=layer, kind=kind):
                getattr(getattr(_attention(model), layer), f"register_{kind}_hook")(_hook)

            said[f"{kind} hook of {layer}"] = _at_setup(hook)
            said[f"{kind} hook of {layer}, later"] = _later(hook)

    # A setting that is read in one place only.
    def not_causal(model):
        _attention(model).is_causal = False

    def configured(model):
        model.config.is_causal = False

    def dropout(model):
        model.config.attention_dropout = 0.1

    for case, change in (("module", not_causal), ("config", configured)):
        said[f"is_causal of the {case}"], said[f"is_causal of the {case}, later"] = _at_setup(change), _later(change)
    said["is_causal of the call"] = _later(_as_it_is, is_causal=False)
    said["is_causal of one rank's call"] = _later(_as_it_is, **({"is_causal": False} if rank else {}))

    # attention_dropout is an attribute of each module, and of the configuration that it was read from.
    def dropout_of_module(model):
        _attention(model).attention_dropout = 0.1

    said["dropout, later"] = _later(dropout_of_module)

    # Masks and positions.
    batch = make_batch(seq=32)
    left = torch.ones(1, 32, dtype=torch.long)
    left[:, :3] = 0
    hole = torch.ones(1, 32, dtype=torch.long)
    hole[:, 14:18] = 0
    said["left padding"] = _later(_as_it_is, attention_mask=shard(left))
    said["a hole"] = _later(_as_it_is, attention_mask=shard(hole))
    said["a hole on one rank's mask"] = _later(_as_it_is, attention_mask=None if rank else shard(left))
    numbers = _numbers([[20, 12]])
    said["other documents"] = _later(_as_it_is, attention_mask=shard(numbers))
    said["other lengths"] = _later(_as_it_is, cu_seq_lens_q=torch.tensor([0, 20, 32]))
    said["lengths of one rank"] = _later(_as_it_is, cu_seq_lens_q=torch.tensor([0, 20, 32]) if rank else None)
    said["lengths that differ"] = _later(
        _as_it_is, cu_seq_lens_q=torch.tensor([0, 32]), cu_seq_lens_k=torch.tensor([0, 20, 32])
    )
    said["unsharded"] = _later(_as_it_is, input_ids=batch["input_ids"], position_ids=torch.arange(32)[None])
    packed = _positions([[20, 12]])
    said["unsharded, packed"] = _later(_as_it_is, input_ids=batch["input_ids"], position_ids=packed)
    said["logits_to_keep"] = _later(_as_it_is, logits_to_keep=1)
    said["logits_to_keep and labels"] = _later(_as_it_is, logits_to_keep=1, labels=shard(batch["labels"]))

    # The door of a model with one layer.
    one = make_model("llama", num_hidden_layers=1)
    with _upipe(one):
        said["one layer, no positions"] = _message(lambda: one(input_ids=shard(batch["input_ids"])))

    # Heads that see a sequence.
    config = transformers.LlamaConfig(**{**make_model("llama").config.to_dict(), "num_labels": 3, "pad_token_id": 0})
    for name in ("LlamaForSequenceClassification", "LlamaForQuestionAnswering"):
        model = getattr(transformers, name)(config)
        said[name] = _message(lambda model=model: attached(model, 4, dist.group.WORLD))

    # Blocks that do not divide a batch's rows.
    model = make_model("llama")
    with _upipe(model, memory="blocks"):
        thirty = {"input_ids": shard(make_batch(seq=36)["input_ids"]), "position_ids": shard(torch.arange(36)[None])}
        said["query_blocks"] = _message(lambda: model(**thirty))
    return said


_SAYS = {
    "own function": r"attn_implementation = 'mine' is tests\.test_seams\._own_attention.*Set attn_",
    "own function by a known name": r"attn_implementation = 'sdpa' is tests\.test_seams\._own_attention",
    "class forward": r"LlamaAttention\.forward was replaced by tests\.test_seams\._own_forward",
    "instance forward": r"model\.layers\.1\.self_attn \(LlamaAttention\) .*forward.*_own_forward.*Remove it",
    "forward hook": r"self_attn.*proj has a hook \(_hook\), which would not run|LlamaAttention\..*proj has a hook",
    "forward_pre hook": r"has a hook \(_hook\), which would not run",
    "full_backward hook": r"has a hook \(_hook\), which would not run",
    "is_causal of": r"is_causal = False",
    "dropout": r"attention_dropout = 0\.1",
    "left padding": r"attention_mask hides tokens before others in batch rows \[0\].*Pad on the right",
    "a hole": r"attention_mask hides tokens before others",
    "other documents": r"attention_mask has numbers of documents that are not the documents that position_ids show",
    "other lengths": r"ranks \[.*\]: cu_seq_lens are not the boundaries .*\(\(0, 32\),\)",
    "lengths of one rank": r"ranks \[1.*\]: cu_seq_lens are not",
    "lengths that differ": r"cu_seq_lens are not",
    "unsharded": r"position_ids start at \[0, 0.*\] by rank.*was not sharded \(all ranks hold the same",
    "logits_to_keep": r"logits_to_keep = 1, which counts from the end of this rank's shard",
    "one layer": r"position_ids are missing",
    "LlamaForSequenceClassification": r"LlamaForSequenceClassification makes one result of a sequence",
    "LlamaForQuestionAnswering": r"LlamaForQuestionAnswering makes one result of a sequence",
    "query_blocks": r"upipe\.query_blocks = 4: must divide the 18 rows of a rank.*multiple of 8",
}


def test_what_would_be_wrong_is_refused_on_every_rank_alike():
    first, second = run_ranks(2, _refused)
    assert first == second
    for case, message in first.items():
        (says,) = [says for start, says in _SAYS.items() if case == start] or [
            max(
                ((start, says) for start, says in _SAYS.items() if case.startswith(start)),
                key=lambda each: len(each[0]),
            )[1]
        ]
        with pytest.raises(ValueError, match=says):
            raise ValueError(f"{message}" if message != "accepted" else f"{case}: accepted")


# ---------------------------------------------------------------- memory


class _Masks(TorchDispatchMode):
    """How many tensors are made with a row and a column for each of so many rows of the sequence."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._shape = (rows, rows)
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += sum(isinstance(t, torch.Tensor) and t.shape[-2:] == self._shape for t in tree_leaves(result))
        return result


def _masks() -> dict[str, tuple[int, int]]:
    """How many masks a step makes without UPipe, in one process, and with it, by model."""
    S, found = 524, {}  # no size of a kernel's blocks
    batch, positions = make_batch(seq=S), torch.arange(S)[None]
    documents = _positions([[200, 324]])
    models = {
        "window": lambda: make_model("mistral", sliding_window=32),
        "windows in some layers": lambda: tiny_model("gemma3_text"),
        "eager": lambda: make_model("llama", attn_implementation="eager"),
    }
    for name, make in models.items():
        with _Masks(S) as alone:
            _one_process(make(), batch, position_ids=positions)
        model = make()
        with _upipe(model), _Masks(S // 2) as ours:
            for places in (positions, documents):
                _on_ranks(model, batch, places)
        found[name] = alone.count, ours.count
    return found


def test_no_mask_is_made_of_the_rows_of_a_shard():
    """Windows had `[1, 1, L, L]` from Transformers: 17 GB at 1M tokens on 8 ranks."""
    for found in run_ranks(2, _masks):
        for name, (alone, ours) in found.items():
            assert alone > 0 and ours == 0, (name, alone, ours)


# ---------------------------------------------------------------- remedies


def _remedies() -> dict[str, tuple[str, float]]:
    """What a refusal says, and the error against one process of the run that does what it says, by case."""
    import deepspeed_plugin

    batch, positions = make_batch(seq=32), torch.arange(32)[None]
    given = {"input_ids": shard(batch["input_ids"]), "position_ids": shard(positions), "use_cache": False}
    wanted = _one_process(make_model("llama"), batch, position_ids=positions)
    results = {}

    def after(case: str, change, remedy) -> None:
        """`change` is refused at setup and later; after `remedy` the run is right, both times."""
        model = make_model("llama")
        undo = change(model)
        message = _message(lambda: attached(model, 4, dist.group.WORLD))
        remedy(model, undo)
        with _upipe(model):
            errors = [max(worst(_on_ranks(model, batch, positions), wanted).values())]
            undo = change(model)
            assert _message(lambda: model(**given)) != "accepted", case
            remedy(model, undo)
            errors.append(max(worst(_on_ranks(model, batch, positions), wanted).values()))
        results[case] = (message, max(errors))

    def patched(model):
        attention = _attention(model)
        before = vars(attention).get("forward")
        attention.forward = types.MethodType(_own_forward, attention)
        return before

    def unpatched(model, before):
        del _attention(model).forward
        if before is not None:
            _attention(model).forward = before

    with _registered("mine", _own_attention):
        after("function", lambda m: m.set_attn_implementation("mine"), lambda m, _: m.set_attn_implementation("sdpa"))
    after("forward", patched, unpatched)
    after("hook", lambda m: _attention(m).k_proj.register_forward_hook(_hook), lambda m, handle: handle.remove())
    after(
        "dropout",
        lambda m: setattr(_attention(m), "attention_dropout", 0.1),
        lambda m, _: setattr(_attention(m), "attention_dropout", 0.0),
    )

    def instead(case: str, wrong: dict, right: dict, **settings) -> None:
        """Arguments that are refused by a forward, and others in their place."""
        model = make_model("llama")
        with _upipe(model, **settings):
            message = _message(lambda: model(**{**given, **wrong}))
            wanted_here = _one_process_of(right)
            got = _on_ranks(model, right["batch"], right["positions"], **right.get("inputs", {}))
        results[case] = (message, max(worst(got, wanted_here).values()))

    def _one_process_of(right: dict) -> Tensors:
        return _one_process(make_model("llama"), right["batch"], position_ids=right["positions"])

    plain = {"batch": batch, "positions": positions}
    left = torch.ones(1, 32, dtype=torch.long)
    left[:, :5] = 0
    on_the_right, mask = _padded(make_batch(seq=32), (27,))
    instead(
        "left padding",
        {"attention_mask": shard(left)},
        {"batch": on_the_right, "positions": positions, "inputs": {"attention_mask": mask}},
    )
    instead("no positions", {"position_ids": None}, plain)
    instead("unsharded", {"input_ids": batch["input_ids"], "position_ids": positions}, plain)
    instead("attentions", {"output_attentions": True}, plain)
    instead("logits_to_keep", {"logits_to_keep": 2}, plain)
    instead("not causal", {"is_causal": False}, plain)
    instead("lengths", {"cu_seq_lens_q": torch.tensor([0, 20, 32])}, plain)
    odd = {"input_ids": shard(make_batch(seq=36)["input_ids"]), "position_ids": shard(torch.arange(36)[None])}
    even = {"batch": make_batch(seq=40), "positions": torch.arange(40)[None]}  # the next multiple of 8
    instead("query_blocks", odd, even, memory="blocks")

    # Labels of a causal model, and of one that classifies tokens.
    ids = batch["input_ids"]
    for case, kind, shifted in (("labels", "LlamaForCausalLM", True), ("tokens", "LlamaForTokenClassification", False)):
        fields = {**make_model("llama").config.to_dict(), "num_labels": 5, "classifier_dropout": 0.0}
        config = transformers.LlamaConfig(**fields)
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config)
        labels = ids if shifted else ids % 5
        loss = model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss
        loss.backward()
        one = {"loss": loss.detach(), **_gradients(model)}
        model.zero_grad(set_to_none=True)
        with _upipe(model):
            message = _message(lambda model=model, labels=labels: model(**given, labels=shard(labels)))
            logits = model(**given).logits
            targets = shard(torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shifted else labels)
            engine = types.SimpleNamespace(
                zero_optimization_stage=lambda: 0,
                sequence_parallel_size=2,
                seq_parallel_group=dist.group.WORLD,
                module=model,
            )
            share = deepspeed_plugin.sequence_parallel_loss(engine, logits, targets)
            share.backward()
            got = {"loss": share.detach(), **_gradients(model)}
            for t in got.values():
                dist.all_reduce(t)
        results[case] = (message, max(worst(got, one).values()))

    # A head that makes one result of a sequence: the model without it, and the head where its row is.
    config = transformers.LlamaConfig(**{**make_model("llama").config.to_dict(), "num_labels": 3, "pad_token_id": 0})
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config)
    target, no_padding = torch.tensor([1]), ids.clamp(min=1)
    loss = torch.nn.functional.cross_entropy(model(input_ids=no_padding, use_cache=False).logits, target)
    loss.backward()
    one = {"loss": loss.detach(), **_gradients(model)}
    model.zero_grad(set_to_none=True)
    message = _message(lambda: attached(model, 4, dist.group.WORLD))
    with _upipe(model.model):
        hidden = model.model(**{**given, "input_ids": shard(no_padding)}).last_hidden_state
        last = dist.get_rank() == dist.get_world_size() - 1
        share = torch.nn.functional.cross_entropy(model.score(hidden[:, -1]), target) * float(last)
        share.backward()
        got = {"loss": share.detach(), **_gradients(model)}
        for t in got.values():
            dist.all_reduce(t)
    results["one result"] = (message, max(worst(got, one).values()))
    return results


_REMEDIES = {
    "function": r"Set attn_implementation to 'sdpa'",
    "forward": r"Remove it",
    "hook": r"Remove it",
    "dropout": r"Set the model config's attention_dropout to 0\.0",
    "left padding": r"Pad on the right",
    "no positions": r"pass global ones",
    "unsharded": r"Shard the batch with its global position_ids",
    "attentions": r"Leave output_attentions out",
    "logits_to_keep": r"Leave it out",
    "not causal": r"Leave is_causal out",
    "lengths": r"leave cu_seq_lens and max_length out",
    "query_blocks": r"pad the sequence to a multiple of 8 before sharding",
    "labels": r"Shift labels before they are sharded.*sequence_parallel_loss\(engine, logits, shift_labels\)",
    "tokens": r"sequence_parallel_loss\(engine, logits, labels\) with this rank's rows of the labels",
    "one result": r"its base model, with a head of your own on the rows of the rank that has the token",
}


def test_what_a_refusal_advises_ends_in_a_right_run():
    for results in run_ranks(2, _remedies):
        assert results.keys() == _REMEDIES.keys()
        for case, (message, error) in results.items():
            with pytest.raises(ValueError, match=_REMEDIES[case]):
                raise ValueError(message)
            assert error < 2e-5, case


# ---------------------------------------------------------------- evaluation, and ranks that are alone


def _logits(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def _evaluation() -> dict[str, object]:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    rank, batch = dist.get_rank(), make_batch(seq=32)
    ids, positions = batch["input_ids"], torch.arange(32)[None]
    wanted = _logits(make_model("llama").eval(), ids)
    plain = make_model("llama").eval().generate(ids, max_new_tokens=3, do_sample=False)
    seen: dict[str, object] = {}

    model = make_model("llama")
    register_ulysses(model, 2, disable_in_eval=True)
    with _upipe(model):
        model.eval()
        loader = [{"input_ids": ids, "position_ids": positions, "labels": ids}]
        group = parallel_state_sp.get_sequence_parallel_group()
        shards = UlyssesSPDataLoaderAdapter(loader, rank, group, 2, torch.device("cpu"))
        errors = [_logits(model, part["input_ids"], part["position_ids"]) - shard(wanted) for part in shards]
        seen["a loader's shards"] = max(float(error.abs().max()) for error in errors)
        seen["shards by hand"] = _message(lambda: _logits(model, shard(ids), shard(positions)))
        seen["whole"] = float((_logits(model, ids, positions) - wanted).abs().max())
        seen["without positions"] = float((_logits(model, ids) - wanted).abs().max())
        if rank == 0:  # alone
            for use_cache in (False, True):
                written = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=use_cache)
                seen[f"generate, use_cache={use_cache}"] = bool(torch.equal(written, plain))
        dist.barrier()

    forget_ulysses()
    model = make_model("llama")
    register_ulysses(model, 2)
    with _upipe(model):
        model.eval()
        if rank == 0:
            for use_cache in (False, True):
                seen[f"generate on shards, use_cache={use_cache}"] = _message(
                    lambda use_cache=use_cache: model.generate(ids, max_new_tokens=3, use_cache=use_cache)
                )
        dist.barrier()
        seen["shards"] = float((_logits(model, shard(ids), shard(positions)) - shard(wanted)).abs().max())
    return seen


def test_evaluation_of_shards_and_of_a_rank_alone():
    first, second = run_ranks(2, _evaluation)
    for seen in (first, second):
        for case in ("a loader's shards", "whole", "without positions", "shards"):
            assert seen[case] < 1e-5, case
    assert first["shards by hand"] == "accepted"  # as whole batches start so too
    with pytest.raises(ValueError, match=r"position_ids start at 16 on rank 1 of 2: this is a shard.*not sharded"):
        raise ValueError(second["shards by hand"])
    assert first["generate, use_cache=False"] and first["generate, use_cache=True"]
    for use_cache in (False, True):
        assert first[f"generate on shards, use_cache={use_cache}"].startswith(
            "upipe: the model was called by generate()"
        )


def _warnings() -> list[str]:
    import logging

    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logging.getLogger("deepspeed_plugin").addHandler(Keep())
    model, batch = make_model("llama"), make_batch(seq=32)
    with _upipe(model):
        for documents in ([[32]], [[20, 12]], [[16, 16]], [[16, 16]]):
            _on_ranks(model, batch, _positions(documents))
    return said


def test_documents_that_begin_where_shards_do_are_said_once():
    """They look as positions that are local to a rank do."""
    for said in run_ranks(2, _warnings):
        (message,) = said
        assert "taken for packed documents of 16 tokens" in message


def test_a_vision_modules_own_forward_is_given_back():
    from deepspeed_plugin.transformers.vision import attend_as_before, attend_locally

    class Tower(torch.nn.Module):
        config = types.SimpleNamespace(_attn_implementation="sdpa")

        def forward(self, x):
            return x

    for own in (None, lambda x: x + 1):
        module = Tower()
        if own is not None:
            module.forward = own
        assert attend_locally(module, {"sdpa": types.SimpleNamespace(attn=_own_attention)})
        assert module(1) == (1 if own is None else 2)
        attend_as_before(module)
        assert vars(module).get("forward") is own
