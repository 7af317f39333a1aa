"""Cases that meet every pair of values of two parameters, in the place of the full product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def pairwise(
    parameters: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Few cases in which every two values of different parameters meet, as far as an allowed case has both.

    The same cases every time: of all allowed ones, in the order of their product, always the first that meets most
    pairs that have not met yet.

    Args:
        parameters: name to values, which can be hashed.
        allowed: whether a case makes sense.
    """
    product = (dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values()))
    cases = [case for case in product if allowed(case)]
    candidates = {index: pairs_of(case) for index, case in enumerate(cases)}
    chosen = []
    while candidates:
        best = max(candidates, key=lambda index: len(candidates[index]))
        met = candidates[best]
        chosen.append(cases[best])
        candidates = {index: left for index, pairs in candidates.items() if (left := pairs - met)}
    return chosen


def pairs_of(case: Mapping[str, Any]) -> frozenset[tuple[tuple[str, Any], tuple[str, Any]]]:
    """What meets what in a case."""
    return frozenset(itertools.combinations(case.items(), 2))
