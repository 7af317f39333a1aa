"""The schedule alone: every query head once, always with its KV head, and the same work for all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upipe_integrations import Schedule


@st.composite
def layers(draw):
    """(heads, kv_heads, ranks, chunk_heads) that the schedule serves, U dividing H or not."""
    ranks = draw(st.integers(1, 8))
    per_rank = draw(st.integers(1, 12))
    heads = ranks * per_rank
    fits = [k for k in range(1, heads + 1) if heads % k == 0 and (k % ranks == 0 or ranks % k == 0)]
    return heads, draw(st.sampled_from(fits)), ranks, ranks * draw(st.integers(1, per_rank))


@given(layers())
def test_every_query_head_is_attended_once_by_its_owner(layer):
    heads, kv_heads, ranks, chunk_heads = layer
    schedule = Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=chunk_heads)
    per_rank = heads // ranks
    for rank in range(ranks):
        attended = [head for stage in schedule.stages for head in stage.q.by_rank[rank]]
        assert attended == list(range(rank * per_rank, (rank + 1) * per_rank))


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
    opened = [stage.kv for stage in schedule.stages if stage.opens_kv]
    closed = [stage.kv for stage in schedule.stages if stage.closes_kv]
    assert opened == closed
    group, u = heads // kv_heads, chunk_heads // ranks
    if group % u == 0 or u % group == 0:  # aligned: no KV head is sent twice to a rank
        for rank in range(ranks):
            sent = [head for kv in opened for head in kv.by_rank[rank]]
            assert len(sent) == len(set(sent))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ((30, 10, 4, 4), r"30 query heads on 4 .* divides 30"),
        ((32, 6, 4, 4), r"32 query heads, 6 KV heads"),
        ((24, 6, 4, 4), r"6 KV heads on 4 .* one must divide the other"),
        ((32, 8, 4, 6), r"chunk_heads = 6: must be a positive multiple of the 4 ranks"),
        ((32, 8, 4, 36), r"chunk_heads = 36: .* at most the 32 query heads"),
        ((32, 8, 4, 0), r"chunk_heads = 0"),
    ],
)
def test_what_does_not_fit_is_refused(layer, message):
    heads, kv_heads, ranks, chunk_heads = layer
    with pytest.raises(ValueError, match=message):
        Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=chunk_heads)
