"""Running a reference layer through the engine on the ranks of a group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.reference import Layer
from upipe_integrations import (
    AttentionProjections,
    AttentionSpec,
    HeadFunction,
    Projection,
    RotateHalf,
    UPipeConfig,
    upipe_attention,
)
from upipe_integrations.kernels import KERNELS


def per_head_norm(heads: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(heads, heads.shape[-1:], gain, 1e-6)


def projections_of(layer: Layer, leaves: dict[str, torch.Tensor], rows: slice) -> AttentionProjections:
    rotary = None if layer.cos is None else RotateHalf(layer.cos[:, rows], layer.sin[:, rows])

    def projection(name: str, gain: str | None, rotary: RotateHalf | None) -> Projection:
        function = HeadFunction(per_head_norm, (leaves[gain],)) if gain in leaves else None
        return Projection(leaves[f"w{name}"], layer.head_dim, leaves.get(f"b{name}"), function, rotary)

    return AttentionProjections(
        projection("q", "q_gain", rotary), projection("k", "k_gain", rotary), projection("v", None, None)
    )


def run_sharded(layer: Layer, chunk_heads: int, group: dist.ProcessGroup | None, kernel: str = "math"):
    """Output and gradients as :func:`tests.reference.reference` gives them: full sequence, summed over ranks."""
    ranks = 1 if group is None else dist.get_world_size(group)
    rank = 0 if group is None else dist.get_rank(group)
    L = layer.x.shape[1] // ranks
    rows = slice(rank * L, (rank + 1) * L)
    leaves = {name: t.clone() for name, t in layer.leaves().items()}
    leaves["x"] = leaves["x"][:, rows].clone()
    for t in leaves.values():
        t.requires_grad_()
    schedule = UPipeConfig(chunk_heads, kernel).schedule(heads=layer.heads, kv_heads=layer.kv_heads, ranks=ranks)
    out = upipe_attention(
        leaves["x"],
        projections_of(layer, leaves, rows),
        schedule,
        group,
        KERNELS[kernel],
        AttentionSpec(causal=layer.causal),
    )
    out.backward(layer.dout[:, rows])
    results = {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items()}}
    for name, t in results.items():
        if name in ("out", "dx"):
            results[name] = _gathered(t, group, ranks)
        elif ranks > 1:
            dist.all_reduce(t, group=group)
    return results


def _gathered(t: torch.Tensor, group: dist.ProcessGroup | None, ranks: int) -> torch.Tensor:
    if ranks == 1:
        return t
    parts = [torch.empty_like(t) for _ in range(ranks)]
    dist.all_gather(parts, t.contiguous(), group=group)
    return torch.cat(parts, 1)


def relative_errors(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest difference over largest value, by tensor; every tensor wanted must be there."""
    assert got.keys() == wanted.keys()
    assert all(torch.isfinite(t).all() for t in got.values())
    return {name: float((got[name] - t).abs().max() / t.abs().max()) for name, t in wanted.items()}
