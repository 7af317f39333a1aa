"""Attention as a registered operator, and the policy that keeps its result under activation checkpointing.

A checkpointed layer runs its forward again in backward; with the fused modes, which attend again in backward
themselves, attention would run three times forward. Under selective checkpointing with :func:`context_fn` the
operator's result is kept instead: recomputing the layer skips it, so no third attention runs and as many bytes
travel as for checkpointed Ulysses.

The price is y (or the attention output and lse in mode ``"keep"``) kept beside the layer's input: two `[B, L, E]`
tensors a layer instead of one. Keep it where speed matters or saved activations are offloaded; leave it, with a
plain checkpoint, where the saved activations of all layers are what fills the memory.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from upipe_integrations.staged import Call, run_backward, run_forward


class _Prepared:
    """A call without tensors, and which of its inputs are there: an operator takes no optional ones in a list."""

    _numbers = itertools.count()

    def __init__(self, call: Call, given: tuple[bool, ...]) -> None:
        self.call = call
        self.given = given
        self.number = next(self._numbers)

    def inputs(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """x, sinks and the call's tensors, with None for those that are not there."""
        there = iter(tensors)
        return [next(there) if given else None for given in self.given]


# An operator's arguments are tensors and numbers, so a call goes by its number; it lives as long as its user,
# which is the caller in forward and the autograd context until backward.
_PREPARED: weakref.WeakValueDictionary[int, _Prepared] = weakref.WeakValueDictionary()


def attention_operator(call: Call, inputs: Sequence[Tensor | None]) -> Tensor:
    """The result of `call` (without tensors) on x, sinks and its tensors, by ``torch.ops.upipe.attention``."""
    prepared = _Prepared(call, tuple(t is not None for t in inputs))
    _PREPARED[prepared.number] = prepared
    results: list[Tensor] = _attention([t for t in inputs if t is not None], prepared.number)
    return results[0]


@torch.library.custom_op("upipe::attention", mutates_args=())
def _attention(tensors: list[Tensor], call: int) -> list[Tensor]:
    """(result, lse of each stage where the mode keeps it)."""
    prepared = _PREPARED[call]
    x, sinks, *rest = prepared.inputs(tensors)
    result, lses = run_forward(prepared.call, x, sinks, rest)
    return [result, *lses]


def _setup_context(ctx: Any, inputs: tuple[list[Tensor], int], output: list[Tensor]) -> None:
    tensors, number = inputs
    ctx.prepared = _PREPARED[number]
    ctx.wanted = [t.requires_grad for t in tensors]
    kept = output if ctx.prepared.call.mode.memory == "keep" else []
    ctx.read = len(tensors)
    ctx.save_for_backward(*tensors, *kept)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    prepared: _Prepared = ctx.prepared
    saved = ctx.saved_tensors
    x, sinks, *rest = prepared.inputs(saved[: ctx.read])
    wants = iter(ctx.wanted)
    wanted = [next(wants) if given else False for given in prepared.given]
    with torch.no_grad():
        result = run_backward(prepared.call, grads[0], (x, sinks, rest), saved[ctx.read :], wanted)
    return [grad for grad, given in zip(result, prepared.given, strict=True) if given], None


_attention.register_autograd(_backward, setup_context=_setup_context)


def _keep_attention(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator is torch.ops.upipe.attention.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


context_fn: Callable[[], tuple[Any, Any]] = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
"""For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=context_fn)``: keeps the result of
attention that runs in a mode with ``operator``, and recomputes the rest."""
