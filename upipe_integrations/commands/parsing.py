"""What several subcommands of ``upipe`` take alike: options that they share, and words that are lengths or lists."""

from __future__ import annotations

import argparse
import re
from fractions import Fraction

from upipe_integrations.config import KERNEL_NAMES
from upipe_integrations.mode import ACCUMULATE, BOTH_WAYS

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

_DTYPES = ("float64", "float32", "bfloat16", "float16")  # torch's names
_MOST = 1 << 40  # tokens


def add_model(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The MODEL that a subcommand is about, ``find_config``'s argument."""
    parser.add_argument(
        "model",
        nargs=None if required else "?",
        metavar="MODEL",
        help="a preset, a config.json or its folder, or a downloaded model",
    )


def add_number(group: argparse._ArgumentGroup, option: str, help: str, *, default: int | None = None) -> None:
    """An option that takes an integer."""
    group.add_argument(option, type=int, metavar="N", default=default, help=help)


def add_kernel(group: argparse._ArgumentGroup, *, default: str | None = None) -> None:
    """``--kernel``; with no default the subcommand can tell that it was not given."""
    group.add_argument(
        "--kernel",
        choices=("auto", *KERNEL_NAMES),
        default=default,
        metavar="NAME",
        help=f"auto (default) or {', '.join(KERNEL_NAMES)}",
    )


def add_stage_settings(
    group: argparse._ArgumentGroup,
    blocks_help: str,
    *,
    query_blocks: int | None = None,
    accumulate: str | None = None,
) -> None:
    """``--query-blocks``, described by `blocks_help`, ``--accumulate`` and ``--overlap``; their defaults by name."""
    add_number(group, "--query-blocks", blocks_help, default=query_blocks)
    sums = f"sums (default: {'auto' if accumulate is None else '%(default)s'})"
    group.add_argument("--accumulate", choices=ACCUMULATE, default=accumulate, help=sums)
    add_overlap(group)


def add_overlap(group: argparse._ArgumentGroup | argparse.ArgumentParser) -> None:
    """``--overlap``, which is False, True or ``"both"``."""
    group.add_argument(
        "--overlap",
        nargs="?",
        const=True,
        default=False,
        choices=[BOTH_WAYS],
        help=f"send the next stage's heads during attention; {BOTH_WAYS}: what a stage gives back, too",
    )


def add_dtype(group: argparse._ArgumentGroup, help: str) -> None:
    """``--dtype``, by torch's name."""
    group.add_argument("--dtype", choices=_DTYPES, help=help)


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
