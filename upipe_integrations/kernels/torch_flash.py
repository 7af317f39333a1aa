"""PyTorch's own flash attention kernels, called as the ATen operators behind scaled_dot_product_attention.

The operators are used rather than the public function because they return the log-sum-exp and come with
an explicit backward, so no autograd graph of a stage is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from upipe_integrations.kernels.base import AttentionSpec, KernelRequest, cuda_flash_refusal

_aten = torch.ops.aten


class TorchCpuFlash:
    """``_scaled_dot_product_flash_attention_for_cpu``: float64, float32 and half precision, GQA natively."""

    name = "torch-cpu-flash"

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        if request.device.type != "cpu":
            return f"it needs CPU tensors, these are on {request.device.type}"
        if not request.dtype.is_floating_point:
            return f"it needs floating-point tensors, these are {request.dtype}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, spec.causal, scale=spec.scale_for(q.shape[3])
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, spec.causal, scale=spec.scale_for(q.shape[3])
        )
        return dq, dk, dv


class TorchCudaFlash:
    """``_scaled_dot_product_flash_attention``: PyTorch's build of FlashAttention 2."""

    name = "torch-cuda-flash"

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        return cuda_flash_refusal(request)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, spec.causal, False, scale=spec.scale_for(q.shape[3])
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        # The random state is read only with dropout; without it any tensors of the right type do.
        unused = torch.empty(2, dtype=torch.int64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            spec.causal,
            unused,
            unused,
            scale=spec.scale_for(q.shape[3]),
        )
        return dq, dk, dv
