"""Sums of a gradient's parts: how finely they round, and that no size of number upsets them."""

from __future__ import annotations

import pytest
import torch

from upipe_integrations.projections.sums import ScaledSum, Sum


def _parts(number: int, rows: int = 64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, rows, 32, generator=generator).bfloat16() for _ in range(number)]


def _errors(parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Relative error of each row of the sum, against float64, by the way it is made."""
    exact = sum(part.double() for part in parts)
    errors = {}
    for name, total in {"scaled": ScaledSum(), "bf16": Sum(torch.bfloat16), "float32": Sum(torch.float32)}.items():
        for part in parts:
            total.add_(part.clone())
        got = total.take(torch.bfloat16)
        assert got.dtype == torch.bfloat16
        errors[name] = (got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return errors


@pytest.mark.parametrize("number", [8, 300])
def test_a_scaled_sum_errs_like_float32_and_not_like_bfloat16(number):
    errors = _errors(_parts(number))
    assert float(errors["scaled"].mean()) < (1.05 if number < 10 else 2.0) * float(errors["float32"].mean())
    assert float(errors["bf16"].mean()) > 1.2 * float(errors["scaled"].mean())


def test_rows_of_any_size_and_parts_that_grow_and_shrink():
    parts = _parts(6, rows=5)
    size_of_row = torch.tensor([1e-28, 1e-6, 1.0, 3e4, 1e30])[:, None]
    for part, size in zip(parts, (1e-9, 1.0, 1e4, 1e-5, 1e-5, 2e4), strict=True):
        part.mul_(size_of_row * size)
    errors = _errors(parts)
    assert float(errors["scaled"].max()) < 1.1 * float(errors["float32"].max()) < 0.01


def test_what_cancels_leaves_what_was_added_after():
    large, small = _parts(2)
    small = small * 2.0**-12
    total = ScaledSum()
    for part in (large, -large, small):
        total.add_(part.clone())
    error = (total.take(torch.bfloat16) - small).norm() / small.norm()
    assert float(error) < 2.0**-8


def test_zeros_and_what_is_not_finite():
    total = ScaledSum()
    total.add_(torch.zeros(1, 1, 3, 4, dtype=torch.bfloat16))
    tiny = torch.full((1, 1, 3, 4), 1e-25, dtype=torch.bfloat16)
    total.add_(tiny.clone())
    torch.testing.assert_close(total.take(torch.bfloat16), tiny, rtol=2**-8, atol=0)
    for value in (float("inf"), float("nan")):
        total = ScaledSum()
        for part in _parts(2):
            total.add_(part)
        bad = torch.zeros(2, 3, 64, 32, dtype=torch.bfloat16)
        bad[0, 0, 0, 0] = value
        total.add_(bad)
        result = total.take(torch.bfloat16)
        assert not bool(result[0, 0, 0, 0].isfinite())
        assert bool(result[1:].isfinite().all())
