"""Words of the ``upipe`` command that several of its subcommands take: lengths and lists."""

from __future__ import annotations

import re
from fractions import Fraction

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Names of torch's."""


_MOST = 1 << 40


def tokens(option: str, word: str) -> int:
    """Tokens from ``5M``, ``1.5M``, ``128K`` or ``5000000``.

    Raises:
        ValueError: something else, or no positive whole number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", word.strip())
    number = Fraction(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else Fraction()
    if not 1 <= number <= _MOST or number.denominator != 1:
        raise ValueError(f"{option} {word}: must be tokens such as 128K, 5M (5 * 2**20) or 5000000.")
    return int(number)


def numbers(option: str, given: str) -> tuple[int, ...]:
    """Numbers from ``8,16``.

    Raises:
        ValueError: something else.
    """
    try:
        return tuple(int(word) for word in given.split(","))
    except ValueError:
        raise ValueError(f"{option} {given}: must be numbers such as 8 or 8,16.") from None


def words(given: str) -> tuple[str, ...]:
    """The different words of ``a,b``."""
    return tuple(dict.fromkeys(word.strip() for word in given.split(",")))
