"""UPipe attention: the public calls, what they check, and autograd's view of them.

Arguments and shapes are checked here, once; ``engine`` trusts them. Shapes: B batch, L rows of the sequence on this
rank, C ranks, S = C * L, E input size, H query heads and K KV heads over all ranks, D head size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe_integrations.all_to_all import group_ranks
from upipe_integrations.engine.backward import run_backward
from upipe_integrations.engine.call import Call, Staging
from upipe_integrations.engine.forward import project, run_forward
from upipe_integrations.engine.operators import attention_in_graph, forward_by_operator
from upipe_integrations.engine.tracing import run_while_tracing
from upipe_integrations.kernels import AttentionSpec, Kernel, KernelRequest
from upipe_integrations.projections.given import GivenHeads
from upipe_integrations.projections.output import OutputProjection
from upipe_integrations.projections.projection import AttentionProjections, LowRank, ProjectedHeads
from upipe_integrations.projections.structure import Structure, take_apart
from upipe_integrations.schedule import Schedule


def upipe_attention(
    x: Tensor,
    projections: AttentionProjections,
    staging: Staging,
    spec: AttentionSpec | None = None,
    *,
    sinks: Tensor | None = None,
    output: OutputProjection | None = None,
) -> Tensor:
    """Multi-head attention over a sequence that the ranks of a group hold in shards.

    Args:
        x: `[B, L, E]`, this rank's rows of the sequence (`[B, L / T, E]` where ``staging.x_group`` splits them once
            more); the shape must be the same on every rank (``sharding.check_same_shape``).
        projections: weights in checkpoint order, the same on every rank; rotary tables of this rank's rows. One
            weight may serve all three, see ``Projection.places``.
        staging: what is the same in every forward of the layer: schedule, group, kernel, layout and mode.
        spec: what is computed; None is causal attention at ``D ** -0.5``.
        sinks: `[H]`, one logit per query head that takes part in its softmax without a value, the same on
            every rank; each rank gets the gradient of the heads it attends.
        output: the output projection; None leaves it to the caller, which modes with it in the stage loop refuse. Modes
            that keep the attention output project its gradient stage by stage, so that it is never whole (`[B, S, Dv]`
            for each of a rank's query heads); others run it by autograd, which keeps the attention output.

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
    rows = x.shape[1] * group_ranks(staging.x_group)
    _check_projections(x, rows, projections, staging.schedule)
    _check_output(output, staging, projections)
    q, k, v = (ProjectedHeads(projection, x) for projection in (projections.q, projections.k, projections.v))
    call = Call(q, k, v, output, sinks, spec or AttentionSpec(), staging, compute_dtype(x))
    _check(call, x.shape[0], rows)
    return _apply(call)


def upipe_attention_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    staging: Staging,
    spec: AttentionSpec | None = None,
    *,
    sinks: Tensor | None = None,
) -> Tensor:
    """The partial form of :func:`upipe_attention`: heads are projected and rotated already.

    For code that can't hand over its projections. Same schedules, kernels and layouts; beyond its inputs, its
    output and their gradients it allocates the heads of one stage.

    Args:
        q: `[B, L, H, D]` of any strides: this rank's rows of all heads. Of `[L, B, H, D]`, pass ``q.transpose(0, 1)``.
        k: like `q` with K heads.
        v: like `k`, Dv its head size.
        staging, spec, sinks: see :func:`upipe_attention`; modes with the output projection in the stage loop are
            refused, and what ``"keep_heads"`` keeps is beside q, k and v.

    Returns:
        `[B, L, H, Dv]`. Differentiable once, in q, k, v and sinks.

    Raises:
        ValueError: as :func:`upipe_attention`.
    """
    schedule, mode = staging.schedule, staging.mode
    wanted = {"q": schedule.heads, "k": schedule.kv_heads, "v": schedule.kv_heads}
    for (name, heads), t in zip(wanted.items(), (q, k, v), strict=True):
        if t.dim() != 4 or t.shape[:2] != q.shape[:2] or t.shape[2] != heads or t.dtype != q.dtype:
            raise ValueError(
                f"{name} of shape {tuple(t.shape)} and {t.dtype}: must be {q.dtype} [batch, rows of this rank, "
                f"{heads} heads, head size] for this schedule, with batch and rows as q's."
            )
    if mode.output_in_loop:
        raise ValueError(
            f"memory mode {mode.memory!r} of heads that are projected already: use 'keep_heads', 'keep' or 'recompute'."
        )
    if staging.x_group is not None:
        raise ValueError("x_group with heads that are projected already: there is no x. Leave it out.")
    heads_of = (GivenHeads(q), GivenHeads(k), GivenHeads(v))
    call = Call(*heads_of, None, sinks, spec or AttentionSpec(), staging, q.dtype)
    _check(call, q.shape[0], q.shape[1])
    by_head: Tensor = _apply(call).unflatten(2, (schedule.heads, -1))
    return by_head


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype attention of `x` is computed in: autocast's where it is on, else x's own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


