"""Attention and its backward as registered operators: what selective checkpointing keeps, and compiled code calls.

An operator's arguments are tensors and numbers, so the rest of a call goes by a number. In eager mode it is good for
one call. In compiled code it is a constant, so there equal calls share one, which is kept for good.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from upipe_integrations.all_to_all import group_ranks
from upipe_integrations.engine.staged import Call, kept_like, project, run_backward, run_forward
from upipe_integrations.engine.tracing import run_for_real


class _Prepared:
    """A call without tensors, and which of its inputs are there: an operator takes no optional ones in a list."""

    _numbers = itertools.count()

    def __init__(self, call: Call, given: tuple[bool, ...]) -> None:
        self.call = call
        self.given = given
        self.number = next(self._numbers)
        _PREPARED[self.number] = self

    def inputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """x, sinks and the call's tensors, with None for those that are not there."""
        there = iter(tensors)
        x, sinks, *rest = (next(there) if given else None for given in self.given)
        return x, sinks, rest


# A call lives as long as its user: the caller, or the cache of those in compiled code.
_PREPARED: weakref.WeakValueDictionary[int, _Prepared] = weakref.WeakValueDictionary()


_prepared_for_good = functools.cache(_Prepared)


def forward_by_operator(call: Call, inputs: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
    """What ``run_forward`` gives for `call` (without tensors), by ``torch.ops.upipe.attention``; not differentiable."""
    prepared = _Prepared(call, _given(inputs))
    attended, *more = torch.ops.upipe.attention([t for t in inputs if t is not None], prepared.number)
    return attended, more


def attention_in_graph(call: Call, inputs: Sequence[Tensor | None]) -> Tensor:
    """The result of `call` (without tensors) on x, sinks and its tensors, in compiled code, by an operator."""
    number = run_for_real(_number_for_good, call, _given(inputs))
    tensors = [t for t in inputs if t is not None]
    results: list[Tensor] = torch.ops.upipe.attention_in_graph(tensors, number)
    return results[0]


def _given(inputs: Sequence[Tensor | None]) -> tuple[bool, ...]:
    return tuple([t is not None for t in inputs])


def _number_for_good(call: Call, given: tuple[bool, ...]) -> int:
    return _prepared_for_good(call, given).number


@torch.library.custom_op("upipe::attention", mutates_args=())
def _attention(tensors: list[Tensor], call: int) -> list[Tensor]:
    """What was attended (projected, where the mode fuses that), and what else the mode keeps for backward."""
    return _forward(_PREPARED[call], tensors)


def _forward(prepared: _Prepared, tensors: list[Tensor]) -> list[Tensor]:
    attended, more = run_forward(prepared.call, *prepared.inputs(tensors))
    return [attended, *(t.contiguous() for t in more)]


@torch.library.custom_op("upipe::attention_in_graph", mutates_args=())
def _attention_in_graph(tensors: list[Tensor], call: int) -> list[Tensor]:
    """The result, what was attended where that is something else, and what else the mode keeps for backward.

    In eager mode the projection is apart, so that selective checkpointing keeps what was attended and not y as well.
    """
    prepared = _PREPARED[call]
    attended, *more = _forward(prepared, tensors)
    y = project(prepared.call, attended, prepared.inputs(tensors)[2])
    return [attended, *more] if y is attended else [y, attended, *more]


@_attention.register_fake
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    return _forward_like(_PREPARED[call], tensors)


@_attention_in_graph.register_fake
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    prepared = _PREPARED[call]
    attended, *more = _forward_like(prepared, tensors)
    output = prepared.call.with_tensors(prepared.inputs(tensors)[2]).output_after
    if output is None:
        return [attended, *more]
    return [attended.new_empty(*attended.shape[:2], output.weight.shape[0]), attended, *more]


def _forward_like(prepared: _Prepared, tensors: list[Tensor]) -> list[Tensor]:
    """Empty tensors like the results of :func:`_forward`."""
    x, _, rest = prepared.inputs(tensors)
    call = prepared.call.with_tensors(rest)
    sources = call.sources
    B, L = sources.q.shape_of(x)
    L *= group_ranks(call.x_group)
    output = call.output_in_loop
    width = sources.v.head_dim * call.schedule.heads if output is None else output.weight.shape[0]
    return [tensors[0].new_empty(B, L, width, dtype=call.dtype), *kept_like(call, tensors[0], (B, L))]


@torch.library.custom_op("upipe::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, tensors: list[Tensor], kept: list[Tensor], wanted: list[bool], call: int
) -> list[Tensor]:
    """Gradients of the tensors that are `wanted`; `kept` are the results of forward where the mode keeps them."""
    prepared = _PREPARED[call]
    wants = iter(wanted)
    wanted_of_all = [given and next(wants) for given in prepared.given]
    with _autograd_there(), torch.no_grad():
        grads = run_backward(prepared.call, grad, prepared.inputs(tensors), list(kept), wanted_of_all)
    return [g for g, want in zip(grads, wanted_of_all, strict=True) if g is not None and want]


@_attention_backward.register_fake
def _(grad: Tensor, tensors: list[Tensor], kept: list[Tensor], wanted: list[bool], call: int) -> list[Tensor]:
    prepared = _PREPARED[call]
    x, *_ = prepared.inputs(tensors)
    rows_first = group_ranks(prepared.call.x_group) > 1

    def like(t: Tensor) -> Tensor:
        if t is not x:
            return torch.empty_like(t)
        B, L, E = t.shape
        return t.new_empty(L, B, E).transpose(0, 1) if rows_first else t.new_empty(B, L, E)

    return [like(t) for t, want in zip(tensors, wanted, strict=True) if want]


def _autograd_there() -> Any:
    """Autograd within an operator's body, where the dispatcher leaves it out.

    Backward differentiates head functions and function kernels on tensors of its own, cut off from the graph around
    it. PyTorch's operators that call Python functions bring autograd back in the same way (``invoke_leaf_function``
    and ``invoke_subgraph``, in torch/_higher_order_ops).
    """
    left_out = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)


def _setup_context(ctx: Any, inputs: tuple[list[Tensor], int], output: list[Tensor]) -> None:
    tensors, ctx.number = inputs
    call = _PREPARED[ctx.number].call
    ctx.wanted = [t.requires_grad for t in tensors]
    ctx.read = len(tensors)
    kept = output[call.output_after is not None :] if call.mode.keeps_output else []
    ctx.save_for_backward(*tensors, *kept)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    saved = list(ctx.saved_tensors)
    tensors, kept = saved[: ctx.read], saved[ctx.read :]
    of_wanted = iter(torch.ops.upipe.attention_backward(grads[0], tensors, kept, ctx.wanted, ctx.number))
    return [next(of_wanted) if want else None for want in ctx.wanted], None


_attention_in_graph.register_autograd(_backward, setup_context=_setup_context)
