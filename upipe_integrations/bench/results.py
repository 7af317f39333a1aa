"""Samples of a job as rows: medians and ratios to the first contender."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from statistics import median
from typing import Any

from upipe_integrations.bench.job import Contender, Job, Profile, Sample, StepPeak


class Measured:
    """The samples of a job, as they come."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.samples: dict[tuple[int, str, Contender], list[Sample]] = {}
        self.peaks: dict[tuple[int, str, Contender], float] = {}

    def add(self, result: Sample | StepPeak | Profile) -> None:
        """Keep it, if it counts."""
        if isinstance(result, StepPeak):
            self.peaks[result.tokens, result.step, result.contender] = result.bytes
        elif isinstance(result, Sample) and result.counts:
            self.samples.setdefault((result.tokens, result.step, result.contender), []).append(result)

    @property
    def wanted(self) -> int:
        """Rows of the whole job."""
        return len(self.job.tokens) * len(self.job.steps) * len(self.job.contenders)

    @property
    def complete(self) -> bool:
        """Whether all that the job asks for is there."""
        job = self.job
        keys = itertools.product(job.tokens, job.steps, job.contenders)
        return all(len(self.samples.get(key, ())) == job.repeats for key in keys)

    def rows(self) -> list[dict[str, Any]]:
        """Medians of every contender, and ratios to the first's, by tokens and step; of what there is."""
        rows = []
        for tokens, step, contender in itertools.product(self.job.tokens, self.job.steps, self.job.contenders):
            mine = self.samples.get((tokens, step, contender))
            first = self.samples.get((tokens, step, self.job.contenders[0]))
            if not mine or not first:
                continue
            wall, cpu = _medians(mine)
            first_wall, first_cpu = _medians(first)
            rows.append(
                {
                    "tokens": tokens,
                    "step": step,
                    "contender": contender.name,
                    "chunk_heads": contender.chunk_heads,
                    "mode": contender.mode.memory if contender.mode else None,
                    "wall_s": wall,
                    "cpu_s": cpu,
                    "wall_ratio": wall / first_wall,
                    "cpu_ratio": cpu / first_cpu,
                    "samples": [(sample.wall, sample.cpu) for sample in mine],
                    **self._peak(tokens, step, contender),
                }
            )
        return rows

    def _peak(self, tokens: int, step: str, contender: Contender) -> dict[str, float]:
        mine = self.peaks.get((tokens, step, contender))
        first = self.peaks.get((tokens, step, self.job.contenders[0]))
        if mine is None or first is None:
            return {}
        return {"peak_mib": mine / 2**20, "peak_ratio": mine / first}


def _medians(samples: Iterable[Sample]) -> tuple[float, float]:
    samples = list(samples)
    return median(sample.wall for sample in samples), median(sample.cpu for sample in samples)
