"""The user's settings: one frozen object, validated when it is built and trusted afterwards.

Hosts build it from their own configuration (a ds_config block, command-line arguments) with
:meth:`UPipeConfig.from_mapping`; nothing in the core reads files or environment variables.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from upipe_integrations.mode import ACCUMULATE, BOTH_WAYS, MEMORY, Mode
from upipe_integrations.schedule import Schedule

KERNEL_NAMES = (
    "flash-attn-3",
    "flash-attn-2",
    "flash-attn-4",
    "torch-cuda-flash",
    "torch-cudnn",
    "torch-efficient",
    "torch-cpu-flash",
    "math",
)
"""The names of ``upipe_integrations.kernels.KERNELS``, in its order: here because settings need no torch."""
KEY = "upipe"
"""The key of a host's configuration that has the settings."""
# "upip", "u_pipe" and "UPipe" are typos of ours; "pipeline", a key of DeepSpeed's, is not.
_TYPO_LIKENESS = 0.8
_OUR_NAME = re.compile(r"(^|[^a-z])(u[-_ ]?pipe|untied[-_ ]?ulysses)", re.IGNORECASE)


@dataclass(frozen=True)
class UPipeConfig:
    """What a user can set.

    Args:
        chunk_heads: query heads per stage, counted over all ranks of the group (U in the paper). A
            multiple of the group's ranks, at most the model's query heads. The number of ranks saves
            most memory; the number of query heads is plain Ulysses in one stage.
        kernel: local attention: ``"auto"`` or one of ``KERNEL_NAMES``.
        memory: what a layer keeps for backward, one of ``upipe_integrations.mode.MEMORY``.
        query_blocks: blocks of a rank's rows in memory mode ``"blocks"``.
        accumulate: precision of sums over stages, one of ``upipe_integrations.mode.ACCUMULATE``.
        overlap: send the next stage's heads while this one attends; ``"both"`` also sends back what a stage attended,
            and its gradients, while the next one attends.

    Raises:
        ValueError: a value of the wrong type or outside its range; the message names key, value,
            rule and remedy.
    """

    chunk_heads: int
    kernel: str = "auto"
    memory: str = "keep"
    query_blocks: int = 4
    accumulate: str = "auto"
    overlap: bool | str = False

    def __post_init__(self) -> None:
        meaning = {
            "chunk_heads": "query heads per stage over all ranks). Set it to the number of sequence-parallel ranks to "
            "save most memory.",
            "query_blocks": "blocks of a rank's rows in memory mode 'blocks'). Leave it out for the default of 4.",
        }
        for key, what in meaning.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"upipe.{key} = {value!r}: must be an integer ({what}")
            if value < 1:
                raise ValueError(f"upipe.{key} = {value}: must be positive ({what}")
        for key, known in {"kernel": ("auto", *KERNEL_NAMES), "memory": MEMORY, "accumulate": ACCUMULATE}.items():
            value = getattr(self, key)
            if value not in known:
                raise ValueError(
                    f"upipe.{key} = {value!r}: no such {key}{closest(str(value), known)}. Known: {', '.join(known)}."
                )

        if not isinstance(self.overlap, bool) and self.overlap != BOTH_WAYS:
            raise ValueError(
                f"upipe.overlap = {self.overlap!r}: must be true, false or {BOTH_WAYS!r}. Leave it out for false."
            )

    @property
    def mode(self) -> Mode:
        """The engine's mode."""
        return Mode.named(self.memory, self.query_blocks, self.accumulate, self.overlap)

    @classmethod
    def from_mapping(cls, block: Any) -> UPipeConfig:
        """Build from a user's ``upipe`` block.

        Raises:
            ValueError: the block is no mapping, lacks ``chunk_heads``, or has an unknown key (the
                closest known one is named).
        """
        keys = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(block, Mapping):
            raise ValueError(
                f'upipe = {block!r}: must be a block of settings such as {{"chunk_heads": 4}}. '
                f"Known keys: {', '.join(keys)}. There is no switch: remove the key to train without UPipe."
            )
        if "enabled" in block:
            raise ValueError(
                f"upipe.enabled = {block['enabled']!r}: there is no switch. Leave 'enabled' out to train with UPipe, "
                "remove the whole 'upipe' key to train without it."
            )
        for key in block:
            if key not in keys:
                raise ValueError(
                    f"upipe.{key} = {block[key]!r}: unknown key{closest(str(key), keys)}. "
                    f"Known keys: {', '.join(keys)}."
                )
        if "chunk_heads" not in block:
            raise ValueError(
                "upipe.chunk_heads is missing: it says how many query heads a stage runs over all ranks. "
                "Set it to the number of sequence-parallel ranks to save most memory."
            )
        return cls(**block)

    @classmethod
    def from_ds_config(cls, ds_config: Mapping[str, Any]) -> UPipeConfig | None:
        """The settings of a ds_config, or None when it has no ``upipe`` key.

        Raises:
            ValueError: the block is not valid, or a key of the ds_config is a misspelt ``upipe`` (DeepSpeed
                ignores keys it does not know, so a typo would silently be plain Ulysses).
        """
        for key in ds_config:
            if key != KEY and _meant(str(key)):
                raise ValueError(
                    f"ds_config key {key!r}: DeepSpeed knows no such key; did you mean {KEY!r}? "
                    f'Write {{"{KEY}": {{"chunk_heads": ...}}}}, or remove it to train without UPipe.'
                )
        misplaced = next(_misplaced(ds_config, ""), None)
        if misplaced is not None:
            raise ValueError(
                f"ds_config key {misplaced!r}: not read there. Put the {KEY!r} block at the top of the ds_config, "
                "beside 'zero_optimization', or remove it to train without UPipe."
            )
        return cls.from_mapping(ds_config[KEY]) if KEY in ds_config else None

    def schedule(self, *, heads: int, kv_heads: int, ranks: int) -> Schedule:
        """The schedule of one attention layer under these settings.

        Args:
            heads: query heads of the layer, over all ranks.
            kv_heads: KV heads of the layer, over all ranks.
            ranks: ranks of the sequence-parallel group.

        Raises:
            ValueError: ``chunk_heads`` does not fit the ranks or the heads, or the heads do not fit
                the ranks.
        """
        U = self.chunk_heads
        possible = range(ranks, heads + 1, ranks)
        fitting = [n for n in possible if heads % n == 0] or list(possible)
        advice = f"Values that fit this model: {', '.join(map(str, fitting))}." if fitting else ""
        if heads < U:
            raise ValueError(
                f"upipe.chunk_heads = {U}: larger than the model's {heads} query heads. "
                f"{advice or 'Use fewer sequence-parallel ranks.'}"
            )
        if U % ranks:
            raise ValueError(
                f"upipe.chunk_heads = {U}: must be a multiple of the {ranks} sequence-parallel ranks, as "
                f"every rank attends the same number of heads in a stage. "
                f"{advice or 'Use fewer sequence-parallel ranks.'}"
            )
        return Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=U)


def _meant(key: str) -> bool:
    """Whether somebody who wrote this key at the top of a ds_config meant the ``upipe`` block."""
    if key == "chunk_heads" or _OUR_NAME.search(key):
        return True
    return difflib.SequenceMatcher(None, key.lower(), KEY).ratio() >= _TYPO_LIKENESS


def _misplaced(block: Mapping[str, Any], path: str) -> Iterator[str]:
    """The keys within the blocks of a ds_config that name UPipe, as paths joined by dots."""
    for key, value in block.items():
        here = f"{path}{key}"
        if path and _OUR_NAME.search(str(key)):
            yield here
        elif isinstance(value, Mapping) and here != KEY:
            yield from _misplaced(value, f"{here}.")


def closest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known word nearest to `word`, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""
