"""A batch and its loss on the ranks of a sequence-parallel group.

Labels are shifted before they are sharded, so that the last token of a shard is trained on the first of the
next.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from upipe_integrations.all_to_all import (
    Group,
    gather_integers,
    gather_over_group,
    group_rank,
    group_ranks,
    sum_over_group,
)
from upipe_integrations.layout import Layout

IGNORED = -100
"""Label of a token that is not trained on, as everywhere in PyTorch and Transformers."""


def padding_for(length: int, multiple: int) -> int:
    """Tokens to append so that `length` becomes a multiple of `multiple`: 7 and 4 give 1."""
    return -length % multiple


def shift_labels(labels: Tensor) -> Tensor:
    """Next-token targets of `[B, S]` labels: 1, 2, 3 -> 2, 3, -100."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def shard_batch(batch: Mapping[str, Tensor], group: Group, layout: Layout | None = None) -> dict[str, Tensor]:
    """This rank's shard of a batch that every rank of `group` holds whole.

    Every tensor is `[B, S, ...]` and is dealt along S in `layout` (None is contiguous). Global
    ``position_ids`` are added where there are none; of several components per token they are `[4, B, S]`, the
    plain ones first. What else a vision-language model takes is not dealt, see :func:`shard_features`.
    ``labels`` become ``shift_labels`` (targets already shifted, across shards too): pass them to
    :func:`mean_token_loss`, not to the model, which would shift them again. Where ``position_ids`` restart, a new
    document begins: no token is trained on the next document's first.

    Raises:
        ValueError: S does not fit the layout on the ranks, tensors differ in S, position_ids have components without
            plain ones, or the ranks hold different batches; on every rank alike.
    """
    layout = layout or Layout()
    C, rank = group_ranks(group), group_rank(group)
    _check_same_batch(batch, group)
    plain = batch.get("position_ids")
    if plain is not None and plain.dim() == 3:
        if plain.shape[0] != _WITH_COMPONENTS:
            raise ValueError(
                f"position_ids of shape {tuple(plain.shape)}: must be [batch, sequence], or "
                f"[{_WITH_COMPONENTS}, batch, sequence]: plain positions, which tell documents apart, and then the "
                "model's own three components."
            )
        plain = plain[0]
    dims = {name: 2 if name == "position_ids" and t.dim() == 3 else 1 for name, t in batch.items()}
    lengths = {name: t.shape[dims[name]] for name, t in batch.items()}
    S = next(iter(lengths.values()))
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"tensors of a batch have different sequence lengths {lengths}: all must be [batch, sequence]."
        )
    layout.check(S, C)
    whole = dict(batch)
    first = next(iter(whole.values()))
    if plain is None:
        plain = whole["position_ids"] = torch.arange(S, device=first.device).expand(first.shape[0], S)
    if "labels" in whole:
        shifted = shift_labels(whole.pop("labels"))
        begins = _begins_document(plain)[:, 1:]
        whole["shift_labels"] = shifted.masked_fill(F.pad(begins, (0, 1)), IGNORED)
    return {name: layout.deal(t, dims.get(name, 1), rank, C) for name, t in whole.items()}


_WITH_COMPONENTS = 4
"""Components of position_ids that have three of their own, as vision-language models' do."""


def shard_features(
    features: Tensor, input_ids: Tensor, placeholder: int, group: Group, layout: Layout | None = None
) -> Tensor:
    """This rank's rows of what an encoder made of images, which every rank encodes whole.

    Gradients of the encoder's parameters on the ranks then add up to those of one process, as all others do.

    Args:
        features: `[N, E]`, a row for each placeholder in the batch, in order.
        input_ids: `[B, S]`, the batch that every rank holds whole.
        placeholder: the token that stands for a row of features.
        layout: how :func:`shard_batch` dealt the batch.

    Returns:
        `[n, E]`, the rows for the placeholders in this rank's shard of `input_ids`.

    Raises:
        ValueError: there are not N placeholders.
    """
    stands_in = input_ids == placeholder
    numbers = (stands_in.flatten().cumsum(0) - 1).view_as(stands_in)
    if int(stands_in.sum()) != features.shape[0]:
        raise ValueError(
            f"features of shape {tuple(features.shape)} for {int(stands_in.sum())} tokens {placeholder} in input_ids "
            f"of shape {tuple(input_ids.shape)}: must have a row for each. Pass input_ids of the whole batch, not a "
            "shard."
        )
    layout, C, rank = layout or Layout(), group_ranks(group), group_rank(group)
    mine: Tensor = layout.deal(numbers, 1, rank, C)[layout.deal(stands_in, 1, rank, C)]
    return features[mine]


def documents_from_positions(
    position_ids: Tensor, group: Group, layout: Layout | None = None
) -> tuple[tuple[int, ...], ...] | None:
    """Boundaries of packed documents, for ``AttentionSpec.documents``, from position_ids that restart.

    Args:
        position_ids: `[B or 1, L]`, this rank's rows; a document begins wherever they do not go on by one.
        group: the ranks that hold the sequence.
        layout: which rows a rank holds; None is contiguous.

    Returns:
        Boundaries ``(0, ..., S)`` by batch row, the same on every rank; None where every row is one document.

    Raises:
        ValueError: positions jump to another than 0, as they do when shards are out of order; on every rank
            alike.
    """
    return documents_in((layout or Layout()).collect(gather_over_group(position_ids, group), 1))


