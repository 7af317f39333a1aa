"""One stage's heads from the layer's input, written straight into the send buffer; and the way back.

Projecting inside the stage loop is what "untied" means (arXiv 2602.21196, section 3): only the heads of one stage
exist at a time. What happens to a head between its projection and the exchange is the caller's: a
:class:`~upipe_integrations.projections.head_function.HeadFunction` (per-head norm, any rotary; differentiated by
autograd on this stage alone), then a :class:`~upipe_integrations.projections.rotary.RotateHalf`, which needs no
autograd and no temporaries as it rotates into the send buffer.

Shapes: B batch, L rows of the sequence on this rank, E input size, D head size, N heads of the whole projection, C
ranks, n heads of one rank in one stage. Exchange buffers are `[C, L, B, n, D]`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.all_to_all import send_view
from upipe_integrations.constants import constant
from upipe_integrations.projections.head_function import HeadFunction
from upipe_integrations.projections.heads import HeadLists, add_head_weights, take_heads
from upipe_integrations.projections.products import add_product, product
from upipe_integrations.projections.rotary import RotateHalf
from upipe_integrations.projections.source import Factors, HeadGradient, HeadSource
from upipe_integrations.projections.structure import HoldsTensors, Totals
from upipe_integrations.projections.sums import Sum
from upipe_integrations.schedule import HeadChunk


@dataclass(frozen=True)
class HeadBlock:
    """What of its block a head is, in a weight that holds more for each head (keys and values side by side).

    Args:
        size: output features of a block.
        features: those of them that are projected.

    Raises:
        ValueError: `features` are not consecutive features of a block.
    """

    size: int
    features: range

    def __post_init__(self) -> None:
        if self.features.step != 1 or not 0 <= self.features.start < self.features.stop <= self.size:
            raise ValueError(f"features {self.features} of a block of {self.size}: must be consecutive ones of it.")


@dataclass(frozen=True)
class LowRank(HoldsTensors):
    """A second input of a projection, which adds ``weight @ input`` to what it projects of x.

    For adapters: how their input comes from x is the caller's, and differentiated there. Several terms are one, side by
    side along R; a factor belongs on the input. It is computed in the input's dtype, and the sum rounded once.

    Args:
        input: `[B, L, R]`, this rank's rows; its gradient is summed over stages in float32.
        weight: `[output features of the projection, R]`.
    """

    holds = ("input", "weight")

    input: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Weights(HoldsTensors):
    """What a linear layer has; one of these may serve q, k and v, which then share its gradients as well.

    Args:
        weight: `[N * D, E]` in checkpoint order, as in ``nn.Linear``.
        bias: `[N * D]` or None.
        low_rank: added to what is projected, or None.
        accumulate_into: a tensor of the weight's shape that the weight's gradient is added to, in that tensor's
            dtype; the weight itself then gets none. None is the usual gradient.
    """

    holds = ("weight", "bias", "low_rank")

    weight: Tensor
    bias: Tensor | None = None
    low_rank: LowRank | None = None
    accumulate_into: Tensor | None = None


@dataclass(frozen=True)
class Projection(HoldsTensors):
    """A query, key or value projection, and what is done to a head after it.

    Args:
        weights: of the linear layer.
        head_dim: D, the size of a head as it is attended.
        function: applied to the projected heads, or None.
        rotary: applied after `function`, or None.
        places: where each head's D output features are in the weight and bias, counted in heads, for a weight that
            holds more than these heads (a query-key-value layer); None is ``0, 1, ...``.
        block: where the weight and bias have more features for each head than are projected here; places count such
            blocks. None is D of them, all.
        columns: the part of x's E that is projected, as wide as the weight; None is all of it.
    """

    holds = ("weights", "function", "rotary")

    weights: Weights
    head_dim: int
    function: HeadFunction | None = None
    rotary: RotateHalf | None = None
    places: tuple[int, ...] | None = None
    block: HeadBlock | None = None
    columns: range | None = None

    @property
    def projected_dim(self) -> int:
        """The size of a head as it is projected: D, or what `function` makes D of."""
        return self.head_dim if self.block is None else len(self.block.features)

    def at_rows(self, rows: slice) -> Projection:
        """The projection of some of this rank's rows only: what depends on the row is cut."""
        low = self.weights.low_rank
        if low is not None:
            low = dataclasses.replace(low, input=low.input[:, rows])
        return dataclasses.replace(
            self,
            weights=dataclasses.replace(self.weights, low_rank=low),
            function=None if self.function is None else self.function.at_rows(rows),
            rotary=None if self.rotary is None else self.rotary.at_rows(rows),
        )

    def placed(self, heads: HeadLists) -> HeadLists:
        """Where `heads` are in the weight."""
        return heads if self.places is None else tuple(tuple(self.places[i] for i in row) for row in heads)

    def columns_of(self, x: Tensor) -> Tensor:
        """The part of x `[B, L, E]` that is projected."""
        return x if self.columns is None else x.narrow(2, self.columns.start, len(self.columns))

    def by_head(self, parameter: Tensor) -> Tensor:
        """View of a weight or bias `[places, features of a head, ...]`."""
        size = self.head_dim if self.block is None else self.block.size
        blocks: Tensor = parameter.unflatten(0, (-1, size))
        return blocks if self.block is None else blocks.narrow(1, self.block.features.start, len(self.block.features))

    def slice_of(self, parameter: Tensor, heads: HeadLists, dtype: torch.dtype) -> Tensor:
        """What of a weight or bias makes `heads`, in the computing precision."""
        return take_heads(self.by_head(parameter), self.placed(heads), 0).flatten(0, 1).to(dtype)

    def project(self, x: Tensor, heads: HeadLists) -> Tensor:
        """`[B, L, E]` -> `[B, L, heads, projected size]`."""
        weights, x = self.weights, self.columns_of(x)
        bias = None if weights.bias is None else self.slice_of(weights.bias, heads, x.dtype)
        weight = self.slice_of(weights.weight, heads, x.dtype)
        if x.shape[0] == 1:  # some rows of a batch of one would be taken for a batched product
            projected = torch.nn.functional.linear(x[0], weight, bias)[None]
        else:
            projected = torch.nn.functional.linear(x, weight, bias)
        if weights.low_rank is not None:
            self._add_low_rank(weights.low_rank, projected.flatten(0, 1), heads)
        by_head: Tensor = projected.unflatten(2, (-1, self.projected_dim))
        return by_head

    def _add_low_rank(self, low: LowRank, projected: Tensor, heads: HeadLists) -> None:
        """Add the term to projected heads `[B * L, heads * D]`, in place."""
        by_token = low.input.flatten(0, 1)
        weight = self.slice_of(low.weight, heads, by_token.dtype).t()
        if by_token.dtype == projected.dtype:
            projected.addmm_(by_token, weight)
        else:
            projected.add_(by_token @ weight)

    def weight_over_x(self, heads: HeadLists, x: Tensor) -> Tensor:
        """What of the weight makes `heads`, over all of x's columns: zero where this reads none."""
        weight = self.slice_of(self.weights.weight, heads, x.dtype)
        if self.columns is None:
            return weight
        return torch.nn.functional.pad(weight, (self.columns.start, x.shape[2] - self.columns.stop))


