"""Which heads run in which stage on which rank. Pure Python: no torch, no process group.

Heads stay where Ulysses puts them: rank r owns a contiguous block of query heads (where the ranks do not
divide the heads, the first ranks own one more), and stage s takes the next ``chunk_heads / ranks`` heads of
*every* rank's block. No permutation of heads exists, so query head i always meets KV head
``i // (heads // kv_heads)`` and outputs are in checkpoint order.

Exchanges need as many heads from every rank. A rank that runs out of heads in the last stage repeats its last
one, and a rank that needs fewer KV heads than another repeats one; a repeated query head's result is dropped
and its gradient is zero.

Invariants, each a property test: every query head is real in exactly one stage on one rank; a rank's
query heads of a stage find their KV head among the stage's KV heads of that rank; all ranks see the
same number of stages, query heads and KV heads, so they run the same collectives with the same sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain


@dataclass(frozen=True)
class HeadChunk:
    """The heads of one stage, listed per rank; every rank has as many.

    Args:
        by_rank: ``by_rank[r][j]`` is the global head that is rank r's j-th in this stage.
        real: how many of a rank's heads are real, by rank; the rest repeat one and fill the exchange.
    """

    by_rank: tuple[tuple[int, ...], ...]
    real: tuple[int, ...]

    @classmethod
    def filled(cls, rows: Sequence[Sequence[int]], spare: Sequence[int]) -> HeadChunk:
        """Rows of different lengths made equal; rank r repeats its last head, or `spare[r]` where it has none."""
        width = max(map(len, rows))
        by_rank = tuple((*row, *((row[-1] if row else spare[r]),) * (width - len(row))) for r, row in enumerate(rows))
        return cls(by_rank, tuple(map(len, rows)))

    @property
    def padding(self) -> tuple[int, ...]:
        """Positions of the repeated heads in the rank-major order of the exchange buffers."""
        return tuple(r * self.per_rank + j for r, real in enumerate(self.real) for j in range(real, self.per_rank))

    @property
    def per_rank(self) -> int:
        """Heads of one rank in this stage."""
        return len(self.by_rank[0])

    @property
    def is_replicated(self) -> bool:
        """Whether a head is there more than once: it goes to several ranks, or fills an exchange."""
        return len(set(chain.from_iterable(self.by_rank))) != len(self.by_rank) * self.per_rank

    @property
    def distinct(self) -> tuple[tuple[int, ...], ...]:
        """The heads to project, each once, in equal rows: a row per rank, or one row when replicated."""
        if not self.is_replicated:
            return self.by_rank
        return (tuple(sorted(set(chain.from_iterable(self.by_rank)))),)


@dataclass(frozen=True)
class Stage:
    """One pass of project, exchange, attend, exchange back.

    Args:
        q: the stage's query heads.
        kv: the KV heads they need.
        kv_of_q: ``kv_of_q[r][j]``: which of rank r's KV heads its j-th query head attends.
        opens_kv: the KV heads differ from the stage before: K and V must be sent.
        closes_kv: the KV heads differ from the stage after: dK and dV travel back.
    """

    q: HeadChunk
    kv: HeadChunk
    kv_of_q: tuple[tuple[int, ...], ...]
    opens_kv: bool
    closes_kv: bool

    def grouped_evenly(self, rank: int) -> bool:
        """Whether rank's query heads are equal consecutive groups, one per KV head: plain GQA."""
        n, rest = divmod(self.q.per_rank, self.kv.per_rank)
        return rest == 0 and self.kv_of_q[rank] == tuple(j // n for j in range(self.q.per_rank))


@dataclass(frozen=True)
class Schedule:
    """The stages of one attention layer; build it with :meth:`build`."""

    heads: int
    kv_heads: int
    ranks: int
    chunk_heads: int
    stages: tuple[Stage, ...] = field(init=False, repr=False, compare=False)

    @classmethod
    def build(cls, *, heads: int, kv_heads: int, ranks: int, chunk_heads: int) -> Schedule:
        """The schedule for `heads` query and `kv_heads` KV heads on `ranks` ranks.

        `chunk_heads` is the number of query heads per stage over all ranks (U in arXiv 2602.21196,
        section 3). A group of one rank is served too: stages save memory there as well.

        Raises:
            ValueError: `heads` is not a multiple of `kv_heads`, or `chunk_heads` is not a positive multiple of
                `ranks` that is at most `heads`.
        """
        if min(heads, kv_heads, ranks) < 1 or heads % kv_heads:
            raise ValueError(
                f"{heads} query heads, {kv_heads} KV heads, {ranks} ranks: each must be positive and the "
                "query heads a multiple of the KV heads. Check the model's configuration."
            )
        if chunk_heads < 1 or chunk_heads % ranks or chunk_heads > heads:
            raise ValueError(
                f"chunk_heads = {chunk_heads}: must be a positive multiple of the {ranks} ranks and at most "
                f"the {heads} query heads."
            )
        return cls(heads, kv_heads, ranks, chunk_heads)

    def __post_init__(self) -> None:
        stages = _stages_of(self.heads, self.kv_heads, self.ranks, self.chunk_heads)
        object.__setattr__(self, "stages", stages)


def _stages_of(heads: int, kv_heads: int, ranks: int, chunk_heads: int) -> tuple[Stage, ...]:
    u, group = chunk_heads // ranks, heads // kv_heads
    sizes = [heads // ranks + (r < heads % ranks) for r in range(ranks)]
    starts = [0, *accumulate(sizes)]
    owned = [range(starts[r], starts[r + 1]) for r in range(ranks)]
    last = [block[-1] for block in owned]
    chunks: list[tuple[HeadChunk, HeadChunk, tuple[tuple[int, ...], ...]]] = []
    for first in range(0, max(sizes), u):
        q = HeadChunk.filled([block[first : first + u] for block in owned], last)
        needed = [sorted({i // group for i in row}) for row in q.by_rank]
        kv = HeadChunk.filled(needed, last)
        pairing = tuple(
            tuple(row.index(i // group) for i in heads_of_rank)
            for row, heads_of_rank in zip(kv.by_rank, q.by_rank, strict=True)
        )
        chunks.append((q, kv, pairing))
    return tuple(
        Stage(
            q,
            kv,
            pairing,
            opens_kv=s == 0 or chunks[s - 1][1].by_rank != kv.by_rank,
            closes_kv=s + 1 == len(chunks) or chunks[s + 1][1].by_rank != kv.by_rank,
        )
        for s, (q, kv, pairing) in enumerate(chunks)
    )
