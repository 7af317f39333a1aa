"""Local attention kernels behind one small interface, and the choice among them.

A kernel is an object (see ``base.Kernel``) with ``forward(q, k, v, spec) -> out, lse`` and an explicit
``backward``; the staged engine knows nothing else about it.
"""

from __future__ import annotations

import functools

from upipe_integrations.kernels.base import AttentionSpec, Dropout, Kernel, KernelRequest
from upipe_integrations.kernels.flash_attn import FlashAttention2, FlashAttention3, FlashAttention4
from upipe_integrations.kernels.function import FunctionKernel
from upipe_integrations.kernels.math import MathKernel
from upipe_integrations.kernels.torch_flash import TorchCpuFlash, TorchCudaFlash, TorchCudnn, TorchEfficient

__all__ = [
    "KERNELS",
    "AttentionSpec",
    "Dropout",
    "FlashAttention2",
    "FlashAttention3",
    "FlashAttention4",
    "FunctionKernel",
    "Kernel",
    "KernelRequest",
    "MathKernel",
    "TorchCpuFlash",
    "TorchCudaFlash",
    "TorchCudnn",
    "TorchEfficient",
    "select_kernel",
]

_IN_ORDER_OF_PREFERENCE: tuple[Kernel, ...] = (
    FlashAttention3(),
    FlashAttention2(),
    FlashAttention4(),
    TorchCudaFlash(),
    TorchCudnn(),
    TorchEfficient(),
    TorchCpuFlash(),
    MathKernel(),
)

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _IN_ORDER_OF_PREFERENCE}
"""Kernels by the name a user sets; ``auto`` takes the first that serves the request."""


# Asking every kernel looks for packages on disk: once for a request, not in every layer of every forward.
@functools.lru_cache(maxsize=64)
def select_kernel(name: str, request: KernelRequest) -> Kernel:
    """The kernel called `name`, or for ``"auto"`` the first of ``KERNELS`` that serves `request`.

    Raises:
        ValueError: the named kernel can't serve the request; the reason and those that can are named.
    """
    able = [kernel for kernel in _IN_ORDER_OF_PREFERENCE if kernel.refusal(request) is None]
    if name == "auto":
        return able[0]
    kernel = KERNELS[name]
    reason = kernel.refusal(request)
    if reason is not None:
        raise ValueError(
            f"upipe.kernel = {name!r}: it can't serve this model: {reason}. "
            f"Use 'auto' or one of: {', '.join(k.name for k in able)}."
        )
    return kernel