@dataclass(frozen=True)
class AttentionProjections:
    """The query, key and value projections of one attention layer."""

    q: Projection
    k: Projection
    v: Projection


@dataclass(frozen=True)
class ProjectedHeads(HeadSource):
    """Heads that are projected when a stage needs them.

    Args:
        projection: of the heads.
        x: `[B, L, E]`.
    """

    holds = ("projection", "x")

    projection: Projection
    x: Tensor

    @property
    def head_dim(self) -> int:
        """D."""
        return self.projection.head_dim

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L)."""
        return self.x.shape[0], self.x.shape[1]

    @property
    def device(self) -> torch.device:
        """Where x is."""
        return self.x.device

    @property
    def input(self) -> Tensor:
        """x."""
        return self.x

    @property
    def accumulates(self) -> bool:
        """See :class:`HeadSource`."""
        return self.projection.weights.accumulate_into is not None

    def reading(self, x: Tensor) -> ProjectedHeads:
        """See :class:`HeadSource`."""
        return ProjectedHeads(self.projection, x)

    def at_rows(self, rows: slice) -> ProjectedHeads:
        """See :class:`HeadSource`."""
        return ProjectedHeads(self.projection.at_rows(rows), self.x[:, rows])

    def write(self, chunk: HeadChunk, send: Tensor) -> None:
        """Project, apply the head function and rotate: `[B, L, E]` -> the chunk's heads in `[C, L, B, n, D]`."""
        projection = self.projection
        heads = projection.project(self.x, chunk.distinct)
        if projection.function is not None:
            function = projection.function.at_heads(chunk.distinct)
            heads = function.function(heads, *function.tensors)
        if chunk.is_replicated:
            heads = heads.index_select(2, _positions(chunk, heads))
        source = send_view(heads, len(chunk.by_rank))
        if projection.rotary is None:
            send.copy_(source)
        else:
            projection.rotary.rotate(source, send)

    def gradient(self, totals: Totals) -> ProjectionGradient:
        """See :class:`HeadSource`."""
        return ProjectionGradient(self, totals)