def documents_in(position_ids: Tensor, padding: Tensor | None = None) -> tuple[tuple[int, ...], ...] | None:
    """:func:`documents_from_positions` of whole sequences, `[B, S]`.

    Args:
        position_ids: the positions of all tokens.
        padding: `[B, S]`, True at tokens that nobody looks at: whatever their positions, they go on with the document
            before them. None is no padding.
    """
    begins = _begins_document(position_ids)
    real = torch.ones_like(begins) if padding is None else ~padding
    begins[:, 1:] &= real[:, 1:]
    if bool((position_ids[begins & real] != 0).any()):
        raise ValueError(
            f"position_ids jump to {position_ids[begins & real].unique().tolist()}: a packed document must start at 0. "
            "Check that the shards are in order and that positions are counted per document."
        )
    if int(begins.sum()) == begins.shape[0]:
        return None
    S = position_ids.shape[1]
    return tuple((*row.nonzero().flatten().tolist(), S) for row in begins)


def _begins_document(position_ids: Tensor) -> Tensor:
    """`[B, S]`, True at the first token of each document."""
    goes_on = position_ids[:, 1:] == position_ids[:, :-1] + 1
    return F.pad(~goes_on, (1, 0), value=True)


def check_same_shape(x: Tensor, group: Group) -> None:
    """Raise ValueError, on every rank alike, unless `x` has the same shape on all ranks of `group`.

    One small all-gather; attention itself does not ask, as ranks with other shapes than their peers would wait
    for each other. Call it where batches come in.
    """
    shapes = gather_integers(list(x.shape), group, x.device)
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"the ranks of a sequence-parallel group hold tensors of different shapes, by rank: {shapes}. All must "
            "hold shards of the same batch; pad the sequence before sharding it."
        )


def mean_token_loss(logits: Tensor, shifted_labels: Tensor, group: Group) -> Tensor:
    """This rank's share of the mean cross entropy over the group's labelled tokens.

    Args:
        logits: `[B, L, vocabulary]` of this rank's rows.
        shifted_labels: `[B, L]`, already shifted; -100 is not counted.

    Returns:
        The sum of this rank's token losses over the number of labelled tokens on all ranks: the shares add
        up to the mean, however unevenly labels are spread, and a rank without labels gives 0, not NaN.
        Gradients *summed* over the group are those of one process; where they are averaged, multiply by
        the ranks (``deepspeed_plugin.sequence_parallel_loss`` does so).
    """
    return summed_token_loss(logits, shifted_labels) / count_labels(shifted_labels, group).clamp(min=1)


def summed_token_loss(logits: Tensor, shifted_labels: Tensor) -> Tensor:
    """The sum of this rank's token losses, in float32 or the logits' wider dtype; see :func:`mean_token_loss`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), shifted_labels.flatten(), ignore_index=IGNORED, reduction="sum")


def count_labels(shifted_labels: Tensor, group: Group) -> Tensor:
    """The number of labelled tokens on all ranks of `group`."""
    return sum_over_group((shifted_labels != IGNORED).sum(), group)


def sequence_sums(values: Tensor, group: Group, gradient_factor: float = 1) -> Tensor:
    """`[B, L]` values of this rank's tokens -> `[B]` sums over the whole sequences, the same on every rank.

    For a loss of whole sequences (DPO and the like) that every rank then computes alike. The gradient of such
    a loss passes to this rank's tokens as it is, times `gradient_factor`: gradients of parameters *summed*
    over the group are those of one process; where they are averaged, give the ranks.
    """
    result: Tensor = _SequenceSums.apply(values, group, gradient_factor)  # type: ignore[no-untyped-call]
    return result


class _SequenceSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group, gradient_factor: float) -> Tensor:
        ctx.shape, ctx.gradient_factor = values.shape, gradient_factor
        return sum_over_group(values.sum(1), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad * ctx.gradient_factor)[:, None].expand(ctx.shape), None, None


def _check_same_batch(batch: Mapping[str, Tensor], group: Group) -> None:
    device = next(iter(batch.values())).device
    form = zlib.crc32(repr([(name, tuple(t.shape), str(t.dtype)) for name, t in batch.items()]).encode())
    content = sum(int(content_digest(t)) for t in batch.values()) % (1 << 62)
    by_rank = gather_integers([form, content], group, device)
    differing = [r for r, said in enumerate(by_rank) if said != by_rank[0]]
    if differing:
        raise ValueError(
            f"the ranks of a sequence-parallel group hold different batches: ranks {differing} differ from rank 0. "
            "All must load the same batch before it is sharded: seed and shard the data loader by data-parallel "
            "rank, not by global rank."
        )


def content_digest(tensor: Tensor) -> Tensor:
    """A number that depends on every value and its place: an integer tensor without dimensions, on the same device."""
    values = tensor.detach().flatten()
    if values.is_floating_point():
        values = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize])
    places = torch.arange(1, values.numel() + 1, device=values.device)
    return (values.long() * (places * 2654435761 % 1000003)).sum()
