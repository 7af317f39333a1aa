"""The helper that picks cases of other tests."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pairwise import pairs_of, pairwise


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 6))
def test_every_pair_that_an_allowed_case_has_is_met(sizes, forbidden):
    parameters = {f"p{number}": range(size) for number, size in enumerate(sizes)}

    def allowed(case):
        return sum(case.values()) != forbidden

    product = [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]
    possible = {pair for case in product if allowed(case) for pair in pairs_of(case)}
    cases = pairwise(parameters, allowed)
    assert all(allowed(case) for case in cases)
    assert {pair for case in cases for pair in pairs_of(case)} == possible
    assert cases == pairwise(parameters, allowed)


def test_they_are_few():
    parameters = {"feature": range(10), "mode": range(10), "layout": range(2), "kernel": range(2), "heads": range(2)}
    assert len(pairwise(parameters)) < 110  # of 800; 10 x 10 must meet
