"""UPipe attention: the public calls, what they check, and autograd's view of them.

Arguments and shapes are checked here, once; ``staged`` trusts them. Shapes: B batch, L rows of the sequence on this
rank, C ranks, S = C * L, E input size, H query heads and K KV heads over all ranks, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe_integrations.all_to_all import Group, group_ranks
from upipe_integrations.engine.operators import attention_in_graph, forward_by_operator
from upipe_integrations.engine.staged import Call, Sources, project, run_backward, run_forward
from upipe_integrations.engine.tracing import run_for_real
from upipe_integrations.kernels import AttentionSpec, Kernel, KernelRequest
from upipe_integrations.kernels.base import block_refusal
from upipe_integrations.layout import Layout
from upipe_integrations.mode import Mode
from upipe_integrations.projections.given import GivenHeads
from upipe_integrations.projections.output import OutputProjection
from upipe_integrations.projections.projection import AttentionProjections, LowRank, Projection
from upipe_integrations.schedule import Schedule


def upipe_attention(
    x: Tensor,
    projections: AttentionProjections,
    schedule: Schedule,
    group: Group,
    kernel: Kernel,
    spec: AttentionSpec | None = None,
    *,
    layout: Layout | None = None,
    sinks: Tensor | None = None,
    output: OutputProjection | None = None,
    mode: Mode | None = None,
    x_group: Group = None,
) -> Tensor:
    """Multi-head attention over a sequence that the ranks of `group` hold in shards.

    Args:
        x: `[B, L, E]`, this rank's rows of the sequence; the shape must be the same on every rank
            (``sharding.check_same_shape``).
        projections: weights in checkpoint order, the same on every rank; rotary tables of this rank's rows. One
            fused weight (with its bias and low-rank term) may serve all three, see ``Projection.places``.
        schedule: from ``UPipeConfig.schedule`` or ``Schedule.build``, for this group's ranks.
        group: sequence-parallel group, or None for a group of one.
        kernel: local attention, from ``select_kernel``.
        spec: what is computed; None is causal attention at ``D ** -0.5``.
        layout: which rows a rank holds; None is contiguous, rank r holding rows ``[r * L, (r + 1) * L)``.
        sinks: `[H]`, one logit per query head that takes part in its softmax without a value, the same on
            every rank; each rank gets the gradient of the heads it attends.
        output: the output projection; required by modes that fuse it. Those that keep the attention output then
            project its gradient stage by stage, so that it is never whole (`[B, S, Dv]` for each of a rank's query
            heads); ``"recompute"`` leaves the projection to the caller.
        mode: what is kept for backward; None keeps the attention output.
        x_group: ranks among which this rank's L rows are split once more (Megatron's sequence parallelism over its
            tensor-parallel group): x is then `[B, L / T, E]`, gathered forward and again backward so that only the
            part is kept, and its gradient is summed over them; None is none. The result has all L rows.

    Returns:
        `[B, L, H * Dv]` in checkpoint order, as the output projection takes it, or `[B, L, Y]` after it where
        it is given; in the dtype of `x` (under autocast: autocast's). Differentiable once, in x, weights,
        biases, sinks and the tensors of head functions.

    Raises:
        ValueError: shapes, dtypes, schedule, group, layout and kernel do not fit together, or the kernel
            does not do what `spec` asks; raised before any exchange.
    """
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            f"x of shape {tuple(x.shape)} and {x.dtype}: must be floating point [batch, rows of this rank, input size]."
        )
    rows = x.shape[1] * group_ranks(x_group)
    _check_projections(x, rows, projections, schedule)
    mode = mode or Mode()
    _check_output(output, mode, projections, schedule)
    q, k, v = projections.q, projections.k, projections.v
    fused = all(p.weight is q.weight and p.bias is q.bias and p.low_rank is q.low_rank for p in (k, v))
    call = Call(
        Sources(q, k, v, output, fused),
        schedule,
        group,
        kernel,
        spec or AttentionSpec(),
        layout or Layout(),
        mode,
        compute_dtype(x),
        x_group,
    )
    _check(call, x.shape[0], rows, x.device, sinks)
    return _apply(call, x, sinks)


def upipe_attention_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    group: Group,
    kernel: Kernel,
    spec: AttentionSpec | None = None,
    *,
    layout: Layout | None = None,
    sinks: Tensor | None = None,
    sequence_first: bool = False,
    mode: Mode | None = None,
) -> Tensor:
    """The partial form of :func:`upipe_attention`: heads are projected and rotated already.

    For code that can't hand over its projections. Same schedule, kernels and layouts; beyond its inputs, its
    output and their gradients it allocates the heads of one stage.

    Args:
        q: `[B, L, H, D]`, or `[L, B, H, D]` if `sequence_first`: this rank's rows of all heads.
        k: like `q` with K heads.
        v: like `k`, Dv its head size.
        schedule, group, kernel, spec, layout, sinks, mode: see :func:`upipe_attention`; modes that fuse the output
            projection are refused, and what ``"keep_heads"`` keeps is beside q, k and v.

    Returns:
        `[B, L, H, Dv]`, or `[L, B, H, Dv]` if `sequence_first`. Differentiable once, in q, k, v and sinks.

    Raises:
        ValueError: as :func:`upipe_attention`.
    """
    if sequence_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    wanted = {"q": schedule.heads, "k": schedule.kv_heads, "v": schedule.kv_heads}
    for (name, heads), t in zip(wanted.items(), (q, k, v), strict=True):
        if t.dim() != 4 or t.shape[:2] != q.shape[:2] or t.shape[2] != heads or t.dtype != q.dtype:
            raise ValueError(
                f"{name} of shape {tuple(t.shape)} and {t.dtype}: must be {q.dtype} [batch, rows of this rank, "
                f"{heads} heads, head size] for this schedule, with batch and rows as q's."
            )
    mode = mode or Mode()
    if mode.fuses_output:
        raise ValueError(
            f"memory mode {mode.memory!r} of heads that are projected already: use 'keep_heads', 'keep' or 'recompute'."
        )
    given = Sources(GivenHeads(q), GivenHeads(k), GivenHeads(v), None)
    call = Call(given, schedule, group, kernel, spec or AttentionSpec(), layout or Layout(), mode, q.dtype)
    _check(call, q.shape[0], q.shape[1], q.device, sinks)
    out = _apply(call, None, sinks)
    by_head: Tensor = out.unflatten(2, (schedule.heads, -1))
    return by_head.transpose(0, 1) if sequence_first else by_head


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype attention of `x` is computed in: autocast's where it is on, else x's own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def _check_projections(x: Tensor, rows: int, projections: AttentionProjections, schedule: Schedule) -> None:
    wanted = {"q": schedule.heads, "k": schedule.kv_heads, "v": schedule.kv_heads}
    for name, heads in wanted.items():
        projection = getattr(projections, name)
        size = projection.head_dim if projection.block is None else projection.block.size
        if projection.projected_dim != projection.head_dim and projection.function is None:
            raise ValueError(
                f"{name} block of {projection.projected_dim} rows for heads of {projection.head_dim}: must have as "
                "many, or a function that makes heads of that size of them."
            )
        columns = projection.columns or range(x.shape[2])
        if columns.step != 1 or not 0 <= columns.start < columns.stop <= x.shape[2]:
            raise ValueError(f"{name} columns {columns}: must be consecutive columns of the input's {x.shape[2]}.")
        width = len(columns)
        shape, expected = tuple(projection.weight.shape), (heads * size, width)
        if projection.places is not None:
            _check_places(name, projection.places, heads, shape[0] // size, shape)
            expected = (shape[0], width)
        if shape != expected:
            raise ValueError(
                f"{name} weight of shape {shape}: must be {expected}, {heads} heads of "
                f"{size} by the input size, for this schedule and x."
            )
        if projection.bias is not None and tuple(projection.bias.shape) != expected[:1]:
            raise ValueError(f"{name} bias of shape {tuple(projection.bias.shape)}: must be {expected[:1]}.")
        if projection.low_rank is not None:
            _check_low_rank(name, projection, projection.low_rank, (x.shape[0], rows))
        if projection.rotary is not None:
            cos, sin = projection.rotary.cos, projection.rotary.sin
            fits = cos.dim() == 3 and cos.shape[0] in (1, x.shape[0]) and cos.shape[1] == rows
            if not fits or sin.shape != cos.shape or cos.shape[2] % 2 or cos.shape[2] > projection.head_dim:
                raise ValueError(
                    f"{name} rotary tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)}: must be "
                    f"[1 or {x.shape[0]}, {rows}, even and at most {projection.head_dim}], this rank's rows only."
                )
            if cos.requires_grad or sin.requires_grad:
                raise ValueError(
                    f"{name} rotary tables require gradients, which RotateHalf does not give. Detach them, or rotate "
                    "in a HeadFunction that has them among its tensors."
                )


def _check_low_rank(name: str, projection: Projection, low: LowRank, shape: tuple[int, int]) -> None:
    of_input, of_weight = tuple(low.input.shape), tuple(low.weight.shape)
    rank = of_input[-1] if of_input else 0
    if of_input != (*shape, rank) or of_weight != (projection.weight.shape[0], rank):
        raise ValueError(
            f"{name} low-rank term with an input of shape {of_input} and a weight of shape {of_weight}: must be "
            f"{(*shape, 'R')}, this rank's rows, and {(projection.weight.shape[0], 'R')}, as the projection's weight."
        )
    if not (low.input.is_floating_point() and low.weight.is_floating_point()):
        raise ValueError(f"{name} low-rank term of {low.input.dtype} and {low.weight.dtype}: must be floating point.")


def _check_places(name: str, places: tuple[int, ...], heads: int, there: int, shape: tuple[int, ...]) -> None:
    if len(set(places)) != heads or len(places) != heads or min(places) < 0 or max(places) >= there:
        raise ValueError(
            f"{name} places {places}: must name {heads} different heads of the {there} in a weight of shape {shape}."
        )


def _check_output(
    output: OutputProjection | None, mode: Mode, projections: AttentionProjections, schedule: Schedule
) -> None:
    if mode.fuses_output if output is None else not mode.takes_output:
        raise ValueError(
            f"memory mode {mode.memory!r} with{'out' if output is None else ''} an output projection: 'fused' and "
            "'blocks' need it, 'keep_heads' and 'keep' may have it, 'recompute' leaves it to the caller. Pass "
            "output=OutputProjection(weight, bias), or None, accordingly."
        )
    if output is not None:
        width = schedule.heads * projections.v.head_dim
        if output.weight.dim() != 2 or output.weight.shape[1] != width:
            raise ValueError(
                f"output weight of shape {tuple(output.weight.shape)}: must be [output size, {width}], "
                f"{schedule.heads} heads of {projections.v.head_dim}."
            )


def _check(call: Call, batch: int, rows: int, device: torch.device, sinks: Tensor | None) -> None:
    schedule, spec, kernel = call.schedule, call.spec, call.kernel
    if schedule.ranks != group_ranks(call.group):
        raise ValueError(
            f"the schedule is for {schedule.ranks} ranks, the group has {group_ranks(call.group)}. "
            "Build the schedule for the group that is passed."
        )
    S = rows * schedule.ranks
    call.layout.check(S, schedule.ranks)
    q, k, v = call.sources.q, call.sources.k, call.sources.v
    if q.head_dim != k.head_dim:
        raise ValueError(f"query heads of {q.head_dim} and key heads of {k.head_dim}: must have the same size.")
    if sinks is not None and tuple(sinks.shape) != (schedule.heads,):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)}: must be one per query head, ({schedule.heads},).")
    for number, row in enumerate(spec.documents or ()):
        if row[-1] != S or len(spec.documents or ()) not in (1, batch):
            raise ValueError(
                f"documents of batch row {number} end at {row[-1]} and there are {len(spec.documents or ())} rows of "
                f"them: they must end at the sequence length {S}, for each of {batch} batch rows or once for all."
            )
    if call.mode.blocks > 1:
        _check_blocks(call, rows)
    request = KernelRequest(device, call.dtype, q.head_dim, v.head_dim, spec, sinks is not None)
    reason = run_for_real(_refusal, kernel, request)
    if reason is not None:
        features = ", ".join(request.features())
        raise ValueError(
            f"kernel {kernel.name!r}{f' with {features}' if features else ''}: {reason}. "
            "Choose another kernel (select_kernel('auto', ...) finds one that can)."
        )


def _refusal(kernel: Kernel, request: KernelRequest) -> str | None:
    return kernel.refusal(request)


def _check_blocks(call: Call, rows: int) -> None:
    blocks, kernel = call.mode.blocks, call.kernel
    if rows % blocks or (call.layout.half_chunks and blocks % 2):
        even = " and, in a zigzag layout, be even" if call.layout.half_chunks else ""
        raise ValueError(
            f"query_blocks = {blocks}: must divide the {rows} rows of a rank{even}. Set it to a number that does, or "
            "use memory mode 'fused'."
        )
    if call.layout.documents is not None:
        raise ValueError(
            "memory mode 'blocks' with a packed zigzag layout: its rows are in too many pieces. Use mode 'fused'."
        )
    reason = block_refusal(kernel, call.spec)
    if reason is not None:
        features = ", ".join(call.spec.features())
        raise ValueError(
            f"memory mode 'blocks' with kernel {kernel.name!r}{f' and {features}' if features else ''}: {reason}. Use "
            "mode 'fused', or another kernel."
        )
    if call.sources.v.head_dim != call.sources.q.head_dim:
        raise ValueError("memory mode 'blocks' with value heads of another size is not supported. Use mode 'fused'.")


def _apply(call: Call, x: Tensor | None, sinks: Tensor | None) -> Tensor:
    """The call through autograd."""
    tensors, output = call.sources.tensors(), call.output_after
    if torch.compiler.is_compiling() and not call.sources.accumulate:
        if output is not None and call.mode.operator:
            # Selective checkpointing would keep y of every layer beside what was attended.
            call = dataclasses.replace(call, sources=dataclasses.replace(call.sources, output=None))
            return output.of_all(_apply(call, x, sinks))
        return attention_in_graph(call.without_tensors(), [x, sinks, *tensors])
    return _apply_directly(call.without_tensors(), x, sinks, *tensors)


# torch.compiler.disable, without importing the compiler: a graph can't add to the caller's weight gradients.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _apply_directly(call: Call, x: Tensor | None, sinks: Tensor | None, *tensors: Tensor | None) -> Tensor:
    result: Tensor = _UPipeAttention.apply(call, x, sinks, *tensors)  # type: ignore[no-untyped-call]
    return result


class _UPipeAttention(torch.autograd.Function):
    """Autograd's view of the stage loop."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor | None, sinks: Tensor | None, *tensors: Tensor | None) -> Tensor:
        if call.mode.operator:
            attended, more = forward_by_operator(call, [x, sinks, *tensors])
        else:
            attended, more = run_forward(call, x, sinks, tensors)
        ctx.call = call
        ctx.save_for_backward(x, sinks, *tensors, *([attended, *more] if call.mode.keeps_output else []))
        return project(call, attended, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        read = 2 + len(ctx.call.sources.tensors())
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: what is kept is then freed stage by stage
        (x, sinks, *tensors), kept = saved[:read], saved[read:]
        del saved
        return None, *run_backward(ctx.call, grad, (x, sinks, tensors), kept, ctx.needs_input_grad[1:])
