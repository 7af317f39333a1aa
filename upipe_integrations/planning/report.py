"""A plan as text, as JSON, as settings to paste, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from upipe_integrations.planning.components import CONTEXT_GIB, RESERVE, Method
from upipe_integrations.planning.plan import Plan, Row, Traced
from upipe_integrations.planning.setup import Setup

_COLUMNS = (
    "method", "params", "grads", "optim", "saved", "attn", "MLP", "loss", "work", "reserve", "total", "host", "longest"
)  # fmt: skip


_ALST = " ALST-like: ZeRO-3, optimizer and activations offloaded, MLP and loss tiled."


def size(tokens: int) -> str:
    """Tokens as the command takes them: 5M is 5 * 2**20."""
    for name, unit in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens and tokens % unit == 0:
            return f"{tokens // unit}{name}"
    return str(tokens)


def text(plan: Plan, lengths: Iterable[int]) -> str:
    """Tables, what they assume, and the settings recommended for the longest length."""
    lengths = list(lengths)
    parts = [_headline(plan)]
    longest = {method: plan.longest(method) for method in plan.methods}
    parts += [_table(plan, tokens, longest) for tokens in lengths]
    parts += [assumptions(plan.setup), recommendation(plan, max(lengths))]
    return "\n\n".join(parts)


def _headline(plan: Plan) -> str:
    model = plan.model
    return (
        f"{model.name}: {model.parameters / 1e9:.2f} billion parameters, {model.layers} layers, {model.heads} "
        f"query and {model.kv_heads} KV heads of {model.head_dim}\n{describe(plan.setup)}"
    )


def describe(setup: Setup) -> str:
    """The machine and what is switched on, in a line."""
    said = [f"{setup.gpus} x {setup.gpu_memory:g} GiB", f"{setup.ranks} ranks share a sequence", f"ZeRO-{setup.zero}"]
    said += [f"{name} {getattr(setup, name)}" for name in ("tp", "pp", "dp") if getattr(setup, name) > 1]
    said.append({"none": "no checkpointing"}.get(setup.checkpointing, f"{setup.checkpointing} checkpointing"))
    said += [f"{what} offloaded" for what in setup.offload]
    said += [name for name, on in (("tiled MLP", setup.tiled_mlp), ("tiled loss", setup.tiled_loss)) if on]
    said += [f"LoRA of rank {setup.lora_rank}"] if setup.lora_rank else []
    return ", ".join(said)


def _table(plan: Plan, tokens: int, longest: dict[Method, int]) -> str:
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for row in plan.rows(tokens):
        memory = row.memory
        values = (
            memory.parameters, memory.gradients, memory.optimizer, memory.saved, memory.attention, memory.mlp,
            memory.loss, memory.workspace, memory.reserve, memory.total, memory.host,
        )  # fmt: skip
        cells = [f"{value:.1f}" for value in values]
        cells[-2] += "  " if row.fits else " !"
        lines.append((str(row.method), *cells, _longest(longest[row.method])))
    title = f"GiB of one GPU at {size(tokens)} tokens{f' ({tokens})' if size(tokens) != str(tokens) else ''}"
    return title + ", ! where it does not fit:\n" + aligned(lines)


def _longest(tokens: int) -> str:
    if not tokens:
        return "none"
    return f"{tokens / 2**20:.2f}M" if tokens >= 1 << 20 else f"{tokens >> 10}K"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def assumptions(setup: Setup) -> str:
    """What the figures assume."""
    gradients = "float32" if setup.host == "megatron" else "bf16"
    return (
        f"Total: the sum, with the largest of attn, MLP and loss. Assumed: bf16, gradients in {gradients}, 12 bytes a "
        f"parameter for Adam\nin float32, one sequence a microbatch, {setup.kernel}; "
        f"{CONTEXT_GIB:g} GiB of CUDA and NCCL in work, {RESERVE:.0%} of activations in reserve.\n"
        f"host: memory of the host per GPU. 5M is 5 * 2**20 tokens.{'' if setup.host == 'megatron' else _ALST}"
    )


def recommendation(plan: Plan, tokens: int) -> str:
    """What to run at `tokens`, or what it would take."""
    method = plan.recommended(tokens)
    if method is None:
        farthest = plan.farthest()
        said = (
            f"At {size(tokens)} nothing of UPipe fits; {farthest} goes farthest, to {_longest(plan.longest(farthest))}."
        )
        better = plan.advice(tokens)
        if better is None:
            return f"{said}\nNo other setting is enough: take more ranks or GPUs with more memory."
        flags = " ".join(_new_flags(plan.setup, better.setup))
        return f"{said}\nIt fits with {flags}:\n\n{recommendation(better, tokens)}"
    total = plan.memory(method, tokens).total
    lines = [f"Recommended at {size(tokens)}: {method} ({total:.1f} of {plan.setup.gpu_memory:g} GiB)."]
    for title, block, notes in (
        ("ds_config.json", deepspeed_block(plan, method), deepspeed_notes(plan.setup)),
        ("Megatron", megatron_block(plan, method, tokens), megatron_notes(plan.setup)),
    ):
        if block is not None:
            lines += ["", f"{title}:", block, *notes]
    return "\n".join(lines)


def _new_flags(old: Setup, new: Setup) -> list[str]:
    flags = []
    for field, flag in (("zero", "--zero"), ("checkpointing", "--checkpointing")):
        if getattr(old, field) != getattr(new, field):
            flags.append(f"{flag} {getattr(new, field)}")
    if new.offload != old.offload:
        flags.append(f"--offload {','.join(new.offload)}")
    for field, flag in (("tiled_mlp", "--tiled-mlp"), ("tiled_loss", "--tiled-loss")):
        if getattr(old, field) != getattr(new, field):
            flags.append(flag)
    return flags


def _settings(method: Method) -> tuple[int, str]:
    config = method.config
    assert config is not None
    return config.chunk_heads, config.memory


def deepspeed_block(plan: Plan, method: Method) -> str | None:
    """A ds_config for `method`, a UPipe one; None where the setup has what DeepSpeed with UPipe has not."""
    setup = plan.setup
    if max(setup.tp, setup.pp) > 1:
        return None
    chunk_heads, memory = _settings(method)
    zero: dict[str, Any] = {"stage": setup.zero}
    for what, key in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        if what in setup.offload:
            zero[key] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": setup.ranks,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "upipe": {"chunk_heads": chunk_heads, "memory": memory},
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in config.items())
    return f"{{\n{lines}\n}}"


def deepspeed_notes(setup: Setup) -> list[str]:
    """What of the setup is in the training script and not in the ds_config."""
    if setup.host == "megatron":
        return ["(sized by Megatron's accounting: plan with --host deepspeed)"]
    kept = setup.checkpointing == "selective"
    said = []
    if setup.lora_rank:
        said.append(f"PEFT's LoRA, r={setup.lora_rank}, on all linear layers (without o_proj in fused and blocks)")
    if setup.checkpointing != "none":
        said.append(f"deepspeed_plugin.enable_checkpointing(engine.module, keep_attention={kept})")
    if "activations" in setup.offload:
        said.append("inputs of checkpointed layers moved to the host")
    if setup.tiled_mlp:
        said.append("MLPs through DeepSpeed's TiledMLP")
    if setup.tiled_loss:
        said.append("the loss by deepspeed_plugin.tiled_sequence_parallel_loss")
    return [f"and in the training script: {'; '.join(said)}"] if said else []


def megatron_block(plan: Plan, method: Method, tokens: int) -> str | None:
    """Arguments for `method`, a UPipe one: all that the plan knows, or UPipe's alone when it was made for DeepSpeed.

    None for LoRA, which is served under DeepSpeed.
    """
    setup = plan.setup
    if setup.lora_rank:
        return None
    chunk_heads, memory = _settings(method)
    upipe = [
        f"--context-parallel-size {setup.ranks} --context-parallel-impl upipe",
        f"--upipe-chunk-heads {chunk_heads} --upipe-memory {memory} --no-rope-fusion",
    ]
    if setup.host != "megatron":
        return "\n".join(upipe)
    lines = [f"--seq-length {tokens} --max-position-embeddings {tokens} --micro-batch-size 1 --bf16", *upipe]
    if setup.tp > 1:
        lines.append(f"--tensor-model-parallel-size {setup.tp} --sequence-parallel")
    if setup.pp > 1:
        lines.append(f"--pipeline-model-parallel-size {setup.pp}")
    if setup.checkpointing == "full":
        lines.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if setup.zero:
        lines.append("--use-distributed-optimizer")
    if "optimizer" in setup.offload:
        lines.append("--use-precision-aware-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d")
    lines.append("--cross-entropy-loss-fusion --cross-entropy-fusion-impl native")
    return "\n".join(lines)


def megatron_notes(setup: Setup) -> list[str]:
    """What of the setup is not in the arguments."""
    if setup.host != "megatron":
        return ["(sized by DeepSpeed's accounting: for Megatron's plan with --host megatron)"]
    return ["and in your own forward step: the loss in pieces of rows"] if setup.tiled_loss else []


def trace_table(traced: Iterable[Traced]) -> str:
    """What was measured beside what was computed."""
    lines: list[tuple[str, ...]] = [("method", "tokens", "closed form", "measured", "difference")]
    for t in traced:
        figures = (f"{t.closed_form:.3f}", f"{t.measured:.3f}", f"{t.difference:+.1%}")
        lines.append((str(t.method), size(t.tokens), *figures))
    title = "GiB of one layer's attention and its weight gradients, measured through the engine on fake tensors:\n"
    return title + aligned(lines)


def as_dict(plan: Plan, lengths: Iterable[int], traced: Iterable[Traced] = ()) -> dict[str, Any]:
    """Everything, for programs; memory in GiB."""
    lengths = list(lengths)
    chosen = plan.recommended(max(lengths))
    return {
        "model": {**asdict(plan.model), "parameters": plan.model.parameters},
        "setup": asdict(plan.setup),
        "assumed": {"reserve": RESERVE, "context_gib": CONTEXT_GIB},
        "rows": [_row(row) for tokens in lengths for row in plan.rows(tokens)],
        "longest": [{**_method(method), "tokens": plan.longest(method)} for method in plan.methods],
        "recommended": None if chosen is None else _recommended(plan, chosen, max(lengths)),
        "traced": [
            {**_method(t.method), "tokens": t.tokens, "closed_form_gib": t.closed_form, "measured_gib": t.measured}
            for t in traced
        ],
    }


def _method(method: Method) -> dict[str, Any]:
    return {"method": method.kind, "memory": method.memory, "chunk_heads": method.chunk_heads}


def _row(row: Row) -> dict[str, Any]:
    gib = {**asdict(row.memory), "total": row.memory.total}
    return {
        **_method(row.method),
        "tokens": row.tokens,
        "fits": row.fits,
        "gib": {k: round(v, 3) for k, v in gib.items()},
    }


def _recommended(plan: Plan, method: Method, tokens: int) -> dict[str, Any]:
    block, arguments = deepspeed_block(plan, method), megatron_block(plan, method, tokens)
    return {
        **_method(method),
        "tokens": tokens,
        "ds_config": None if block is None else json.loads(block),
        "megatron": None if arguments is None else arguments.split(),
        "notes": {"deepspeed": deepspeed_notes(plan.setup), "megatron": megatron_notes(plan.setup)},
    }


def plot(plan: Plan, lengths: Iterable[int], file: str) -> None:
    """Memory of one GPU against tokens, a line per method, and what the GPU has.

    Raises:
        ValueError: matplotlib is not installed, or can't write `file`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot: needs matplotlib. Install it with: pip install matplotlib") from None
    top = max(*lengths, *(plan.longest(method) for method in plan.methods)) * 1.1
    step = plan.step * 1024
    points = [max(1, round(top * i / 60 / step)) * step for i in range(1, 61)]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for method in plan.methods:
        totals = [plan.memory(method, tokens).total for tokens in points]
        style = "-" if method.kind == "upipe" else "--"
        axes.plot([tokens / 2**20 for tokens in points], totals, style, label=str(method))
    axes.axhline(plan.setup.gpu_memory, color="black", linewidth=1)
    axes.text(0, plan.setup.gpu_memory, f" {plan.setup.gpu_memory:g} GiB", va="bottom")
    axes.set(
        xlabel="tokens, M = 2**20", ylabel="GiB of one GPU", xlim=(0, top / 2**20), ylim=(0, 2 * plan.setup.gpu_memory),
        title=f"{plan.model.name}: {describe(plan.setup)}",
    )  # fmt: skip
    axes.title.set_fontsize(9)
    axes.legend(fontsize=8)
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise ValueError(f"--plot {file}: {error.strerror}.") from None
