"""Local attention kernels behind one small interface, and the choice among them.

A kernel is an object (see ``base.Kernel``) with ``forward(q, k, v, spec) -> out, lse`` and an explicit
``backward``; the staged engine knows nothing else about it.
"""

from __future__ import annotations

import functools
import warnings

import torch

from upipe_integrations.kernels.base import (
    AttentionSpec,
    Dropout,
    Kernel,
    KernelRequest,
    capability,
    must_be_deterministic,
)
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
    "order_of_preference",
    "select_kernel",
]

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        FlashAttention3(),
        FlashAttention2(),
        FlashAttention4(),
        TorchCudaFlash(),
        TorchCudnn(),
        TorchEfficient(),
        TorchCpuFlash(),
        MathKernel(),
    )
}
"""Kernels by the name a user sets."""

_FIRST_BY_CAPABILITY = {
    # Hopper: cuDNN is 1.7 to 2.3 times as fast as FlashAttention 2 in public measurements (pytorch#142132), and
    # PyTorch's own first choice; FlashAttention 3 is as fast, and has windows and documents.
    9: ("flash-attn-3", "torch-cudnn", "flash-attn-2", "torch-cuda-flash", "flash-attn-4"),
    # Blackwell: PyTorch's own first choice again. FlashAttention 4 is a beta, for what cuDNN does not do.
    10: ("torch-cudnn", "flash-attn-4", "flash-attn-2", "torch-cuda-flash", "flash-attn-3"),
}
_FIRST = ("flash-attn-3", "flash-attn-2", "torch-cuda-flash", "flash-attn-4", "torch-cudnn")
"""On other GPUs, for which FlashAttention 2 is written, and where the capability is not known."""

_OF_NO_GPU = ("torch-cpu-flash", "math")

_LAST = ("torch-efficient", "torch-cpu-flash", "math")

_LONGEST_BY_MATH = 32768
"""Tokens up to which ``auto`` takes plain attention on a GPU, where a layer of 32 heads takes seconds."""

_LAST_RESORT = MathKernel(_LONGEST_BY_MATH)


def order_of_preference(device: torch.device) -> list[Kernel]:
    """All kernels, the one first that ``auto`` asks first on `device`. ``benchmarks/proof.py`` measures the order."""
    major, _ = capability(device) or (0, 0)
    return [KERNELS[name] for name in (*_FIRST_BY_CAPABILITY.get(major, _FIRST), *_LAST)]


def select_kernel(name: str, request: KernelRequest) -> Kernel:
    """The kernel called `name`, or for ``"auto"`` the best on the request's device of those that serve it.

    Where only plain attention (``"math"``) serves it on a GPU, ``"auto"`` takes that with a warning that has every
    other kernel's reason, for sequences up to 32,768 tokens. With ``torch.use_deterministic_algorithms`` only kernels
    whose backward is deterministic are taken.

    Raises:
        ValueError: the named kernel can't serve the request; the reason and those that can are named.
    """
    return _select(name, request, must_be_deterministic(), torch.backends.cuda.cudnn_sdp_enabled())


# Asking every kernel looks for packages on disk: once for a request, not in every layer of every forward. The last two
# are settings of the process that kernels look at.
@functools.lru_cache(maxsize=64)
def _select(name: str, request: KernelRequest, deterministic: bool, cudnn: bool) -> Kernel:
    able = [kernel for kernel in order_of_preference(request.device) if kernel.refusal(request) is None]
    if name == "auto":
        if request.blocks:  # but rather a message that blocks can't be had than plain attention on a GPU
            in_blocks = [kernel for kernel in able if kernel.block_refusal(request.spec) is None]
            able = [k for k in in_blocks if k.name != "math" or request.device.type != "cuda"] or able
        if able[0].name != "math" or request.device.type != "cuda":
            return able[0]
        reasons = [f"{k.name}: {k.refusal(request)}" for k in KERNELS.values() if k.name not in _OF_NO_GPU]
        warnings.warn(
            "UPipe: attention runs by plain products and a softmax, which is slow, as no other kernel can serve this: "
            f"{'; '.join(reasons)}.",
            stacklevel=3,
        )
        return _LAST_RESORT
    kernel = KERNELS[name]
    reason = kernel.refusal(request)
    if reason is not None:
        raise ValueError(
            f"upipe.kernel = {name!r}: it can't serve this model: {reason}. "
            f"Use 'auto' or one of: {', '.join(k.name for k in able)}."
        )
    return kernel
