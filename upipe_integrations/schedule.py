"""Which heads run in which stage on which rank. Pure Python: no torch, no process group.

Heads stay where Ulysses puts them: rank r owns a contiguous block of query heads, and stage s takes
the next ``chunk_heads / ranks`` heads of *every* rank's block. No permutation of heads exists, so
query head i always meets KV head ``i // (heads // kv_heads)`` and outputs are in checkpoint order.

Invariants, each a property test: every query head is real in exactly one stage on one rank; a rank's
query heads of a stage find their KV head among the stage's KV heads of that rank; all ranks see the
same number of stages, query heads and KV heads, so they run the same collectives with the same sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True)
class HeadChunk:
    """The heads of one stage, listed per rank; every rank has as many.

    Args:
        by_rank: ``by_rank[r][j]`` is the global head that is rank r's j-th in this stage.
    """

    by_rank: tuple[tuple[int, ...], ...]

    @property
    def per_rank(self) -> int:
        """Heads of one rank in this stage."""
        return len(self.by_rank[0])

    @property
    def is_replicated(self) -> bool:
        """Whether a head goes to several ranks: fewer KV heads than ranks."""
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
    stages: tuple[Stage, ...]

    @classmethod
    def build(cls, *, heads: int, kv_heads: int, ranks: int, chunk_heads: int) -> Schedule:
        """The schedule for `heads` query and `kv_heads` KV heads on `ranks` ranks.

        `chunk_heads` is the number of query heads per stage over all ranks (U in arXiv 2602.21196,
        section 3). A group of one rank is served too: stages save memory there as well.

        Raises:
            ValueError: `heads` is not a multiple of `kv_heads` or of `ranks`; KV heads and ranks do
                not divide each other; `chunk_heads` is not a positive multiple of `ranks` that is at
                most `heads`.
        """
        if min(heads, kv_heads, ranks) < 1 or heads % kv_heads:
            raise ValueError(
                f"{heads} query heads, {kv_heads} KV heads, {ranks} ranks: each must be positive and the "
                "query heads a multiple of the KV heads. Check the model's configuration."
            )
        if heads % ranks:
            raise ValueError(
                f"{heads} query heads on {ranks} sequence-parallel ranks: heads that the ranks do not divide "
                f"are not supported yet. Use a number of ranks that divides {heads}."
            )
        if kv_heads % ranks and ranks % kv_heads:
            raise ValueError(
                f"{kv_heads} KV heads on {ranks} sequence-parallel ranks: one must divide the other. "
                f"Use a number of ranks that divides {kv_heads} or is a multiple of it."
            )
        if chunk_heads < 1 or chunk_heads % ranks or chunk_heads > heads:
            raise ValueError(
                f"chunk_heads = {chunk_heads}: must be a positive multiple of the {ranks} ranks and at most "
                f"the {heads} query heads."
            )
        h, u, group = heads // ranks, chunk_heads // ranks, heads // kv_heads
        chunks: list[tuple[HeadChunk, HeadChunk, tuple[tuple[int, ...], ...]]] = []
        for first in range(0, h, u):
            local = range(first, min(first + u, h))
            q = tuple(tuple(r * h + j for j in local) for r in range(ranks))
            kv = tuple(tuple(sorted({i // group for i in row})) for row in q)
            assert len({len(row) for row in kv}) == 1, "ranks need different numbers of KV heads"
            pairing = tuple(tuple(kv[r].index(i // group) for i in q[r]) for r in range(ranks))
            chunks.append((HeadChunk(q), HeadChunk(kv), pairing))
        stages = tuple(
            Stage(
                q,
                kv,
                pairing,
                opens_kv=s == 0 or chunks[s - 1][1] != kv,
                closes_kv=s + 1 == len(chunks) or chunks[s + 1][1] != kv,
            )
            for s, (q, kv, pairing) in enumerate(chunks)
        )
        return cls(heads, kv_heads, ranks, chunk_heads, stages)