def _check_projections(x: Tensor, rows: int, projections: AttentionProjections, schedule: Schedule) -> None:
    for name, projection, heads in (
        ("q", projections.q, schedule.heads),
        ("k", projections.k, schedule.kv_heads),
        ("v", projections.v, schedule.kv_heads),
    ):
        size = projection.head_dim if projection.block is None else projection.block.size
        if projection.projected_dim != projection.head_dim and projection.function is None:
            raise ValueError(
                f"{name} block of {projection.projected_dim} features for heads of {projection.head_dim}: must have as "
                "many, or a function that makes heads of that size of them."
            )
        columns = projection.columns or range(x.shape[2])
        if columns.step != 1 or not 0 <= columns.start < columns.stop <= x.shape[2]:
            raise ValueError(f"{name} columns {columns}: must be consecutive columns of the input's {x.shape[2]}.")
        width = len(columns)
        shape, expected = tuple(projection.weights.weight.shape), (heads * size, width)
        if projection.places is not None:
            _check_places(name, projection.places, heads, shape[0] // size, shape)
            expected = (shape[0], width)
        if shape != expected:
            raise ValueError(
                f"{name} weight of shape {shape}: must be {expected}, {heads} heads of "
                f"{size} by the input size, for this schedule and x."
            )
        bias, low_rank = projection.weights.bias, projection.weights.low_rank
        if bias is not None and tuple(bias.shape) != expected[:1]:
            raise ValueError(f"{name} bias of shape {tuple(bias.shape)}: must be {expected[:1]}.")
        if low_rank is not None:
            _check_low_rank(name, low_rank, shape[0], (x.shape[0], rows))
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


def _check_low_rank(name: str, low: LowRank, features: int, shape: tuple[int, int]) -> None:
    input_shape, weight_shape = tuple(low.input.shape), tuple(low.weight.shape)
    rank = input_shape[-1] if input_shape else 0
    if input_shape != (*shape, rank) or weight_shape != (features, rank):
        raise ValueError(
            f"{name} low-rank term with an input of shape {input_shape} and a weight of shape {weight_shape}: must be "
            f"{(*shape, 'R')}, this rank's rows, and {(features, 'R')}, as the projection's weight."
        )
    if not (low.input.is_floating_point() and low.weight.is_floating_point()):
        raise ValueError(f"{name} low-rank term of {low.input.dtype} and {low.weight.dtype}: must be floating point.")


def _check_places(name: str, places: tuple[int, ...], heads: int, in_weight: int, shape: tuple[int, ...]) -> None:
    if len(set(places)) != heads or len(places) != heads or min(places) < 0 or max(places) >= in_weight:
        raise ValueError(
            f"{name} places {places}: must name {heads} different heads of the {in_weight} in a weight of shape "
            f"{shape}."
        )


def _check_output(output: OutputProjection | None, staging: Staging, projections: AttentionProjections) -> None:
    schedule, mode = staging.schedule, staging.mode
    if output is None and mode.output_in_loop:
        raise ValueError(
            f"memory mode {mode.memory!r} without an output projection: 'fused' and 'blocks' run it in the stage loop. "
            "Pass output=OutputProjection(weight, bias), or use another mode."
        )
    if output is not None:
        width = schedule.heads * projections.v.head_dim
        if output.weight.dim() != 2 or output.weight.shape[1] != width:
            raise ValueError(
                f"output weight of shape {tuple(output.weight.shape)}: must be [output size, {width}], "
                f"{schedule.heads} heads of {projections.v.head_dim}."
            )


def _check(call: Call, batch: int, rows: int) -> None:
    staging, spec, sinks = call.staging, call.spec, call.sinks
    schedule, kernel = staging.schedule, staging.kernel
    if schedule.ranks != group_ranks(staging.group):
        raise ValueError(
            f"the schedule is for {schedule.ranks} ranks, the group has {group_ranks(staging.group)}. "
            "Build the schedule for the group that is passed."
        )
    S = rows * schedule.ranks
    staging.layout.check(S, schedule.ranks)
    q, k, v = call.q, call.k, call.v
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
    longest = kernel.longest(q.head_dim)
    if longest is not None and longest < S:
        raise ValueError(
            f"kernel {kernel.name!r} with a sequence of {S} tokens: it is taken for at most {longest}. Name another "
            "kernel ('upipe.kernel', --upipe-kernel or select_kernel), or shorten the sequence; 'math' by its name has "
            "no limit."
        )
    if staging.mode.query_blocks > 1:
        _check_blocks(call, rows)
    request = KernelRequest(q.device, call.dtype, q.head_dim, v.head_dim, spec, sinks is not None)
    reason = run_while_tracing(_refusal, kernel, request)
    if reason is not None:
        features = ", ".join(request.features())
        raise ValueError(
            f"kernel {kernel.name!r}{f' with {features}' if features else ''}: {reason}. "
            "Choose another kernel (select_kernel('auto', ...) finds one that can)."
        )


def _refusal(kernel: Kernel, request: KernelRequest) -> str | None:
    return kernel.refusal(request)


def _check_blocks(call: Call, rows: int) -> None:
    layout, blocks, kernel = call.staging.layout, call.staging.mode.query_blocks, call.staging.kernel
    if rows % blocks or (layout.half_chunks and blocks % 2):
        even = " and, in a zigzag layout, be even" if layout.half_chunks else ""
        raise ValueError(
            f"query_blocks = {blocks}: must divide the {rows} rows of a rank{even}. Set it to a number that does, or "
            "use memory mode 'fused'."
        )
    if layout.documents is not None:
        raise ValueError(
            "memory mode 'blocks' with a packed zigzag layout: its rows are in too many pieces. Use mode 'fused'."
        )
    reason = kernel.block_refusal(call.spec)
    if reason is not None:
        features = ", ".join(call.spec.features())
        raise ValueError(
            f"memory mode 'blocks' with kernel {kernel.name!r}{f' and {features}' if features else ''}: {reason}. Use "
            "mode 'fused', or another kernel."
        )
    if call.v.head_dim != call.q.head_dim:
        raise ValueError("memory mode 'blocks' with value heads of another size is not supported. Use mode 'fused'.")


def _apply(call: Call) -> Tensor:
    """The call through autograd."""
    compiling = torch.compiler.is_compiling() and not _accumulates(call)
    output, mode = call.output_after, call.staging.mode
    # The output projection is autograd's in a mode that keeps no attention output, and in compiled code under selective
    # checkpointing, which would keep y of every layer beside what was attended.
    if output is not None and (not mode.keeps_output or (compiling and mode.operator)):
        return output.by_autograd(_apply(dataclasses.replace(call, output=None)))
    structure, tensors = take_apart(call)
    if compiling:
        return attention_in_graph(structure, tensors)
    return _apply_directly(structure, *tensors)


def _accumulates(call: Call) -> bool:
    """Whether a weight's gradient is added to a tensor of the caller's, which a graph can't do."""
    into_output = call.output is not None and call.output.accumulate_into is not None
    return into_output or call.q.accumulates or call.k.accumulates or call.v.accumulates


# torch.compiler.disable, without importing the compiler.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _apply_directly(structure: Structure[Call], *tensors: Tensor) -> Tensor:
    result: Tensor = _UPipeAttention.apply(structure, *tensors)  # type: ignore[no-untyped-call]
    return result


class _UPipeAttention(torch.autograd.Function):
    """Autograd's view of the stage loop."""

    @staticmethod
    def forward(ctx: Any, structure: Structure[Call], *tensors: Tensor) -> Tensor:
        call = structure.with_tensors(tensors)
        if call.staging.mode.operator:
            attended, saved = forward_by_operator(structure, list(tensors))
        else:
            attended, saved = run_forward(call)
        ctx.structure, ctx.read = structure, len(tensors)
        ctx.save_for_backward(*tensors, *([attended, *saved] if call.staging.mode.keeps_output else []))
        return project(call, attended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: what is kept is then freed stage by stage
        tensors, kept = saved[: ctx.read], saved[ctx.read :]
        del saved
        return None, *run_backward(ctx.structure, tensors, grad, kept, ctx.needs_input_grad[1:])
