"""Reading and writing some of the heads of a tensor, without a copy where the heads lie on a grid.

Heads are given as lists of global head numbers of one length, usually one list for each rank. A schedule's heads
nearly always are the same few of every rank's block, ``block * rank + first + j``: a strided view. Any other selection
is indexed. Callers need not know which.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from torch import Tensor

from upipe_integrations.constants import constant
from upipe_integrations.schedule import HeadChunk

HeadLists = tuple[tuple[int, ...], ...]
"""Global head numbers, rank-major; the lists are equally long."""


@lru_cache(maxsize=4096)
def _first_of_grid(lists: HeadLists, total: int) -> int | None:
    """`first` when list c is ``block * c + first, ...`` with ``block = total / len(lists)``, else None."""
    block, rest = divmod(total, len(lists))
    first, run = lists[0][0], len(lists[0])
    on_grid = all(heads == tuple(range(block * c + first, block * c + first + run)) for c, heads in enumerate(lists))
    return first if rest == 0 and first + run <= block and on_grid else None


def _view(tensor: Tensor, lists: HeadLists, dim: int) -> Tensor | None:
    """The heads as a view with `dim` split into lists and heads of a list, or None when they lie on no grid."""
    first = _first_of_grid(lists, tensor.shape[dim])
    return None if first is None else tensor.unflatten(dim, (len(lists), -1)).narrow(dim + 1, first, len(lists[0]))


def _index(lists: HeadLists, like: Tensor) -> Tensor:
    return constant(tuple(itertools.chain.from_iterable(lists)), like)


def take_heads(tensor: Tensor, lists: HeadLists, dim: int) -> Tensor:
    """The heads along `dim`, in order: a view where memory allows (all heads, or one list), else a copy."""
    view = _view(tensor, lists, dim)
    if view is None:
        return tensor.index_select(dim, _index(lists, tensor))
    return view.flatten(dim, dim + 1)


def copy_heads(tensor: Tensor, lists: HeadLists, dim: int, target: Tensor) -> None:
    """Copy the heads along `dim` to `target`, whose dimensions `dim` and `dim + 1` are lists and heads of a list."""
    view = _view(tensor, lists, dim)
    if view is None:
        view = tensor.index_select(dim, _index(lists, tensor)).unflatten(dim, (len(lists), -1))
    target.copy_(view)


def put_heads(tensor: Tensor, chunk: HeadChunk, dim: int, values: Tensor) -> None:
    """Write the chunk's real heads, of which those of a rank are neighbours, to `tensor`, without a temporary.

    `values` has all of the chunk's, with dimensions `dim` and `dim + 1` for ranks and heads of a rank.
    """
    view = None if chunk.padding else _view(tensor, chunk.by_rank, dim)
    if view is not None:
        view.copy_(values)
        return
    for heads, real, sent in zip(chunk.by_rank, chunk.real, values.unbind(dim), strict=True):
        if real:
            assert heads[:real] == tuple(range(heads[0], heads[0] + real))
            tensor.narrow(dim, heads[0], real).copy_(sent.narrow(dim, 0, real))


def add_heads(tensor: Tensor, lists: HeadLists, dim: int, values: Tensor) -> None:
    """Add `values`, whose dimensions `dim` and `dim + 1` are lists and heads of a list, to the heads of `tensor`.

    A head listed twice gets both.
    """
    view = _view(tensor, lists, dim)
    if view is None:
        tensor.index_add_(dim, _index(lists, tensor), values.flatten(dim, dim + 1))
    else:
        view.add_(values)


def add_head_weights(total: Tensor, gradient: Tensor, lists: HeadLists) -> None:
    """Add the heads' `[heads * D, ...]` of a weight or bias gradient to `total` `[N, D, ...]`."""
    add_heads(total, lists, 0, gradient.to(total.dtype).unflatten(0, (len(lists), len(lists[0]), -1)))
