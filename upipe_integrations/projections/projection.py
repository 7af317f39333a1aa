"""One stage's heads from the layer's input, written straight into the send buffer; and the way back.

Projecting inside the stage loop is what "untied" means (arXiv 2602.21196, section 3): only the heads of
one stage exist at a time. What happens to a head between its projection and the exchange is the caller's:
a :class:`HeadFunction` (per-head norm, any rotary; differentiated by autograd on this stage alone), then a
:class:`RotateHalf`, which needs no autograd and no temporaries as it rotates into the send buffer.

Shapes: B batch, L rows of the sequence on this rank, E input size, D head size, N heads of the whole
projection, C ranks, n heads of one rank in one stage. Exchange buffers are `[C, L, B, n, D]`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.all_to_all import send_view
from upipe_integrations.projections.given import is_there, next_tensor
from upipe_integrations.projections.head_function import HeadFunction
from upipe_integrations.projections.heads import HeadRows, add_head_rows, take_heads
from upipe_integrations.projections.products import add_product, product
from upipe_integrations.projections.rotary import RotateHalf
from upipe_integrations.projections.sums import Sum
from upipe_integrations.schedule import HeadChunk


@dataclass(frozen=True)
class AttentionProjections:
    """The query, key and value projections of one attention layer."""

    q: Projection
    k: Projection
    v: Projection


SHARED = 4
"""How many of ``Projection.tensors`` are those of its weights: the first."""


@dataclass(frozen=True)
class HeadBlock:
    """Which rows of its block a head is, in a weight that holds more for each head (keys and values side by side).

    Args:
        size: rows of a block.
        rows: those of them that are projected.

    Raises:
        ValueError: `rows` are not consecutive rows of a block.
    """

    size: int
    rows: range

    def __post_init__(self) -> None:
        if self.rows.step != 1 or not 0 <= self.rows.start < self.rows.stop <= self.size:
            raise ValueError(f"rows {self.rows} of a block of {self.size}: must be consecutive rows of it.")


@dataclass(frozen=True)
class LowRank:
    """A second input of a projection, which adds ``weight @ input`` to what it projects of x.

    For adapters: how their input comes from x is the caller's, and differentiated there. Several terms are one, side by
    side along R; a factor belongs on the input. It is computed in the input's dtype, and the sum rounded once.

    Args:
        input: `[B, L, R]`, this rank's rows; its gradient is summed over stages in float32.
        weight: `[rows of the projection's weight, R]`.
    """

    input: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Projection:
    """A query, key or value projection, and what is done to a head after it.

    Args:
        weight: `[N * D, E]` in checkpoint order, as in ``nn.Linear``.
        head_dim: D, the size of a head as it is attended.
        bias: `[N * D]` or None.
        function: applied to the projected heads, or None.
        rotary: applied after `function`, or None.
        places: where each head's D rows are in `weight` and `bias`, counted in heads, for a weight that holds more
            than these heads (a fused query-key-value projection); None is ``0, 1, ...``.
        accumulate_into: a tensor of the weight's shape that the weight's gradient is added to, in that tensor's
            dtype; the weight itself then gets none. None is the usual gradient.
        block: where `weight` and `bias` have more rows for each head than are projected here; places count such
            blocks. None is D rows, all of them.
        columns: the part of x's E that is projected, as wide as the weight; None is all of it.
        low_rank: added to the projected heads before `function`, or None.
    """

    weight: Tensor
    head_dim: int
    bias: Tensor | None = None
    function: HeadFunction | None = None
    rotary: RotateHalf | None = None
    places: tuple[int, ...] | None = None
    accumulate_into: Tensor | None = None
    block: HeadBlock | None = None
    columns: range | None = None
    low_rank: LowRank | None = None

    @property
    def projected_dim(self) -> int:
        """The size of a head as it is projected: D, or what `function` makes D of."""
        return self.head_dim if self.block is None else len(self.block.rows)

    def tensors(self) -> list[Tensor | None]:
        """Every tensor read, in the order :meth:`with_tensors` takes and gradients are returned.

        The first ``SHARED`` are those that a fused projection has in common with others.
        """
        return [
            self.weight,
            self.bias,
            *((self.low_rank.input, self.low_rank.weight) if self.low_rank else (None, None)),
            *(self.function.tensors if self.function else ()),
            *((self.rotary.cos, self.rotary.sin) if self.rotary else ()),
        ]

    def with_tensors(self, tensors: Iterator[Tensor | None]) -> Projection:
        """The same projection of other tensors, consumed from `tensors`."""
        weight, bias, *of_low_rank = itertools.islice(tensors, SHARED)
        assert weight is not None
        low_rank = None if self.low_rank is None else LowRank(*map(is_there, of_low_rank))
        function, rotary = self.function, self.rotary
        if function is not None:
            function = dataclasses.replace(function, tensors=tuple(next_tensor(tensors) for _ in function.tensors))
        if rotary is not None:
            rotary = dataclasses.replace(rotary, cos=next_tensor(tensors), sin=next_tensor(tensors))
        return dataclasses.replace(self, weight=weight, bias=bias, low_rank=low_rank, function=function, rotary=rotary)

    def gradient(self, wanted: Iterator[bool]) -> ProjectionGradient:
        """Zero gradients where `wanted`, consumed in the order of :meth:`tensors`, says so."""
        return ProjectionGradient.zeros(self, wanted)

    def gradient_beside(self, other: ProjectionGradient, wanted: Iterator[bool]) -> ProjectionGradient:
        """The same where the first tensors are those of another projection, whose gradients take both's sums.

        `wanted` is of the tensors after these ``SHARED``.
        """
        own = ProjectionGradient.zeros(self, itertools.chain((False,) * SHARED, wanted))
        shared = {name: getattr(other, name) for name in ("weight", "bias", "low_rank_input", "low_rank_weight")}
        return dataclasses.replace(own, **shared)

    def placed(self, heads: HeadRows) -> HeadRows:
        """Where `heads` are in the weight."""
        return heads if self.places is None else tuple(tuple(self.places[i] for i in row) for row in heads)

    def at_rows(self, rows: slice) -> Projection:
        """The projection of some of this rank's rows only: what depends on the row is cut."""
        low = self.low_rank
        return dataclasses.replace(
            self,
            low_rank=low and dataclasses.replace(low, input=low.input[:, rows]),
            function=None if self.function is None else self.function.at_rows(rows),
            rotary=None if self.rotary is None else self.rotary.at_rows(rows),
        )

    def shape_of(self, x: Tensor | None) -> tuple[int, int]:
        """(B, L)."""
        assert x is not None
        return x.shape[0], x.shape[1]

    def write(self, x: Tensor | None, chunk: HeadChunk, send: Tensor) -> None:
        """Write the chunk's heads of `x` `[B, L, E]` to a send buffer `[C, L, B, n, D]` of any strides."""
        assert x is not None
        heads = self._project(x, chunk.distinct)
        if self.function is not None:
            function = self.function.at_heads(chunk.distinct)
            heads = function.function(heads, *function.tensors)
        if chunk.is_replicated:
            heads = heads.index_select(2, _positions(chunk, x.device))
        source = send_view(heads, len(chunk.by_rank))
        if self.rotary is None:
            send.copy_(source)
        else:
            self.rotary.rotate(source, send)

    def columns_of(self, x: Tensor) -> Tensor:
        """The part of x `[B, L, E]` that is projected."""
        return x if self.columns is None else x.narrow(2, self.columns.start, len(self.columns))

    def heads_of(self, parameter: Tensor) -> Tensor:
        """View of a weight or bias `[places, rows of a head, ...]`."""
        size = self.head_dim if self.block is None else self.block.size
        blocks: Tensor = parameter.unflatten(0, (-1, size))
        return blocks if self.block is None else blocks.narrow(1, self.block.rows.start, len(self.block.rows))

    def _project(self, x: Tensor, heads: HeadRows) -> Tensor:
        """`[B, L, E]` -> `[B, L, heads, projected size]`."""
        x = self.columns_of(x)
        bias = self._rows(self.bias, heads, x.dtype) if self.bias is not None else None
        weight = self._rows(self.weight, heads, x.dtype)
        if x.shape[0] == 1:  # some rows of a batch of one would be taken for a batched product
            projected = torch.nn.functional.linear(x[0], weight, bias)[None]
        else:
            projected = torch.nn.functional.linear(x, weight, bias)
        if self.low_rank is not None:
            self._add_low_rank(self.low_rank, projected.flatten(0, 1), heads)
        by_head: Tensor = projected.unflatten(2, (-1, self.projected_dim))
        return by_head

    def _add_low_rank(self, low: LowRank, projected: Tensor, heads: HeadRows) -> None:
        """Add the term to projected heads `[B * L, heads * D]`, in place."""
        rows = low.input.flatten(0, 1)
        weight = self._rows(low.weight, heads, rows.dtype).t()
        if rows.dtype == projected.dtype:
            projected.addmm_(rows, weight)
        else:
            projected.add_(rows @ weight)

    def _rows(self, parameter: Tensor, heads: HeadRows, dtype: torch.dtype) -> Tensor:
        """The rows of a weight or bias that make `heads`, in the computing precision."""
        return take_heads(self.heads_of(parameter), self.placed(heads), 0).flatten(0, 1).to(dtype)

    def rows_of_x(self, heads: HeadRows, x: Tensor) -> Tensor:
        """The rows of the weight that make `heads`, over all of x's columns: zero where this reads none."""
        rows = self._rows(self.weight, heads, x.dtype)
        if self.columns is None:
            return rows
        return torch.nn.functional.pad(rows, (self.columns.start, x.shape[2] - self.columns.stop))


