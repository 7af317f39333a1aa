"""What a local attention kernel is.

Shapes: B batch, n query heads and v KV heads of this rank in one stage (n a multiple of v: query head j
attends KV head ``j // (n / v)``), S the whole sequence, D head size. All tensors are `[B, heads, S, D]`
views of any strides with D contiguous; ``lse`` is ``[B, n, S]`` in the kernel's accumulation precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What is computed, the same for every kernel.

    Args:
        causal: position i attends positions 0..i; otherwise every position attends all.
        scale: factor on the scores; None is ``D ** -0.5``.
    """

    causal: bool = True
    scale: float | None = None

    def scale_for(self, head_dim: int) -> float:
        """The factor on the scores for heads of `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class KernelRequest:
    """What a kernel must serve; decides which one ``auto`` picks."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int


class Kernel(Protocol):
    """Local attention over the whole sequence, with an explicit backward (no autograd graph)."""

    name: str

    def refusal(self, request: KernelRequest) -> str | None:
        """Why this kernel can't serve `request`; None when it can."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of softmax attention."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), in the shapes of q, k, v: gradients of a KV head summed over its query heads."""
        ...


HALF_PRECISION = (torch.float16, torch.bfloat16)


def cuda_flash_refusal(request: KernelRequest) -> str | None:
    """The conditions all flash kernels on CUDA share."""
    if request.device.type != "cuda":
        return f"it needs CUDA tensors, these are on {request.device.type}"
    if request.dtype not in HALF_PRECISION:
        return f"it computes in float16 or bfloat16, these are {request.dtype}"
    if request.head_dim % 8 or request.head_dim > 256:
        return f"it needs a head size that is a multiple of 8 up to 256, this is {request.head_dim}"
    return None
