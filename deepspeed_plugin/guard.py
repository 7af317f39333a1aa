"""What is checked each time the model is entered: the ranks hold the shards of one plain causal sequence.

One small all-gather per forward of the model, on all ranks alike, so that bad input raises the same error
everywhere before any attention exchange and nothing hangs.
"""

from __future__ import annotations

import enum
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_plugin.transformers.layer import LayerSettings, remember_documents
from upipe_integrations.all_to_all import gather_integers
from upipe_integrations.sharding import documents_from_positions


class _Fault(enum.IntEnum):
    """What can be wrong with one rank's input; the number travels to the other ranks."""

    NONE = 0
    NO_POSITIONS = 1
    POSITION_SHAPE = 2
    PADDING_MASK = 3
    OTHER_MASK = 4


_ADVICE = {
    _Fault.NO_POSITIONS: "position_ids are missing. The model would count from 0 on every rank; pass global ones: "
    "rank r of the group holds positions [r * L, (r + 1) * L) (UlyssesSPDataLoaderAdapter shards them for you).",
    _Fault.POSITION_SHAPE: "position_ids must be [batch or 1, rows of this rank]. A model whose positions have three "
    "components per token (mrope) also takes [4, batch, rows of this rank]: the plain positions, which tell documents "
    "apart, before its own three.",
    _Fault.PADDING_MASK: "attention_mask masks some tokens: padding masks are not supported. Pad on the right, give "
    "padded tokens the label -100 and leave attention_mask out (causal attention never looks at them), or pack.",
    _Fault.OTHER_MASK: "attention_mask is not a [batch, rows] mask of ones: custom masks are not supported. Leave it "
    "out, or remove the 'upipe' key.",
}
_CACHE = (
    "upipe: the model was called with a key/value cache (generate()), which sharded attention does not fill. Register "
    "Ulysses with disable_in_eval=True and call model.eval() to generate, or remove the 'upipe' key."
)


class _Guard:
    """A forward pre-hook that looks at the arguments by name.

    Args:
        module: the module that it is a hook of.
        settings: what all attention layers of the model share.
    """

    def __init__(self, module: nn.Module, settings: LayerSettings) -> None:
        self._signature = inspect.signature(module.forward)
        self._settings = settings

    def _is_off(self, module: nn.Module) -> bool:
        """Whether this is evaluation, and UPipe leaves evaluation alone."""
        return self._settings.disabled_in_eval and not module.training

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of this call by name, in the order of the signature; what has no name of its own is under
        ``kwargs``."""
        return self._signature.bind(*args, **kwargs).arguments


class ShardGuard(_Guard):
    """Forward pre-hook of the module that takes ``position_ids``; see the module docstring.

    Checks that every rank of the group has as many batch rows and sequence rows, that positions are global,
    and that no token is masked; positions that restart are packed documents, which the layers are told. A
    mask of ones is dropped, and for packed documents a placeholder put in its place, so that the model builds
    no mask of the local shard.
    """

    def __init__(self, module: nn.Module, settings: LayerSettings, *, mrope: bool = False) -> None:
        super().__init__(module, settings)
        self._mrope = mrope

    # torch.compiler.disable, without importing the compiler: what is decided here depends on every rank's data.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Raises ValueError, on every rank of the group alike, naming the ranks and the remedy."""
        if self._is_off(module):
            return None
        arguments = self._arguments(args, kwargs)
        tokens = arguments.get("input_ids")
        if tokens is None:
            tokens = arguments.get("inputs_embeds")
        if tokens is None:
            return None  # the model's own error is the right one
        caches = [arguments.get(name, arguments.get("kwargs", {}).get(name)) for name in ("cache", "past_key_values")]
        if any(cache is not None for cache in caches):
            # Without asking the other ranks: one rank often generates alone, and would wait for them.
            raise ValueError(_CACHE)
        positions = self._plain_positions(arguments.get("position_ids"))
        mask = arguments.get("attention_mask")
        fault, first, restarts = _inspect(positions, mask, tokens.shape[1])
        group = self._settings.group.process_group
        mine = [tokens.shape[0], tokens.shape[1], first, int(fault), int(restarts)]
        by_rank = gather_integers(mine, group, tokens.device)
        packed = _check(by_rank)
        assert positions is not None  # or this rank had a fault, which raised
        documents = documents_from_positions(positions, group) if packed else None
        remember_documents(positions, documents)
        changes: dict[str, Any] = {}
        if documents is not None:
            # Transformers takes a mask of four dimensions as it is; the layers do not look at it.
            changes["attention_mask"] = torch.zeros(1, 1, 1, 1, device=tokens.device)
        elif mask is not None:
            changes["attention_mask"] = None
        if documents is not None and self._mrope and arguments["position_ids"].dim() == 2:
            # From plain positions alone the model would hand none on to its layers: [B, L] -> [4, B, L]
            changes["position_ids"] = positions.expand(_MROPE, *positions.shape)
        return _changed(args, kwargs, list(arguments), changes) if changes else None

    def _plain_positions(self, position_ids: Tensor | None) -> Tensor | None:
        """`[4, B, L]` of a vision-language model -> its plain positions `[B, L]`; all else as it is."""
        if self._mrope and position_ids is not None and position_ids.dim() == 3 and position_ids.shape[0] == _MROPE:
            return position_ids[0]
        return position_ids


