"""Reading the weights of Megatron's parallel linear layers as those layers themselves would.

A layer that is not called does not run its hooks, its norm or its gradient accumulation: this file does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_patch.stock import addition
from upipe_integrations.constants import constant


class ParallelLinear(nn.Module):
    """For annotations: what all linear layers have that are read, Megatron's and Transformer Engine's.

    Attributes:
        weight: `[outputs, inputs]` of this tensor-parallel rank.
        bias: `[outputs]`; of no meaning where the layer was built without one.
    """

    weight: nn.Parameter
    bias: Tensor | None


_READ = {"weight", "bias", "layer_norm_weight", "layer_norm_bias"}


def read_refusal(linear: nn.Module) -> str | None:
    """Why the weight of `linear` can't be read directly; None where it can. The text goes on after the layer's name.

    Adapters, quantised or split weights, hooks and a forward in the place of the class's would be bypassed.
    """
    parameters = {name for name, _ in linear.named_parameters()}
    if "weight" not in parameters or parameters - _READ:
        return f"has the parameters {', '.join(sorted(parameters))}, not just a weight, a bias and an input norm"
    added = addition(linear)
    if added is not None:
        return added
    if getattr(linear, "gtp_remat_size", 1) > 1:
        return "holds a weight that is split over ranks once more"
    return None


def is_unmodified(linear: nn.Module) -> bool:
    """Whether reading `linear` is all that calling it would do: nothing was put around it, forward or backward."""
    return read_refusal(linear) is None and not linear._modules


def check_linear(linear: nn.Module, name: str) -> None:
    """Raise ValueError where :func:`read_refusal` has a reason."""
    reason = read_refusal(linear)
    if reason is not None:
        raise ValueError(
            f"upipe: {name} ({type(linear).__name__}) {reason}. UPipe reads this layer's weight directly: remove what "
            "was added, or use --context-parallel-impl native."
        )


def run_pre_hooks(*modules: nn.Module | None) -> None:
    """Run the forward pre-hooks of modules whose parameters are read; None is passed over.

    With ``--overlap-param-gather`` they wait until the parameters have arrived.
    """
    for module in modules:
        if module is not None:
            for hook in list(module._forward_pre_hooks.values()):
                hook(module, ())


@dataclass(frozen=True)
class QkvPlaces:
    """Where heads are among all heads that ``linear_qkv`` makes on one tensor-parallel rank.

    The weight is `[outputs, h]`, and its outputs go by query group (KV head): the group's queries, their gates where
    attention is gated, its key, its value. A tensor-parallel rank holds whole groups, those of rank 0 first. With 8
    query heads in 4 groups on 2 tensor-parallel ranks (q0 is a head: head_dim outputs)::

        tensor-parallel rank    0                                     1
        group                   0                  1                  2                  3
        heads                   q0 q1 k0 v0        q2 q3 k1 v1        q4 q5 k2 v2        q6 q7 k3 v3
        place on its rank       0  1  2  3         4  5  6  7         0  1  2  3         4  5  6  7
        heads, with gates       q0 q1 g0 g1 k0 v0  q2 q3 g2 g3 k1 v1  q4 q5 g4 g5 k2 v2  q6 q7 g6 g7 k3 v3
        place on its rank       0  1  2  3  4  5   6  7  8  9  10 11  0  1  2  3  4  5   6  7  8  9  10 11

    The head at place p is the rank's outputs ``p * head_dim ... (p + 1) * head_dim - 1``.

    Attributes:
        q, gate, k, v: places, in the order of the query heads or groups of the rank; no gates without gated attention.
    """

    q: tuple[int, ...]
    gate: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]

    def gate_outputs(self, head_dim: int, like: Tensor) -> Tensor:
        """The outputs of ``linear_qkv`` that are gates, in the order of the query heads: `[query heads * head_dim]`.

        `like` is a tensor that is where they are needed.
        """
        first = constant(self.gate, like)[:, None] * head_dim
        return (first + torch.arange(head_dim, device=like.device)).flatten()


def qkv_places(heads: int, groups: int, gated: bool) -> QkvPlaces:
    """The places of `heads` query heads in `groups` query groups: those of one tensor-parallel rank."""
    r = heads // groups
    width = r * (2 if gated else 1) + 2
    starts = [group * width for group in range(groups)]
    return QkvPlaces(
        q=tuple(start + j for start in starts for j in range(r)),
        gate=tuple(start + r + j for start in starts for j in range(r)) if gated else (),
        k=tuple(start + width - 2 for start in starts),
        v=tuple(start + width - 1 for start in starts),
    )


def input_norm(linear: Any) -> Callable[[Tensor], Tensor]:
    """The norm that Transformer Engine's ``LayerNormLinear`` applies to its input; the identity elsewhere.

    `[s, b, h]` -> `[s, b, h]`, differentiated by autograd, which returns the gradients of its weight and bias.

    Raises:
        ValueError: a norm other than LayerNorm and RMSNorm.
    """
    weight: Tensor | None = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return _identity
    bias: Tensor | None = getattr(linear, "layer_norm_bias", None)
    eps: float = linear.eps
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


def main_grad_buffer(linear: ParallelLinear) -> Tensor | None:
    """The buffer that the weight's gradient is accumulated in, in the weight's shape.

    None where Megatron does not let the layer's backward do so, and autograd's gradient is what it takes.
    """
    # Megatron's layers have the first of these names, Transformer Engine's the second.
    in_backward = getattr(linear, "gradient_accumulation_fusion", False) or getattr(
        linear, "fuse_wgrad_accumulation", False
    )
    if not in_backward or not linear.weight.requires_grad:
        return None
    main_grad: Tensor | None = getattr(linear.weight, "main_grad", None)
    return main_grad


def weight_read(linear: ParallelLinear) -> Tensor:
    """The layer's weight; where its gradient goes to ``main_grad``, it tells Megatron's hooks so in backward."""
    weight = linear.weight
    if main_grad_buffer(linear) is None:
        return weight
    marked: Tensor = _AddedToMainGrad.apply(weight)  # type: ignore[no-untyped-call]
    return marked


class _AddedToMainGrad(torch.autograd.Function):
    """Gives the weight a gradient of no meaning, as Megatron's own layers do that accumulate in ``main_grad``.

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
