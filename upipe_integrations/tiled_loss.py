"""Log-probabilities of target tokens from hidden states, with logits of a few rows at a time.

Whole logits of a long shard are larger than anything attention allocates (Llama3-8B, 131072 rows: 94 GiB with
their float32 copy). Invariant kept here: no tensor of more than one tile's rows has a vocabulary dimension, in
forward or backward. Backward computes a tile's logits again; the head's weight gets one gradient, whole, so it
may be tied to the embedding, frozen, or partitioned.

Shapes: B batch, L rows of one rank, E hidden size, V vocabulary, t rows of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from upipe_integrations.sharding import IGNORED

TILE_ROWS = 1024
"""Rows of a tile: enough for a full-speed matrix product, 0.5 GiB of float32 logits at a vocabulary of 128256."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shifted_labels: Tensor,
    *,
    logits_function: Callable[[Tensor], Tensor] | None = None,
    tile_rows: int = TILE_ROWS,
) -> Tensor:
    """The log-probability of every row's target under ``softmax(logits_function(hidden @ weight.T + bias))``.

    Args:
        hidden: `[B, L, E]`.
        weight, bias: of the output head, `[V, E]` and `[V]` or None.
        shifted_labels: `[B, L]`, already shifted; rows of -100 give 0 and no gradient.
        logits_function: what is done to logits (a softcap, a scale), row by row: from `[t, V]` to `[t, V]`, or to the
            first few of V. It holds no parameters, and is called again, for its gradient, in backward.
        tile_rows: rows of B * L whose logits are alive at a time.

    Returns:
        `[B, L]` in float32 (float64 for float64 inputs). Differentiable once, in hidden, weight and bias.

    Raises:
        ValueError: shapes do not fit, or `tile_rows` is below 1.
    """
    if tile_rows < 1:
        raise ValueError(f"tile_rows = {tile_rows}: must be at least 1, the rows whose logits are alive at a time.")
    if hidden.shape[:-1] != shifted_labels.shape:
        raise ValueError(
            f"shift_labels {tuple(shifted_labels.shape)} and hidden states {tuple(hidden.shape)}: each row of hidden "
            "states needs one label. Pass this rank's shard of both, and leave logits_to_keep out."
        )
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    result: Tensor = _TiledLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, shifted_labels, logits_function, tile_rows
    )
    return result


class _TiledLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        logits_function: Callable[[Tensor], Tensor] | None,
        tile_rows: int,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.logits_function, ctx.tile_rows = logits_function, tile_rows
        result = hidden.new_empty(labels.numel(), dtype=_wide(hidden.dtype))
        tiles = (t.split(tile_rows) for t in (result, hidden.flatten(0, -2), labels.flatten()))
        with torch.autocast(hidden.device.type, enabled=False):
            for out, x, y in zip(*tiles, strict=True):
                logits = F.linear(x, weight, bias)
                if logits_function is not None:
                    logits = logits_function(logits)
                out.copy_(F.cross_entropy(logits.to(out.dtype), y, ignore_index=IGNORED, reduction="none").neg_())
                del logits
        return result.view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # Sums over tiles: a bfloat16 sum of a hundred terms would lose most of the last ones.
        wide = _wide(hidden.dtype)
        dhidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        dweight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        dbias = torch.zeros_like(bias, dtype=wide) if needs_bias else None
        grad = grad.flatten().masked_fill(labels.flatten() == IGNORED, 0)
        tiles = (t.split(ctx.tile_rows) for t in (grad, hidden.flatten(0, -2), labels.flatten()))
        with torch.autocast(hidden.device.type, enabled=False):
            first = 0
            for g, x, y in zip(*tiles, strict=True):
                dlogits = _logits_gradient(F.linear(x, weight, bias), y, g, ctx.logits_function)
                if dbias is not None:
                    dbias += dlogits.sum(0, dtype=wide)
                dlogits = dlogits.to(x.dtype)
                if dhidden is not None:
                    torch.mm(dlogits, weight, out=dhidden.view(-1, x.shape[-1])[first : first + len(x)])
                if dweight is not None:
                    if dweight.dtype == x.dtype:
                        dweight.addmm_(dlogits.t(), x)
                    else:
                        dweight += dlogits.t() @ x
                first += len(x)
                del dlogits
        return (
            dhidden,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
            None,
            None,
            None,
        )


def _logits_gradient(
    logits: Tensor, labels: Tensor, grad: Tensor, function: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """`[t, V]`: grad * (one-hot of the label - softmax), through `function`."""
    final = logits
    if function is not None:
        with torch.enable_grad():
            final = function(logits.requires_grad_())
    gradient = torch.softmax(final.detach(), -1, dtype=grad.dtype).mul_(-grad[:, None])
    gradient.scatter_add_(1, labels.clamp(min=0)[:, None], grad[:, None])
    if function is None:
        return gradient
    return torch.autograd.grad(final, logits, gradient.to(final.dtype))[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype losses are computed in."""
    return torch.promote_types(dtype, torch.float32)
