"""The memory of one attention layer, measured in the model that was trained and the same way for any attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from upipe_integrations.planning.measure import LiveMemory

# Gloo's worker threads let go of the tensors of an exchange a moment after it is over, so now and then one is
# still counted. That half of all measurements were free of it was the worst seen: 1 in 2**8 is missed by chance.
_REPETITIONS = 8


def attention_peak(attention: nn.Module, rotary: nn.Module, position_ids: Tensor) -> int:
    """Peak bytes of tensors made by a forward and backward of `attention`, beyond its input and weights.

    Counted are live tensors, the least of several repetitions; what a kernel allocates and frees inside one
    operator is not seen. All ranks of a sequence-parallel group must call this together.

    Args:
        attention: a Transformers attention module, as it stands in the trained model.
        rotary: the model's rotary embedding.
        position_ids: `[1, L]`, the global positions of this rank's rows.
    """
    return min(_peak(attention, rotary, position_ids) for _ in range(_REPETITIONS))


def _peak(attention: nn.Module, rotary: nn.Module, position_ids: Tensor) -> int:
    weights = list(attention.parameters())
    hidden_size, rows = attention.q_proj.in_features, position_ids.shape[1]
    x = torch.randn(1, rows, hidden_size, dtype=weights[0].dtype, device=weights[0].device, requires_grad=True)
    gradient = torch.randn_like(x)
    tables = rotary(x, position_ids)
    with LiveMemory() as memory:
        for tensor in (x, gradient, position_ids, *tables, *weights):
            tensor.detach()  # seen once, so that it is part of what was there before
        before = memory.current
        out, _ = attention(x, position_embeddings=tables, attention_mask=None, position_ids=position_ids)
        # Not backward(): gradients go nowhere near the hooks with which ZeRO reduces them.
        torch.autograd.grad(out, [x, *weights], gradient)
    return memory.peak - before
