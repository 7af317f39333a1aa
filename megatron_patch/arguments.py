"""UPipe's command-line arguments in Megatron's parser."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megatron_patch.options import AUTO, IMPL, PREFIX, UPipeOptions, flag
from upipe_integrations import UPipeConfig
from upipe_integrations.kernels import KERNELS
from upipe_integrations.mode import ACCUMULATE, BOTH_WAYS, MEMORY


def _chunk_heads(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a positive number of query heads nor 'auto' (the number of context-parallel ranks)"
        )
    return value


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments, as a group of their own; returns the parser."""
    group = parser.add_argument_group(title="upipe", description="UPipe context-parallel attention")
    group.add_argument(
        flag(IMPL),
        choices=["native", "upipe"],
        default="native",
        help="Context-parallel attention: Megatron's own, or UPipe, which runs it in stages of a few heads.",
    )
    group.add_argument(
        "--upipe-chunk-heads",
        type=_chunk_heads,
        metavar="N|auto",
        help="Query heads per stage, counted over all context-parallel ranks: a multiple of their number, at most the "
        "query heads of a tensor-parallel rank. auto, the default, is the number of ranks, which saves most memory.",
    )
    group.add_argument(
        "--upipe-memory",
        choices=MEMORY,
        help="What a layer keeps for backward: its attention output and the q, k and v it received (keep_heads), its "
        "attention output (keep, the default), nothing (recompute, the default with selective recomputation of "
        "core_attn), nothing with the output projection in the stage loop (fused), and its queries in blocks besides "
        "(blocks): the further, the less memory and the more work.",
    )
    group.add_argument(
        "--upipe-query-blocks", type=int, metavar="N", help="Blocks of a rank's rows with --upipe-memory blocks."
    )
    group.add_argument(
        "--upipe-accumulate",
        choices=ACCUMULATE,
        help="Precision of sums over stages: auto sums in float32 where rounding would be seen, float32 everywhere.",
    )
    group.add_argument(
        "--upipe-overlap",
        nargs="?",
        const=True,
        default=False,
        choices=[BOTH_WAYS],
        help=f"Send the next stage's heads while this one attends; {BOTH_WAYS}: what a stage gives back, too.",
    )
    group.add_argument(
        "--upipe-kernel",
        choices=["auto", *KERNELS],
        metavar="NAME",
        help="Local attention: auto, " + ", ".join(KERNELS),
    )
    return parser


def fill_in(args: Any, options: UPipeOptions) -> None:
    """Write the options, defaults and all, to the arguments: what is printed and saved is what runs."""
    for field in dataclasses.fields(UPipeConfig):
        setattr(args, PREFIX + field.name, getattr(options.config, field.name))