class ProjectionGradient(HeadGradient):
    """Gradients of the weights of :class:`ProjectedHeads` and of what their head function reads."""

    def __init__(self, source: ProjectedHeads, totals: Totals) -> None:
        self._source = source
        weights, function = source.projection.weights, source.projection.function
        low = weights.low_rank
        self._weight = totals.of_weight(weights.weight, weights.accumulate_into)
        self._bias = totals.of(weights.bias)
        # Small: it is [B, L, R].
        self._low_rank_input = None if low is None else totals.of(low.input, _at_least_float32(low.input.dtype))
        self._low_rank_weight = None if low is None else totals.of(low.weight)
        self._function_totals = [] if function is None else [totals.of(t) for t in function.tensors]
        self._weight_sum = Sum()
        self._bias_sum = Sum()
        self._low_rank_sum = Sum()

    def add(self, received: Tensor, chunk: HeadChunk, rows: slice | None = None) -> Factors:
        """See :class:`HeadGradient`."""
        source, heads = self._source, chunk.distinct
        if rows is not None:
            source = source.at_rows(rows)
        projection, x = source.projection, source.x
        grad = self._grad_of_projected(source, received, chunk, rows)
        del received
        by_token = grad.flatten(0, 1).flatten(1, 2)
        dtype = collecting_dtype(x, rows)
        if self._weight is not None:
            # Into a wider sum (Megatron's main_grad) it is rounded once, there.
            dtype_of_weight = torch.promote_types(dtype, self._weight.dtype)
            self._weight_sum.add_(product(by_token.t(), projection.columns_of(x).flatten(0, 1), dtype_of_weight))
        if self._bias is not None:
            self._bias_sum.add_(by_token.sum(0, dtype=dtype))
        if projection.weights.low_rank is not None:
            self._add_low_rank(projection, projection.weights.low_rank, by_token, heads, rows)
        if rows is None:
            self.end_blocks(chunk)
        return by_token, projection.weight_over_x(heads, x)

    def _add_low_rank(
        self, projection: Projection, low: LowRank, by_token: Tensor, heads: HeadLists, rows: slice | None
    ) -> None:
        """Add to the gradients of the low-rank term of `projection`, whose input is `low`'s."""
        by_token = by_token.to(low.input.dtype)
        if self._low_rank_weight is not None:
            dtype = collecting_dtype(low.input, rows)
            self._low_rank_sum.add_(product(by_token.t(), low.input.flatten(0, 1), dtype))
        if self._low_rank_input is not None:
            total = self._low_rank_input if rows is None else self._low_rank_input[:, rows]
            weight = projection.slice_of(low.weight, heads, by_token.dtype)
            for batch, tokens in zip(total, by_token.chunk(total.shape[0]), strict=True):
                add_product(batch, tokens, weight, total.dtype)

    def end_blocks(self, chunk: HeadChunk) -> None:
        """Add what was collected for the chunk to the gradients of weights and bias."""
        projection = self._source.projection
        placed = projection.placed(chunk.distinct)
        for total, collected in (
            (self._weight, self._weight_sum),
            (self._bias, self._bias_sum),
            (self._low_rank_weight, self._low_rank_sum),
        ):
            if total is not None:
                add_head_weights(projection.by_head(total), collected.take(), placed)

    def _grad_of_projected(
        self, source: ProjectedHeads, received: Tensor, chunk: HeadChunk, rows: slice | None
    ) -> Tensor:
        """`[C, L, B, n, D]` -> the gradient of the projected heads `[B, L, distinct heads, projected size]`."""
        C, L, B, n, D = received.shape
        projection = source.projection
        grad = received.new_empty(B, L, C * n, D)
        if projection.rotary is None:
            send_view(grad, C).copy_(received)
        else:
            projection.rotary.rotate(received, send_view(grad, C), inverse=True)
        del received
        if chunk.is_replicated:
            summed = grad.new_zeros(B, L, len(chunk.distinct[0]), D)
            grad = summed.index_add_(2, _positions(chunk, grad), grad)
        if projection.function is None:
            return grad
        function = projection.function.at_heads(chunk.distinct)
        projected = projection.project(source.x, chunk.distinct)
        with torch.enable_grad():
            projected = projected.detach().requires_grad_()
            read = [
                t.detach().requires_grad_(total is not None)
                for t, total in zip(function.tensors, self._function_totals, strict=True)
            ]
            result = function.function(projected, *read)
        leaves = [projected, *(t for t in read if t.requires_grad)]
        grad, *read_grads = torch.autograd.grad(result, leaves, grad, allow_unused=True, materialize_grads=True)
        function.add_gradient(self._function_totals, iter(read_grads), rows, chunk.distinct)
        return grad


def collecting_dtype(t: Tensor, rows: slice | None) -> torch.dtype:
    """The dtype in which products with `t` are collected: float32 over blocks of rows."""
    return t.dtype if rows is None else _at_least_float32(t.dtype)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _positions(chunk: HeadChunk, like: Tensor) -> Tensor:
    """Where each head of the exchange buffer is among the chunk's distinct heads."""
    at = {head: i for i, head in enumerate(chunk.distinct[0])}
    return constant(tuple(at[head] for row in chunk.by_rank for head in row), like)
