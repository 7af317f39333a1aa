"""The layer of a case on one rank, through the engine."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
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


def rank_main(rank: int, port: int, cases: Sequence[Case], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's, which ends its ranks
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks, on_gpu = cases[0].ranks, cases[0].device == "cuda"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        if on_gpu:
            torch.cuda.set_device(rank)
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
        for case in cases:
            try:
                results = sharded(case, rank)
            except ValueError as refusal:
                pipe.send((None, str(refusal)))
                continue
            # As arrays: a process that ends must not leave shared memory behind.
            pipe.send((None, {name: t.double().cpu().numpy() for name, t in results.items()}))
    except Exception:
        pipe.send((traceback.format_exc(), None))
    if dist.is_initialized():
        dist.destroy_process_group()


def sharded(case: Case, rank: int) -> dict[str, Tensor]:
    """This rank's output rows and gradients through the engine."""
    device = torch.device(case.device, rank) if case.device == "cuda" else torch.device("cpu")
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
