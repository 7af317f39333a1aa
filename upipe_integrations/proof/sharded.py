"""The layer of a case on one rank, through the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from upipe_integrations.attention import upipe_attention, upipe_attention_qkv
from upipe_integrations.engine.call import Staging
from upipe_integrations.kernels import select_kernel
from upipe_integrations.projections.head_function import HeadFunction
from upipe_integrations.projections.output import OutputProjection
from upipe_integrations.projections.projection import AttentionProjections, Projection, Weights
from upipe_integrations.projections.rotary import RotateHalf
from upipe_integrations.proof.case import Case, angles, layer_tensors


def outcomes(cases: Sequence[Case]) -> Iterator[dict[str, Tensor] | str]:
    """This rank's tensors of every case, in float64, or why the engine refuses it, which all ranks do alike."""
    for case in cases:
        try:
            results = sharded(case, dist.get_rank())
        except ValueError as refusal:
            yield str(refusal)
        else:
            yield {name: t.double().cpu() for name, t in results.items()}


def sharded(case: Case, rank: int) -> dict[str, Tensor]:
    """This rank's output rows and gradients through the engine."""
    number = 0 if case.one_device else rank
    device = torch.device(case.device, number) if case.device == "cuda" else torch.device("cpu")
    rows = case.layout.rows(rank, case.seq_len, case.ranks)
    leaves = {name: t.to(device) for name, t in layer_tensors(case).items()}
    dout = leaves.pop("dout")[:, rows.to(device)]
    leaves["x"] = leaves["x"][:, rows.to(device)]
    for t in leaves.values():
        t.requires_grad_()
    turns = torch.cat([angles(case)[rows]] * 2, -1)[None].to(device)
    rotary = RotateHalf(turns.cos().to(case.dtype), turns.sin().to(case.dtype))

    def projection(name: str, head_dim: int, rotary: RotateHalf | None) -> Projection:
        norm = HeadFunction(_norm, (leaves[f"{name}_norm"],)) if f"{name}_norm" in leaves else None
        return Projection(Weights(leaves[f"w{name}"], leaves.get(f"b{name}")), head_dim, norm, rotary)

    projections = AttentionProjections(
        projection("q", case.head_dim, rotary),
        projection("k", case.head_dim, rotary),
        projection("v", case.value_dim or case.head_dim, None),
    )
    kernel = select_kernel(case.kernel, case.request())
    staging = Staging(case.schedule(), dist.group.WORLD, kernel, layout=case.layout, mode=case.config().mode)
    sinks = leaves.get("sinks")
    if case.partial:
        q, k, v = (_all_heads(p, leaves["x"]) for p in (projections.q, projections.k, projections.v))
        out = upipe_attention_qkv(q, k, v, staging, case.spec, sinks=sinks).flatten(2)
    else:
        output = OutputProjection(leaves["wo"], leaves.get("bo"))
        out = upipe_attention(leaves["x"], projections, staging, case.spec, sinks=sinks, output=output)
    out.backward(dout)
    return {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}}


def _norm(heads: Tensor, gain: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(heads, heads.shape[-1:], gain, 1e-6)


def _all_heads(projection: Any, x: Tensor) -> Tensor:
    """Projected, normed and rotated heads `[B, L, N, D]` under autograd: what a caller of the partial form has."""
    heads: Tensor = torch.nn.functional.linear(x, projection.weights.weight, projection.weights.bias)
    heads = heads.unflatten(2, (-1, projection.head_dim))
    if projection.function is not None:
        heads = projection.function.function(heads, *projection.function.tensors)
    if projection.rotary is not None:
        cos, sin = projection.rotary.cos[:, :, None], projection.rotary.sin[:, :, None]
        half = heads.shape[-1] // 2
        heads = heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sin
    return heads
