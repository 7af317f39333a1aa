"""Any differentiable attention function as a kernel: run again per stage, under autograd, in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.kernels.base import AttentionSpec, Kernel, KernelRequest


@dataclass(frozen=True)
class FunctionKernel(Kernel):
    """The kernel-agnostic route, for attention that no other kernel computes.

    Args:
        function: ``function(q, k, v, spec) -> out`` of `[B, heads, S, D]` tensors, GQA as it comes; it is
            given the spec and must honour all of it. Differentiable; run once more in backward.
        name: for messages.
    """

    function: Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]
    name: str = "function"

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        return "a function returns no log-sum-exp to merge sinks into: do it in the function" if request.sinks else None

    def lse_like(self, q: Tensor) -> Tensor:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        return q.new_empty(0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`; the lse is empty."""
        return self.function(q, k, v, spec), q.new_empty(0)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            again = self.function(leaves[0], leaves[1], leaves[2], spec)
        dq, dk, dv = torch.autograd.grad(again, leaves, dout)
        return dq, dk, dv
