"""FlashAttention 2, 3 and 4 (packages ``flash-attn``, ``flash-attn-3``, ``flash-attn-4``).

Their low-level functions change call form between releases: a ``window_size`` pair or two numbers, eight
results or four, ``causal`` or ``is_causal``. Arguments are bound by the installed function's own signature and
results are told apart by their number, never by a version string. The signatures bound here were read from
flash-attn 2.5 to 2.8, flash_attn_interface (hopper) and flash-attn-4 4.0.0b10 to b36.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upipe_integrations.kernels.base import (
    DOCUMENTS,
    SINKS,
    SOFTCAP,
    VALUE_SIZE,
    WINDOW,
    AttentionSpec,
    KernelRequest,
    cuda_refusal,
    unserved,
)
from upipe_integrations.kernels.flash_form import FlashForm, Packing


class _FlashPackage(FlashForm):
    """One FlashAttention package; subclasses say where it is and what it is called."""

    name: str
    package: str
    module: str
    install: str
    served: tuple[str, ...]
    capabilities: range
    no_window: Any = -1
    dense_forward: str
    packed_forward: str
    dense_backward: str
    packed_backward: str

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        reason = cuda_refusal(request) or unserved(request, self.served)
        if reason is None and not _is_installed(self.package):
            reason = f"it is not installed ({self.install})"
        if reason is None and torch.cuda.is_available():
            major = torch.cuda.get_device_capability(request.device)[0]
            if major not in self.capabilities:
                reason = f"it is not made for GPUs of compute capability {major}"
        return reason

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, packing: Packing | None
    ) -> tuple[Tensor, Tensor]:
        name = self.dense_forward if packing is None else self.packed_forward
        results = self._call(name, {"q": q, "k": k, "v": v}, spec, q.shape[-1], packing)
        # Up to flash-attn 2.6: out, q, k, v, padded out, lse, probabilities, random state.
        return (results[0], results[5]) if len(results) == 8 else (results[0], results[1])

    def _gradients(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        name = self.dense_backward if packing is None else self.packed_backward
        values = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
        self._call(name, {**values, "softmax_lse": lse, "lse": lse}, spec, q.shape[-1], packing)
        return dq, dk, dv

    def _call(
        self, name: str, tensors: dict[str, Tensor], spec: AttentionSpec, head_dim: int, packing: Packing | None
    ) -> Any:
        """Call the package's function `name` with as many of our arguments as its signature has."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), name)
        wanted = inspect.signature(getattr(function, "_init_fn", function)).parameters
        left = self.no_window if spec.window is None else spec.window - 1
        right = self.no_window if spec.window is None else 0
        values: dict[str, Any] = {
            "softmax_scale": spec.scale_for(head_dim),
            "causal": spec.causal,
            "is_causal": spec.causal,
            "window_size": (left, right),
            "window_size_left": left,
            "window_size_right": right,
            "softcap": spec.softcap or 0.0,
            **_OFF,
            **tensors,
        }
        if packing is not None:
            values |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), packing.cu_seqlens)
            values |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), packing.longest)
        unknown = [key for key, p in wanted.items() if key not in values and p.default is p.empty]
        if unknown:
            raise ValueError(
                f"upipe.kernel = {self.name!r}: the installed {self.package}'s {name} wants arguments this release "
                f"does not know ({', '.join(unknown)}). Use kernel 'torch-cuda-flash', or another release of it."
            )
        missing = [key for key in _needed(spec, packing) if key not in wanted and f"{key}_left" not in wanted]
        if missing:
            raise ValueError(
                f"upipe.kernel = {self.name!r}: the installed {self.package}'s {name} has no {', '.join(missing)}, "
                "which this model needs. Install a newer release of it, or use kernel 'auto'."
            )
        return function(**{key: values[key] for key in wanted if key in values})


# Options at the value that switches them off, where a release has no default for them.
_OFF: dict[str, Any] = {
    "dropout_p": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
    "return_lse": True,
    "deterministic": False,
    "rng_state": None,
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k", "sequed_q")
        + ("sequed_k", "block_table", "leftpad_k")
    ),
}


def _needed(spec: AttentionSpec, packing: Packing | None) -> list[str]:
    """Arguments without which the request would silently be another one."""
    needed = ["window_size"] if spec.window is not None else []
    needed += ["softcap"] if spec.softcap is not None else []
    return needed + (["cu_seqlens_q"] if packing is not None else [])


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


class FlashAttention2(_FlashPackage):
    """``flash_attn.flash_attn_interface``."""

    name = "flash-attn-2"
    package = "flash_attn.flash_attn_interface"
    module = "flash_attn.flash_attn_interface"
    install = "pip install 'upipe-integrations[flash]'"
    served = (WINDOW, SOFTCAP, DOCUMENTS, SINKS)
    capabilities = range(8, 100)
    dense_forward, packed_forward = "_flash_attn_forward", "_flash_attn_varlen_forward"
    dense_backward, packed_backward = "_flash_attn_backward", "_flash_attn_varlen_backward"


class FlashAttention3(_FlashPackage):
    """``flash_attn_interface``, for Hopper; value heads may have a size of their own."""

    name = "flash-attn-3"
    package = "flash_attn_interface"
    module = "flash_attn_interface"
    install = "build the hopper folder of flash-attention, or pip install flash-attn-3"
    served = (WINDOW, SOFTCAP, DOCUMENTS, SINKS, VALUE_SIZE)
    capabilities = range(9, 10)
    dense_forward = packed_forward = "_flash_attn_forward"
    dense_backward = packed_backward = "_flash_attn_backward"


class FlashAttention4(_FlashPackage):
    """``flash_attn.cute.interface``, for Hopper and Blackwell."""

    name = "flash-attn-4"
    package = "flash_attn.cute.interface"
    module = "flash_attn.cute.interface"
    install = "pip install --pre flash-attn-4"
    served = (WINDOW, SOFTCAP, DOCUMENTS, SINKS)
    capabilities = range(9, 100)
    no_window = None
    dense_forward = packed_forward = "_flash_attn_fwd"
    dense_backward = packed_backward = "_flash_attn_bwd"
