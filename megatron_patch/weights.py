"""Reading the weights of Megatron's parallel linear layers as those layers themselves would.

A layer that is not called does not run its hooks, its norm or its gradient accumulation: they are done here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_READ = {"weight", "bias", "layer_norm_weight", "layer_norm_bias"}


def why_not_readable(linear: nn.Module) -> str | None:
    """What `linear` does more than its weight, bias and input norm say, or None.

    Adapters, quantised or split weights and forward hooks would be bypassed.
    """
    parameters = {of for of, _ in linear.named_parameters()}
    if "weight" not in parameters or parameters - _READ:
        return f"has the parameters {', '.join(sorted(parameters))}, not just a weight, a bias and an input norm"
    if linear._forward_hooks:
        return "has forward hooks, which would not run"
    if getattr(linear, "gtp_remat_size", 1) > 1:
        return "holds a weight that is split over ranks once more"
    return None


def is_bare(linear: nn.Module) -> bool:
    """Whether reading `linear` is all that calling it would do: nothing was put around it, forward or backward."""
    added = (linear._backward_hooks, linear._backward_pre_hooks, linear._modules)
    return why_not_readable(linear) is None and "forward" not in vars(linear) and not any(added)


def checked_linear(linear: nn.Module, name: str) -> None:
    """Raise ValueError where :func:`why_not_readable` has a reason."""
    what = why_not_readable(linear)
    if what:
        raise ValueError(
            f"upipe: {name} ({type(linear).__name__}) {what}. UPipe reads this layer's weight directly: remove what "
            "was added, or use --context-parallel-impl native."
        )


def run_pre_hooks(*modules: nn.Module) -> None:
    """Run the forward pre-hooks of modules whose parameters are read.

    With ``--overlap-param-gather`` they wait until the parameters have arrived.
    """
    for module in modules:
        for hook in list(module._forward_pre_hooks.values()):
            hook(module, ())  # type: ignore[operator]


@dataclass(frozen=True)
class QkvPlaces:
    """Where the heads are among those of ``linear_qkv``: per query group its queries, gates, key and value."""

    q: tuple[int, ...]
    gate: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]

    def gate_rows(self, head_dim: int, device: torch.device) -> Tensor:
        """Rows of the weight that make the gates."""
        first = torch.tensor(self.gate, device=device)[:, None] * head_dim
        return (first + torch.arange(head_dim, device=device)).flatten()


def heads_in_qkv(heads: int, groups: int, gated: bool) -> QkvPlaces:
    """The places for `heads` query heads in `groups` groups on one tensor-parallel rank."""
    r = heads // groups
    width = r * (2 if gated else 1) + 2
    starts = [group * width for group in range(groups)]
    return QkvPlaces(
        q=tuple(start + j for start in starts for j in range(r)),
        gate=tuple(start + r + j for start in starts for j in range(r)) if gated else (),
        k=tuple(start + width - 2 for start in starts),
        v=tuple(start + width - 1 for start in starts),
    )


def input_norm(linear: nn.Module) -> Callable[[Tensor], Tensor]:
    """The norm that Transformer Engine's ``LayerNormLinear`` applies to its input; the identity elsewhere.

    Differentiated by autograd, which returns the gradients of its weight and bias.
    """
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return _identity
    bias, eps = getattr(linear, "layer_norm_bias", None), linear.eps
    zero_centered, kind = linear.zero_centered_gamma, linear.normalization

    def norm(x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        # 1 + gamma is rounded once, to the activations' precision, as the product with it is.
        gain = (
            (weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1).to(x.dtype) if zero_centered else weight
        )
        if kind == "RMSNorm":
            return nn.functional.rms_norm(x, shape, gain, eps)
        return nn.functional.layer_norm(x, shape, gain, bias, eps)

    if kind not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"upipe: an input norm of kind {kind!r}: UPipe knows LayerNorm and RMSNorm.")
    return norm


def _identity(x: Tensor) -> Tensor:
    return x


# ---------------------------------------------------------------- gradients into main_grad


def main_grad_of(linear: nn.Module) -> Tensor | None:
    """The buffer that Megatron accumulates the weight's gradient in, where it lets the layer's backward do so."""
    fused = getattr(linear, "gradient_accumulation_fusion", False) or getattr(linear, "fuse_wgrad_accumulation", False)
    weight: Any = linear.weight
    if not fused or not weight.requires_grad:
        return None
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    return main_grad


def with_gradient_in_main_grad(linear: nn.Module) -> Tensor:
    """The layer's weight; where its gradient goes to ``main_grad``, it tells Megatron's hooks so in backward."""
    weight: Any = linear.weight
    if main_grad_of(linear) is None:
        return weight  # type: ignore[no-any-return]
    marked: Tensor = _AddedToMainGrad.apply(weight)  # type: ignore[no-untyped-call]
    return marked


class _AddedToMainGrad(torch.autograd.Function):
    """Gives the weight a gradient of no meaning, as Megatron's own fused layers do.

    Megatron's hook on the parameter must run (it starts the reduction), and finds by ``grad_added_to_main_grad``
    that there is nothing to add.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        weight = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        fill = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return fill(weight)