@dataclass
class ProjectionGradient:
    """Gradients of one :class:`Projection`, accumulated stage by stage; None where none is wanted."""

    projection: Projection
    weight: Tensor | None
    bias: Tensor | None
    low_rank_input: Tensor | None
    low_rank_weight: Tensor | None
    function: list[Tensor | None] = dataclasses.field(default_factory=list)
    _weight_rows: Sum = dataclasses.field(default_factory=Sum)
    _bias_rows: Sum = dataclasses.field(default_factory=Sum)
    _low_rank_rows: Sum = dataclasses.field(default_factory=Sum)

    @classmethod
    def zeros(cls, projection: Projection, wanted: Iterator[bool]) -> ProjectionGradient:
        """Zero gradients where `wanted` (in the order of ``Projection.tensors``) says so."""
        zeros = [projection.accumulate_into, *[None] * (len(projection.tensors()) - 1)]
        weight, bias, low_rank_input, low_rank_weight, *rest = [
            (torch.zeros_like(t) if into is None else into) if want and t is not None else None
            for into, t, want in zip(zeros, projection.tensors(), wanted, strict=False)
        ]
        if low_rank_input is not None:  # [B, L, R] is small
            low_rank_input = low_rank_input.to(torch.promote_types(low_rank_input.dtype, torch.float32))
        read = len(projection.function.tensors) if projection.function else 0
        return cls(projection, weight, bias, low_rank_input, low_rank_weight, rest[:read])

    def tensors(self) -> list[Tensor | None]:
        """In the order of ``Projection.tensors``; rotary tables get none."""
        weight = None if self.projection.accumulate_into is not None else self.weight
        low, of_input = self.projection.low_rank, self.low_rank_input
        of_input = of_input.to(low.input.dtype) if low is not None and of_input is not None else None
        of_rotary = [None, None] if self.projection.rotary else []
        return [weight, self.bias, of_input, self.low_rank_weight, *self.function, *of_rotary]

    def add(
        self, received: Tensor, x: Tensor | None, chunk: HeadChunk, rows: slice | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Add what the chunk's gradient `[C, L, B, n, D]` (back from the exchange) contributes.

        `x` is `[B, L, E]`. Returns the factors `[B * L, heads * D]` and `[heads * D, E]` of dx, for
        :func:`add_products`. With `rows`, `received` and `x` are of these rows only, and weight gradients are
        collected in float32 until :meth:`end_blocks`.
        """
        assert x is not None
        projection, heads = self.projection, chunk.distinct
        if rows is not None:
            projection = projection.at_rows(rows)
        grad = self._grad_of_projected(projection, received, x, chunk, rows)
        del received
        by_token = grad.flatten(0, 1).flatten(1, 2)
        dtype = _collecting_dtype(x, rows)
        if self.weight is not None:
            self._weight_rows.add_(product(by_token.t(), projection.columns_of(x).flatten(0, 1), dtype))
        if self.bias is not None:
            self._bias_rows.add_(by_token.sum(0, dtype=dtype))
        if projection.low_rank is not None:
            self._add_low_rank(projection, projection.low_rank, by_token, heads, rows)
        if rows is None:
            self.end_blocks(chunk)
        return by_token, projection.rows_of_x(heads, x)

    def _add_low_rank(
        self, projection: Projection, low: LowRank, by_token: Tensor, heads: HeadRows, rows: slice | None
    ) -> None:
        """Add to the gradients of the low-rank term of `projection`, whose input is `low`'s."""
        by_token = by_token.to(low.input.dtype)
        if self.low_rank_weight is not None:
            dtype = _collecting_dtype(low.input, rows)
            self._low_rank_rows.add_(product(by_token.t(), low.input.flatten(0, 1), dtype))
        if self.low_rank_input is not None:
            total = self.low_rank_input if rows is None else self.low_rank_input[:, rows]
            add_product(total, by_token, projection._rows(low.weight, heads, by_token.dtype), total.dtype)

    def end_blocks(self, chunk: HeadChunk) -> None:
        """Add what was collected for the chunk to the gradients of weights and bias."""
        placed = self.projection.placed(chunk.distinct)
        for total, collected in (
            (self.weight, self._weight_rows),
            (self.bias, self._bias_rows),
            (self.low_rank_weight, self._low_rank_rows),
        ):
            if total is not None:
                add_head_rows(self.projection.heads_of(total), collected.take(), placed)

    def _grad_of_projected(
        self, projection: Projection, received: Tensor, x: Tensor, chunk: HeadChunk, rows: slice | None
    ) -> Tensor:
        """`[C, L, B, n, D]` -> the gradient of the projected heads `[B, L, distinct heads, projected size]`."""
        C, L, B, n, D = received.shape
        grad = received.new_empty(B, L, C * n, D)
        if projection.rotary is None:
            send_view(grad, C).copy_(received)
        else:
            projection.rotary.rotate(received, send_view(grad, C), inverse=True)
        del received
        if chunk.is_replicated:
            summed = grad.new_zeros(B, L, len(chunk.distinct[0]), D)
            grad = summed.index_add_(2, _positions(chunk, grad.device), grad)
        if projection.function is None:
            return grad
        function = projection.function.at_heads(chunk.distinct)
        projected = projection._project(x, chunk.distinct)
        with torch.enable_grad():
            projected = projected.detach().requires_grad_()
            read = [
                t.detach().requires_grad_(g is not None) for t, g in zip(function.tensors, self.function, strict=True)
            ]
            result = function.function(projected, *read)
        leaves = [projected, *(t for t in read if t.requires_grad)]
        grad, *of_read = torch.autograd.grad(result, leaves, grad, allow_unused=True, materialize_grads=True)
        function.add_gradient(self.function, iter(of_read), rows, chunk.distinct)
        return grad


def _positions(chunk: HeadChunk, device: torch.device) -> Tensor:
    """Where each head of the exchange buffer is among the chunk's distinct heads."""
    at = {head: i for i, head in enumerate(chunk.distinct[0])}
    return torch.tensor([at[head] for row in chunk.by_rank for head in row], device=device)


def _collecting_dtype(t: Tensor, rows: slice | None) -> torch.dtype:
    """The dtype in which products with `t` are collected: float32 over blocks of rows."""
    return t.dtype if rows is None else torch.promote_types(t.dtype, torch.float32)
