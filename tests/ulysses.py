"""The two steps of a Ulysses written the usual way, by autograd, to stand beside the engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from upipe_integrations import AttentionSpec
from upipe_integrations.kernels import Kernel

_SPEC = AttentionSpec()


class AllToAll(torch.autograd.Function):
    """`[b, L, H, D]` to `[b, S, H/C, D]` over all ranks, or back, in DeepSpeed's order of transposes and copies."""

    @staticmethod
    def forward(ctx, t: torch.Tensor, to_heads: bool) -> torch.Tensor:
        ctx.to_heads = to_heads
        return _exchanged(t, to_heads)

    @staticmethod
    def backward(ctx, grad):
        return _exchanged(grad, not ctx.to_heads), None


def _exchanged(t: torch.Tensor, to_heads: bool) -> torch.Tensor:
    C = dist.get_world_size()
    if to_heads:
        b, L, H, D = t.shape
        send = t.reshape(b, L, C, H // C, D).contiguous().permute(2, 0, 1, 3, 4).contiguous()
    else:
        b, S, n, D = t.shape
        send = t.reshape(b, C, S // C, n, D).contiguous().permute(1, 0, 2, 3, 4).contiguous()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send)
    del send
    if to_heads:
        return received.permute(1, 0, 2, 3, 4).contiguous().reshape(b, C * L, H // C, D).contiguous()
    return received.permute(1, 2, 0, 3, 4).contiguous().reshape(b, S // C, C * n, D).contiguous()


class Attend(torch.autograd.Function):
    """Causal attention `[b, n, S, D]` by a kernel."""

    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel) -> torch.Tensor:
        out, lse = kernel.forward(q, k, v, _SPEC)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx, dout):
        return *ctx.kernel.backward(dout, *ctx.saved_tensors, _SPEC), None
