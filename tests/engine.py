"""Running a reference layer through the engine on the ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.reference import Layer
from upipe_integrations import (
    AttentionProjections,
    AttentionSpec,
    Dropout,
    HeadFunction,
    Layout,
    Mode,
    OutputProjection,
    Projection,
    RotateHalf,
    Schedule,
    Staging,
    Weights,
    upipe_attention,
    upipe_attention_qkv,
)
from upipe_integrations.kernels import KERNELS, Kernel

PRODUCTS_IN_PLACE = {torch.ops.aten.addmm_: lambda total, left, right, **options: 2 * left[0] * left[1] * right[1]}
"""What PyTorch's counter of flops leaves out, as its ``custom_mapping``."""


# Boundaries that cut through shards of 2, 3 and 4 ranks; rows of a batch that differ.
FEATURES = {
    "documents": {"documents": ((0, 3, 4, 17, 24),)},
    "documents by row": {"documents": ((0, 7, 24), (0, 24), (0, 1, 2, 13, 24))},
    "window": {"window": 5},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": 0.3},
    "other value size": {"value_dim": 12},
    "smaller value size": {"value_dim": 4},
    "norm and bias": {"norm": True, "bias": True},
    "full": {"causal": False},
}
# What a kernel is not asked to do.
UNSERVED = {"torch-cpu-flash": {"softcap"}}
LAYOUTS = {"contiguous": Layout.contiguous(), "zigzag": Layout.zigzag()}


def per_head_norm(heads: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(heads, heads.shape[-1:], gain, 1e-6)


def projections_of(layer: Layer, leaves: dict[str, torch.Tensor], rows) -> AttentionProjections:
    """`rows` (a slice or row numbers) are the rank's rows."""
    rotary = None if layer.cos is None else RotateHalf(layer.cos[:, rows], layer.sin[:, rows])

    def projection(name: str, head_dim: int, gain: str | None, rotary: RotateHalf | None) -> Projection:
        function = HeadFunction(per_head_norm, (leaves[gain],)) if gain in leaves else None
        return Projection(
            Weights(leaves[f"w{name}"], leaves.get(f"b{name}")), head_dim, function=function, rotary=rotary
        )

    return AttentionProjections(
        projection("q", layer.head_dim, "q_gain", rotary),
        projection("k", layer.head_dim, "k_gain", rotary),
        projection("v", layer.value_dim, None, None),
    )


def spec_of(layer: Layer, dropout: Dropout | None = None) -> AttentionSpec:
    return AttentionSpec(layer.causal, layer.scale, layer.window, layer.softcap, dropout, layer.documents)


def run_sharded(
    layer: Layer,
    chunk_heads: int,
    group: dist.ProcessGroup | None,
    kernel: str | Kernel = "math",
    *,
    layout: Layout | None = None,
    dropout: Dropout | None = None,
    partial: str | None = None,
    mode: Mode | None = None,
    outside: bool = False,
) -> dict[str, torch.Tensor]:
    """Output and gradients as :func:`tests.reference.reference` gives them: full sequence, summed over ranks.

    `partial` runs the form for given heads: "batch" or "sequence" first. `outside`: the output projection is not part
    of the call.
    """
    C = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    S = layer.x.shape[1]
    rows = (layout or Layout()).rows(rank, S, C)
    leaves = {name: t.clone() for name, t in layer.leaves().items()}
    leaves["x"] = leaves["x"][:, rows].clone()
    for t in leaves.values():
        t.requires_grad_()
    schedule = Schedule.build(heads=layer.heads, kv_heads=layer.kv_heads, ranks=C, chunk_heads=chunk_heads)
    chosen = KERNELS[kernel] if isinstance(kernel, str) else kernel
    projections = projections_of(layer, leaves, rows)
    spec, sinks = spec_of(layer, dropout), leaves.get("sinks")
    if partial is None:
        given = "wo" in leaves and not outside
        out = upipe_attention(
            leaves["x"],
            projections,
            Staging(schedule, group, chosen, layout=layout, mode=mode),
            spec,
            sinks=sinks,
            output=OutputProjection(leaves["wo"], leaves.get("bo")) if given else None,
        )
        if "wo" in leaves and not given:
            out = torch.nn.functional.linear(out, leaves["wo"], leaves.get("bo"))
    else:
        first = partial == "sequence"
        q, k, v = (_projected(p, leaves["x"]) for p in (projections.q, projections.k, projections.v))
        if first:  # as sequence-first code has them: views of contiguous `[L, B, N, D]`
            q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v))
        out = upipe_attention_qkv(
            q, k, v, Staging(schedule, group, chosen, layout=layout, mode=mode), spec, sinks=sinks
        )
        out = out.flatten(2)
    out.backward(layer.dout[:, rows])
    results = {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items()}}
    for name, t in results.items():
        if name in ("out", "dx"):
            results[name] = _gathered(t, group, C, layout or Layout())
        elif C > 1:
            dist.all_reduce(t, group=group)
    return results


def _projected(projection: Projection, x: torch.Tensor) -> torch.Tensor:
    """All heads `[B, L, N, D]`, by autograd: what a caller of the partial form has."""
    heads = torch.nn.functional.linear(x, projection.weights.weight, projection.weights.bias).unflatten(
        2, (-1, projection.head_dim)
    )
    if projection.function is not None:
        heads = projection.function.function(heads, *projection.function.tensors)
    if projection.rotary is not None:
        cos, sin = projection.rotary.cos[:, :, None], projection.rotary.sin[:, :, None]
        half = heads.shape[-1] // 2
        heads = heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sin
    return heads


def _gathered(t: torch.Tensor, group: dist.ProcessGroup | None, ranks: int, layout: Layout) -> torch.Tensor:
    parts = [t]
    if ranks > 1:
        parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, t.contiguous(), group=group)
    # Row by row, not by Layout.collect, which is under test too.
    whole = torch.empty(t.shape[0], t.shape[1] * ranks, *t.shape[2:], dtype=t.dtype)
    for rank, part in enumerate(parts):
        for i, row in enumerate(layout.rows(rank, whole.shape[1], ranks).tolist()):
            whole[:, row] = part[:, i]
    return whole


def relative_errors(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference over largest value, by tensor; every tensor wanted must be there."""
    assert got.keys() == wanted.keys()
    assert all(torch.isfinite(t).all() for t in got.values())
    return {name: float((got[name] - t).abs().max() / t.abs().max()) for name, t in wanted.items()}