_MROPE = 4
"""Plain positions and the three components of a vision-language model's."""


def _changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str], changes: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with some of them changed; the names of `args` are the first of `names`."""
    by_place = [changes.get(name, arg) for name, arg in zip(names, args, strict=False)]
    rest = {name: value for name, value in changes.items() if name not in names[: len(args)]}
    return tuple(by_place), {**kwargs, **rest}


class LabelGuard(_Guard):
    """Forward pre-hook of a module that takes ``labels``: refuses to let it shift them.

    A model that computes its own loss shifts labels within the shard it sees, and loses the last label of
    every shard. It does not when it also gets ``shift_labels`` that were shifted before they were sharded, as
    Transformers' Trainer passes them. With these alone, as in the loop of DeepSpeed's documentation, it computes none.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ValueError when labels are passed without ``shift_labels``."""
        if self._settings.group.ranks == 1 or self._is_off(module):
            return
        arguments = self._arguments(args, kwargs)
        labels, shifted = arguments.get("labels"), arguments.get("kwargs", {}).get("shift_labels")
        if labels is not None and shifted is None:
            raise ValueError(
                f"upipe: {type(module).__name__} was called with labels, which it would shift within this rank's "
                "shard: the last label of every shard is lost. Shift labels before they are sharded "
                "(UlyssesSPDataLoaderAdapter and shard_batch give shift_labels), call the model without labels, and "
                "use deepspeed_plugin.sequence_parallel_loss(engine, logits, shift_labels)."
            )


_IMAGES = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")


class ImageGuard(_Guard):
    """Forward pre-hook of a vision-language model: refuses images beside plain positions.

    Tokens of an image have positions of three components, which the model computes where it is passed none. Data
    loaders for sequence parallelism add plain ones, and the model would take them without a word.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ValueError when position_ids of one component are passed with images."""
        if self._is_off(module):
            return
        arguments = self._arguments(args, kwargs)
        images = [name for name in _IMAGES if arguments.get(name) is not None]
        positions = arguments.get("position_ids")
        if images and isinstance(positions, Tensor) and positions.dim() == 2:
            raise ValueError(
                f"upipe: {type(module).__name__} was called with {images[0]} and position_ids of shape "
                f"{tuple(positions.shape)}, without the components that tokens of an image have. Before sharding, "
                "compute them (get_rope_index) and put the plain positions before them: [4, batch, sequence]."
            )


def _inspect(position_ids: Tensor | None, mask: Any, rows: int) -> tuple[_Fault, int, bool]:
    """This rank's fault, its first position (0 where there is none to read), and whether positions restart."""
    if isinstance(mask, Tensor) and mask.dim() == 2:
        if not bool((mask == 1).all()):
            return _Fault.PADDING_MASK, 0, False
    elif mask is not None:
        return _Fault.OTHER_MASK, 0, False
    if position_ids is None:
        return _Fault.NO_POSITIONS, 0, False
    if position_ids.dim() != 2 or position_ids.shape[1] != rows or rows == 0:
        return _Fault.POSITION_SHAPE, 0, False
    first = position_ids[0, 0]
    expected = first + torch.arange(rows, device=position_ids.device)
    consecutive, start = torch.stack([(position_ids == expected).all().long(), first.long()]).tolist()
    return _Fault.NONE, start, not consecutive


def _check(by_rank: list[list[int]]) -> bool:
    """Decide from what every rank said, the same everywhere; returns whether documents are packed."""
    ranks = range(len(by_rank))
    batch, rows, first, faults, restarts = zip(*by_rank, strict=True)
    for fault, advice in _ADVICE.items():
        faulty = [r for r in ranks if faults[r] == fault]
        if faulty:
            raise ValueError(f"upipe: on sequence-parallel ranks {faulty}: {advice}")
    if len(set(rows)) > 1 or len(set(batch)) > 1:
        raise ValueError(
            f"upipe: the ranks of a sequence-parallel group hold different shapes: batch {list(batch)}, rows "
            f"{list(rows)} by rank. All must hold shards of the same batch; pad the sequence to a multiple of "
            f"{len(by_rank)} before sharding it."
        )
    starts = [r * rows[0] for r in ranks]
    # Shards that all start at 0 might be documents of exactly a shard's length, but are what unsharded batches and
    # local positions look like.
    if first[0] != 0 or (len(by_rank) > 1 and not any(first)):
        raise ValueError(
            f"upipe: position_ids start at {list(first)} by rank, but shards of {rows[0]} rows of one document start "
            f"at {starts}: either the positions are local to a rank, or the batch was not sharded, or the shards are "
            "out of order. Shard the batch with its global position_ids (UlyssesSPDataLoaderAdapter does); to "
            "evaluate unsharded batches register Ulysses with disable_in_eval=True and call model.eval()."
        )
    return any(restarts) or list(first) != starts
