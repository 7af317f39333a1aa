"""Attention and its backward as registered operators: what selective checkpointing keeps, and compiled code calls.

An operator's arguments are tensors and numbers, so the structure of a call goes by a number. In eager mode it is good
for one call. In compiled code it is a constant, so there equal structures share one, which is kept for good; and as
PyTorch keeps compiled code on disk for other processes, such a number has a digest of the structure in it: the same
number never stands for a call with other results in another process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from upipe_integrations.all_to_all import group_ranks
from upipe_integrations.engine.backward import run_backward
from upipe_integrations.engine.call import Call
from upipe_integrations.engine.forward import project, run_forward, saved_like
from upipe_integrations.engine.tracing import run_while_tracing
from upipe_integrations.projections.structure import Structure


class _Numbered:
    """A structure under a number, for as long as this lives."""

    def __init__(self, structure: Structure[Call], number: int) -> None:
        self.structure = structure
        self.number = number
        _NUMBERED[number] = self


# It lives as long as its user: the caller, or the cache of those in compiled code.
_NUMBERED: weakref.WeakValueDictionary[int, _Numbered] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_WITH_DIGEST: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
"""What is counted on, of the structures with one digest: they differ in objects that have no say in the results."""


@functools.cache
def _numbered_for_good(structure: Structure[Call]) -> _Numbered:
    # 1, 46 bits of the digest and 16 of the count: a positive int64, and none of those that eager calls count up.
    digest = int.from_bytes(_digest(structure)[:8], "big") >> 18
    count = next(_WITH_DIGEST[digest])
    if count >= 1 << 16:
        raise RuntimeError("upipe: compiled code has 65,536 calls of attention with equal sizes. Compile fewer.")
    return _Numbered(structure, 1 << 62 | digest << 16 | count)


def _digest(structure: Structure[Call]) -> bytes:
    """Of all that the sizes, strides and number of an operator's results depend on, and of this package's code."""
    digest = hashlib.sha256(_own_code())
    for word in _described(structure):
        digest.update(f"{len(word)} {word}".encode())
    return digest.digest()


@functools.cache
def _own_code() -> bytes:
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


def _described(value: Any) -> Iterator[str]:
    """Words that are equal in every process; of an object that is not data, its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__qualname__
        for field in dataclasses.fields(value):
            yield from _described(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__qualname__} of {len(value)}"
        for item in value:
            yield from _described(item)
    elif isinstance(value, (int, float, str, range, torch.dtype, type(None))):
        yield repr(value)
    elif isinstance(value, torch.distributed.ProcessGroup):
        yield f"{group_ranks(value)} ranks"
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__qualname__', '')}"


def _call(number: int, tensors: list[Tensor]) -> Call:
    return _NUMBERED[number].structure.with_tensors(tensors)


def forward_by_operator(structure: Structure[Call], tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """What ``run_forward`` gives, by ``torch.ops.upipe.attention``; not differentiable."""
    numbered = _Numbered(structure, next(_NUMBERS))
    attended, *saved = torch.ops.upipe.attention(tensors, numbered.number)
    return attended, saved


def attention_in_graph(structure: Structure[Call], tensors: list[Tensor]) -> Tensor:
    """The result of a call in compiled code, by an operator."""
    number = run_while_tracing(_number_for_good, structure)
    results: list[Tensor] = torch.ops.upipe.attention_in_graph(tensors, number)
    return results[0]


def _number_for_good(structure: Structure[Call]) -> int:
    return _numbered_for_good(structure).number


@torch.library.custom_op("upipe::attention", mutates_args=())
def _attention(tensors: list[Tensor], call: int) -> list[Tensor]:
    """What was attended (projected, where that is in the loop), and what else the mode keeps for backward."""
    return _forward(_call(call, tensors))


def _forward(call: Call) -> list[Tensor]:
    attended, saved = run_forward(call)
    return [attended, *(t.contiguous() for t in saved)]


@torch.library.custom_op("upipe::attention_in_graph", mutates_args=())
def _attention_in_graph(tensors: list[Tensor], call: int) -> list[Tensor]:
    """The result, what was attended where that is something else, and what else the mode keeps for backward.

    In eager mode the projection is apart, so that selective checkpointing keeps what was attended and not y as well.
    """
    with_tensors = _call(call, tensors)
    attended, *saved = _forward(with_tensors)
    y = project(with_tensors, attended)
    return [attended, *saved] if y is attended else [y, attended, *saved]


@_attention.register_fake
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    return _forward_like(_call(call, tensors), tensors[0])


@_attention_in_graph.register_fake
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    with_tensors = _call(call, tensors)
    attended, *saved = _forward_like(with_tensors, tensors[0])
    output = with_tensors.output_after
    if output is None:
        return [attended, *saved]
    return [attended.new_empty(*attended.shape[:2], output.weight.shape[0]), attended, *saved]


def _forward_like(call: Call, like: Tensor) -> list[Tensor]:
    """Empty tensors like the results of :func:`_forward`, on the device of `like`."""
    B, L = call.q.shape
    L *= group_ranks(call.staging.x_group)
    output = call.output_in_loop
    width = call.v.head_dim * call.staging.schedule.heads if output is None else output.weight.shape[0]
    return [like.new_empty(B, L, width, dtype=call.dtype), *saved_like(call, like, (B, L))]


@torch.library.custom_op("upipe::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, tensors: list[Tensor], kept: list[Tensor], wanted: list[bool], call: int
) -> list[Tensor]:
    """Gradients of the tensors that are `wanted`; `kept` are the results of forward where the mode keeps them."""
    with _with_autograd(), torch.no_grad():
        grads = run_backward(_NUMBERED[call].structure, tensors, grad, list(kept), wanted)
    return [g for g, want in zip(grads, wanted, strict=True) if g is not None and want]


@_attention_backward.register_fake
def _(grad: Tensor, tensors: list[Tensor], kept: list[Tensor], wanted: list[bool], call: int) -> list[Tensor]:
    with_tensors = _call(call, tensors)
    x, rows_first = with_tensors.q.input, group_ranks(with_tensors.staging.x_group) > 1

    def like(t: Tensor) -> Tensor:
        if t is not x:
            return torch.empty_like(t)
        B, L, E = t.shape
        return t.new_empty(L, B, E).transpose(0, 1) if rows_first else t.new_empty(B, L, E)

    return [like(t) for t, want in zip(tensors, wanted, strict=True) if want]


def _with_autograd() -> Any:
    """Autograd within an operator's body, where the dispatcher leaves it out.

    Backward differentiates head functions and function kernels on tensors of its own, cut off from the graph around
    it. PyTorch's operators that call Python functions bring autograd back in the same way (``invoke_leaf_function``
    and ``invoke_subgraph``, in torch/_higher_order_ops).
    """
    left_out = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)


def _setup_context(ctx: Any, inputs: tuple[list[Tensor], int], output: list[Tensor]) -> None:
    tensors, ctx.number = inputs
    call = _call(ctx.number, tensors)
    ctx.wanted = [t.requires_grad for t in tensors]
    ctx.read = len(tensors)
    kept = output[call.output_after is not None :] if call.staging.mode.keeps_output else []
    ctx.save_for_backward(*tensors, *kept)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    saved = list(ctx.saved_tensors)
    tensors, kept = saved[: ctx.read], saved[ctx.read :]
    wanted_grads = iter(torch.ops.upipe.attention_backward(grads[0], tensors, kept, ctx.wanted, ctx.number))
    return [next(wanted_grads) if want else None for want in ctx.wanted], None


_attention_in_graph.register_autograd(_backward, setup_context=_setup_context)
