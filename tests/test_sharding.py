"""Shards of a batch and their loss (public faults 1, 10, 12, 25, 27)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ranks import on_pool
from upipe_integrations import Layout
from upipe_integrations.sharding import (
    check_same_shape,
    documents_from_positions,
    mean_token_loss,
    padding_for,
    shard_batch,
    shift_labels,
)


@pytest.mark.parametrize(("length", "multiple", "padding"), [(7, 4, 1), (8, 4, 0), (1, 4, 3), (9, 2, 1)])
def test_padding_completes_the_multiple(length, multiple, padding):
    assert padding_for(length, multiple) == padding


def test_labels_shift_to_the_next_token():
    assert shift_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]


def _shards() -> dict[str, object]:
    rank, group = dist.get_rank(), dist.group.WORLD
    ids = torch.arange(1, 9)[None]
    shard = shard_batch({"input_ids": ids, "labels": ids}, group)
    given = shard_batch({"input_ids": ids, "position_ids": ids + 10}, group)
    messages = {}
    for name, batch in {
        "odd": {"input_ids": torch.arange(7)[None]},
        "uneven": {"input_ids": ids, "labels": ids[:, :4]},
        "seeds": {"input_ids": torch.randint(0, 99, (1, 8), generator=torch.Generator().manual_seed(rank))},
        "order": {"input_ids": ids if rank == 0 else ids.flip(1)},
        "shape": {"input_ids": ids if rank == 0 else ids[:, :6]},
    }.items():
        try:
            shard_batch(batch, group)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    check_same_shape(ids, group)
    try:
        check_same_shape(ids[:, : 8 - rank], group)
    except ValueError as error:
        messages["tensors"] = str(error)
    return {"shard": shard, "given": given, "messages": messages}


@pytest.fixture(scope="module")
def shards():
    return on_pool(2, _shards)


def test_shards_are_contiguous_with_global_positions_and_whole_labels(shards):
    assert [s["shard"]["input_ids"].tolist() for s in shards] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    assert [s["shard"]["position_ids"].tolist() for s in shards] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [s["shard"]["shift_labels"].tolist() for s in shards] == [[[2, 3, 4, 5]], [[6, 7, 8, -100]]]
    assert "labels" not in shards[0]["shard"]
    assert shards[1]["given"]["position_ids"].tolist() == [[15, 16, 17, 18]]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("odd", "7 tokens on 2 sequence-parallel ranks.*with 1 tokens that are not trained on"),
        ("uneven", "different sequence lengths {'input_ids': 8, 'labels': 4}"),
        ("seeds", r"different batches: ranks \[1\] differ from rank 0.*data-parallel rank"),
        ("order", r"ranks \[1\] differ"),
        ("shape", r"ranks \[1\] differ"),
        ("tensors", r"different shapes, by rank: \[\[1, 8\], \[1, 7\]\]"),
    ],
)
def test_bad_batches_are_refused_on_every_rank_alike(shards, case, message):
    first, second = (s["messages"][case] for s in shards)
    assert first == second
    with pytest.raises(ValueError, match=message):
        raise ValueError(first)


def _packed() -> dict[str, object]:
    positions = torch.cat([torch.arange(3), torch.arange(5)])[None]
    ids = torch.arange(1, 9)[None]
    group, rank = dist.group.WORLD, dist.get_rank()
    result: dict[str, object] = {}
    for name, layout in {"contiguous": Layout.contiguous(), "zigzag": Layout.zigzag()}.items():
        shard = shard_batch({"input_ids": ids, "labels": ids, "position_ids": positions}, group, layout)
        result[name] = shard["shift_labels"].tolist()
        result[f"{name} documents"] = documents_from_positions(shard["position_ids"], group, layout)
    result["one document"] = documents_from_positions(torch.arange(8)[None].chunk(2, 1)[rank], group)
    try:
        documents_from_positions(torch.arange(8)[None].chunk(2, 1)[1 - rank], group)
    except ValueError as error:
        result["swapped"] = str(error)
    return result


def test_documents_come_from_positions_and_no_label_crosses_them():
    """Public fault 13: no token is trained on the next document's first."""
    first, second = on_pool(2, _packed)
    assert first["contiguous"] + second["contiguous"] == [[2, 3, -100, 5], [6, 7, 8, -100]]
    assert first["zigzag"] + second["zigzag"] == [[2, 3, 8, -100], [-100, 5, 6, 7]]
    for result in (first, second):
        assert result["contiguous documents"] == result["zigzag documents"] == ((0, 3, 8),)
        assert result["one document"] is None
        assert "position_ids jump to [0, 4]" in result["swapped"]


def _losses(labels: torch.Tensor) -> tuple[float, torch.Tensor]:
    rank, C = dist.get_rank(), dist.get_world_size()
    logits = torch.randn(1, 8, 5, generator=torch.Generator().manual_seed(3)).requires_grad_()
    L = 8 // C
    rows = slice(rank * L, rank * L + L)
    loss = mean_token_loss(logits[:, rows], labels[:, rows], dist.group.WORLD)
    loss.backward()
    dist.all_reduce(logits.grad)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total), logits.grad


@pytest.mark.parametrize(
    "labels",
    [
        [[1, 2, 3, 4, 0, 1, 2, -100]],
        [[1, 2, 3, 4, -100, -100, -100, -100]],  # the second rank has none
        [[1, -100, -100, -100, 2, 3, -100, 4]],
    ],
)
def test_shares_of_the_loss_add_up_to_the_mean(labels):
    labels = torch.tensor(labels)
    logits = torch.randn(1, 8, 5, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    expected.backward()
    for total, grad in on_pool(2, _losses, labels):
        assert total == pytest.approx(float(expected.detach()), rel=1e-6)
        torch.testing.assert_close(grad, logits.grad)


def test_no_labels_at_all_give_zero():
    logits = torch.randn(1, 4, 5, requires_grad=True)
    loss = mean_token_loss(logits, torch.full((1, 4), -100), None)
    loss.backward()
    assert float(loss) == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
