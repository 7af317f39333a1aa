"""FlashAttention 2 (the ``flash-attn`` package).

Its low-level functions changed their call form between releases: one ``window_size`` pair up to 2.6, two
``window_size_*`` numbers from 2.7 on; eight results, then four. Arguments are bound by the installed
function's own signature and results are told apart by their number, never by a version string.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upipe_integrations.kernels.base import AttentionSpec, KernelRequest, cuda_flash_refusal

# Every option of every release at the value that switches it off.
_OPTIONS_OFF: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
    "deterministic": False,
    "rng_state": None,
}


class FlashAttention2:
    """``flash_attn.flash_attn_interface._flash_attn_forward`` and ``_flash_attn_backward``, GQA natively."""

    name = "flash-attn-2"

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        reason = cuda_flash_refusal(request)
        if reason is None and importlib.util.find_spec("flash_attn") is None:
            return "the flash-attn package is not installed (pip install 'upipe-integrations[flash]')"
        return reason

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        tensors = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        results = _call("_flash_attn_forward", tensors, spec, q.shape[3])
        out, lse = (results[0], results[5]) if len(results) == 8 else results[:2]
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        tensors = {
            name: tensor.transpose(1, 2) for name, tensor in {"dout": dout, "q": q, "k": k, "v": v, "out": out}.items()
        }
        grads = {f"d{name}": torch.empty_like(tensors[name], memory_format=torch.contiguous_format) for name in "qkv"}
        _call("_flash_attn_backward", {**tensors, "softmax_lse": lse, **grads}, spec, q.shape[3])
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads.values())
        return dq, dk, dv


def _call(name: str, tensors: dict[str, Tensor], spec: AttentionSpec, head_dim: int) -> Any:
    """Call the package's function `name` with as many of our arguments as its signature has."""
    function: Callable[..., Any] = getattr(importlib.import_module("flash_attn.flash_attn_interface"), name)
    wanted = inspect.signature(getattr(function, "_init_fn", function)).parameters
    values = {
        **_OPTIONS_OFF,
        **tensors,
        "softmax_scale": spec.scale_for(head_dim),
        "causal": spec.causal,
    }
    unknown = [key for key, p in wanted.items() if key not in values and p.default is p.empty]
    if unknown:
        raise ValueError(
            f"upipe.kernel = 'flash-attn-2': the installed flash-attn's {name} wants arguments this release does "
            f"not know ({', '.join(unknown)}). Use kernel 'torch-cuda-flash', or a flash-attn release from 2.5 to 2.8."
        )
    return function(**{key: values[key] for key in wanted if key in values})
