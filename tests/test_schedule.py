"""The schedule alone: every query head once, always with its KV head, and the same work for all ranks."""

from __future__ import annotations

import functools
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upipe_integrations import Schedule


@st.composite
def layers(draw):
    """(heads, kv_heads, ranks, chunk_heads): any, whether they divide each other or not."""
    ranks = draw(st.integers(1, 8))
    heads = draw(st.integers(ranks, 96))
    kv_heads = draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
    return heads, kv_heads, ranks, ranks * draw(st.integers(1, heads // ranks))


@given(layers())
def test_every_query_head_is_real_once_in_a_contiguous_block_of_its_rank(layer):
    heads, kv_heads, ranks, chunk_heads = layer
    schedule = Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=chunk_heads)
    by_rank = [
        [head for stage in schedule.stages for head in stage.q.by_rank[rank][: stage.q.real[rank]]]
        for rank in range(ranks)
    ]
    assert functools.reduce(operator.iadd, by_rank, []) == list(range(heads))
    assert max(map(len, by_rank)) - min(map(len, by_rank)) <= 1
    assert len(schedule.stages) == -(-max(map(len, by_rank)) // (chunk_heads // ranks))
    if heads % ranks == 0:
        assert all(stage.q.padding == () for stage in schedule.stages)


@given(layers())
def test_padding_and_real_positions_are_the_whole_exchange(layer):
    heads, kv_heads, ranks, chunk_heads = layer
    schedule = Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=chunk_heads)
    for stage in schedule.stages:
        for chunk in (stage.q, stage.kv):
            real = [r * chunk.per_rank + j for r, count in enumerate(chunk.real) for j in range(count)]
            assert sorted([*real, *chunk.padding]) == list(range(ranks * chunk.per_rank))
            rows = chunk.by_rank
            repeated = [rows[p // chunk.per_rank][p % chunk.per_rank] for p in chunk.padding]
            assert all(0 <= head < heads for head in repeated)


@given(layers())
def test_every_query_head_meets_its_kv_head(layer):
    heads, kv_heads, ranks, chunk_heads = layer
    schedule = Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=chunk_heads)
    for stage in schedule.stages:
        for rank in range(ranks):
            for j, head in enumerate(stage.q.by_rank[rank]):
                assert stage.kv.by_rank[rank][stage.kv_of_q[rank][j]] == head // (heads // kv_heads)


@given(layers())
def test_ranks_run_the_same_exchanges_and_kv_travels_once(layer):
    heads, kv_heads, ranks, chunk_heads = layer
    schedule = Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=chunk_heads)
    for stage in schedule.stages:
        assert len({len(row) for row in stage.q.by_rank}) == len({len(row) for row in stage.kv.by_rank}) == 1
    opened = [stage.kv.by_rank for stage in schedule.stages if stage.opens_kv]
    closed = [stage.kv.by_rank for stage in schedule.stages if stage.closes_kv]
    assert opened == closed
    group, u = heads // kv_heads, chunk_heads // ranks
    own = heads // ranks
    aligned = heads % ranks == 0 and (own % group == 0 or group % own == 0)
    if aligned and (group % u == 0 or u % group == 0):  # then no KV head is sent twice to a rank
        for rank in range(ranks):
            sent = [head for rows in opened for head in rows[rank]]
            assert len(sent) == len(set(sent))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ((32, 6, 4, 4), r"32 query heads, 6 KV heads"),
        ((32, 8, 4, 6), r"chunk_heads = 6: must be a positive multiple of the 4 ranks"),
        ((32, 8, 4, 36), r"chunk_heads = 36: .* at most the 32 query heads"),
        ((32, 8, 4, 0), r"chunk_heads = 0"),
    ],
)
def test_what_does_not_fit_is_refused(layer, message):
    heads, kv_heads, ranks, chunk_heads = layer
    with pytest.raises(ValueError, match=message):
        Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=chunk_heads)


def test_known_uneven_layers():
    """28 heads on 8 ranks (Qwen2.5-7B), 12/2 and 14/2 on 4."""
    stages = Schedule.build(heads=28, kv_heads=4, ranks=8, chunk_heads=8).stages
    assert len(stages) == 4
    assert stages[3].q.by_rank == ((3,), (7,), (11,), (15,), (18,), (21,), (24,), (27,))
    assert stages[3].q.real == (1, 1, 1, 1, 0, 0, 0, 0)
    assert stages[3].q.padding == (4, 5, 6, 7)
    assert Schedule.build(heads=12, kv_heads=2, ranks=4, chunk_heads=4).stages[0].kv.by_rank == ((0,), (0,), (1,), (1,))
    stages = Schedule.build(heads=14, kv_heads=2, ranks=4, chunk_heads=16 - 4).stages
    assert [stage.q.real for stage in stages] == [(3, 3, 3, 3), (1, 1, 0, 0)]
    assert [stage.kv.by_rank for stage in stages] == [((0,), (0,), (1,), (1,)), ((0,), (1,), (1,), (1,))]
    (stage,) = Schedule.build(heads=14, kv_heads=2, ranks=3, chunk_heads=14 - 2).stages[:1]
    assert stage.kv.by_rank == ((0, 0), (0, 1), (1, 1)) and stage.kv.real == (1, 2, 1)
