"""What is checked each time the model is entered: the ranks hold the shards of one batch of causal sequences.

The checks are forward pre-hooks; what ranks say to each other, and conclude, is :mod:`deepspeed_plugin.shards`'s.
"""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_plugin.losses.balance import adds_balance
from deepspeed_plugin.shards import LENGTHS, WITH_COMPONENTS, Shard, agree, find_documents
from deepspeed_plugin.transformers.layer import LayerSettings, is_left_alone, remember_documents
from deepspeed_plugin.transformers.lengths import LargestPosition
from deepspeed_plugin.transformers.stock import StockAttention

_logger = logging.getLogger("deepspeed_plugin")


class _Guard:
    """A forward pre-hook that looks at the arguments by name.

    Args:
        module: the module that it is a hook of.
        settings: what all attention layers of the model share.
    """

    def __init__(self, module: nn.Module, settings: LayerSettings) -> None:
        self._signature = inspect.signature(module.forward)
        self._settings = settings

    def _is_off(self, module: nn.Module, arguments: dict[str, Any]) -> bool:
        """Whether this is evaluation, and UPipe leaves evaluation alone."""
        return is_left_alone(module, arguments.get("position_ids"), self._settings)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of this call by name, in the order of the signature; what has no name of its own is under
        ``kwargs``."""
        return self._signature.bind(*args, **kwargs).arguments


class ShardGuard(_Guard):
    """Forward pre-hook of the module that takes tokens and ``position_ids``; see the module docstring.

    Checks that every rank of the group has as many batch rows and sequence rows, that positions are global,
    and that no token is hidden that another attends to; positions that restart are packed documents, which the layers
    are told. A placeholder is put in the place of the mask, so that the model builds none of the local shard.

    Args:
        module, settings: as above.
        stock: what UPipe stands in for.
        largest: what the model's rotary embeddings are told.
        mrope: whether positions may have three components.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: LayerSettings,
        stock: StockAttention,
        largest: LargestPosition,
        *,
        mrope: bool = False,
    ) -> None:
        super().__init__(module, settings)
        self._stock = stock
        self._largest = largest
        self._mrope = mrope
        self._warned = False

    # torch.compiler.disable, without importing the compiler: what is decided here depends on every rank's data.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Raises ValueError, on every rank of the group alike, naming the ranks and the remedy."""
        arguments = self._arguments(args, kwargs)
        options = {**arguments.get("kwargs", {}), **{name: t for name, t in arguments.items() if name != "kwargs"}}
        tokens = options.get("input_ids")
        if tokens is None:
            tokens = options.get("inputs_embeds")
        if tokens is None:
            return None  # the model's own error is the right one
        given = options.get("position_ids")
        cached = any(options.get(name) is not None for name in ("cache", "past_key_values"))
        self._largest.value = None
        if self._is_off(module, options):
            if not cached:
                self._refuse_shards_left_alone(given)
            return None
        # Without asking the other ranks: one rank often generates alone, and would wait for them.
        if cached or _is_generating():
            _refuse_generation("with a key/value cache (generate())" if cached else "by generate()")
        self._stock.check()
        mask, group = options.get("attention_mask"), self._settings.group.process_group
        verdict = agree(Shard.of(tokens, given, mask, options, mrope=self._mrope), group, tokens.device)
        assert given is not None  # or this rank had a fault, which raised
        self._check_blocks(tokens.shape[1])
        positions = given[0] if given.dim() == _COMPONENTS else given  # [B or 1, L], also of [4, B, L]
        documents = find_documents(verdict, positions, mask, tokens, group)
        if verdict.masked:
            self._check_balance(module, options)
        if verdict.at_shards and not self._warned:
            self._warned = True
            _logger.warning(
                "UPipe: position_ids start at 0 on every rank and never restart between: taken for packed documents "
                f"of {tokens.shape[1]} tokens, which begin where shards begin. If these are longer documents, their "
                "positions are local to a rank: compute position_ids before sharding."
            )
        self._largest.value = verdict.largest
        remember_documents(positions, documents)
        changes: dict[str, Any] = {name: None for name in LENGTHS if options.get(name) is not None}
        # Transformers takes a mask of four dimensions as it is, and the layers do not look at it. Without one it would
        # make `[1, 1, L, L]` for eager attention, windows and packed documents, and hold it through the forward.
        changes["attention_mask"] = torch.zeros(1, 1, 1, 1, device=tokens.device)
        if documents is not None and self._mrope and given.dim() == 2:
            # From plain positions alone the model would hand none on to its layers: [B, L] -> [4, B, L]
            changes["position_ids"] = positions.expand(WITH_COMPONENTS, *positions.shape)
        return _changed(args, kwargs, list(arguments), changes)

    def _check_balance(self, module: nn.Module, options: dict[str, Any]) -> None:
        on = options.get("output_router_logits")
        if on or (on is None and getattr(module.config, "output_router_logits", False)):
            raise ValueError(
                "upipe: output_router_logits = True with an attention_mask that hides tokens: the balance of the "
                "routers leaves those out, which is not supported. Set output_router_logits = False, or pack documents "
                "in the place of padding."
            )

    def _check_blocks(self, rows: int) -> None:
        blocks = self._settings.config.mode.query_blocks
        if rows % blocks:
            raise ValueError(
                f"upipe.query_blocks = {blocks}: must divide the {rows} rows of a rank. Set it to a number that does, "
                f"or pad the sequence to a multiple of {blocks * self._settings.group.ranks} before sharding it."
            )

    def _refuse_shards_left_alone(self, positions: Any) -> None:
        """Raise ValueError where positions show that evaluation of whole batches was given a shard.

        The first rank's do not, and it can't be told: in evaluation a rank may be alone.
        """
        group = self._settings.group
        if group.rank == 0 or not isinstance(positions, Tensor) or positions.dim() < 2 or positions.shape[-1] < 2:
            return
        first = int(positions.flatten()[0])
        if first == group.rank * positions.shape[-1]:
            raise ValueError(
                "upipe: evaluation is left to the model itself (Ulysses is registered with disable_in_eval=True), but "
                f"position_ids start at {first} on rank {group.rank} of {group.ranks}: this is a shard, and would be "
                "attended alone. Evaluate whole batches, the same on every rank, with a data loader that is not "
                "sharded (Accelerate: do not pass it to prepare()), or shard it with UlyssesSPDataLoaderAdapter, which "
                "is recognised."
            )


_COMPONENTS = 3
"""Dimensions of positions that have components."""


def _refuse_generation(how: str) -> None:
    raise ValueError(
        f"upipe: the model was called {how}, and a shard of a sequence is not continued. Register Ulysses with "
        "disable_in_eval=True and call model.eval() to generate, or remove the 'upipe' key."
    )


def _is_generating() -> bool:
    """Whether Transformers' ``generate`` is what calls the model, with or without a cache."""
    generation = sys.modules.get("transformers.generation.utils")
    if generation is None:
        return False
    code = inspect.unwrap(generation.GenerationMixin.generate).__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str], changes: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with some of them changed; the names of `args` are the first of `names`."""
    by_place = [changes.get(name, arg) for name, arg in zip(names, args, strict=False)]
    rest = {name: value for name, value in changes.items() if name not in names[: len(args)]}
    return tuple(by_place), {**kwargs, **rest}


class LabelGuard(_Guard):
    """Forward pre-hook of a module that takes ``labels``: refuses to let its head see no more than a shard.

    A causal model that computes its own loss shifts labels within the shard it sees, and loses the last label of
    every shard. It does not when it also gets ``shift_labels`` that were shifted before they were sharded, as
    Transformers' Trainer passes them. With these alone, as in the loop of DeepSpeed's documentation, it computes none.
    A model of another kind takes the mean over the labels of its shard. Rows of logits that are left out are
    the first of every shard.
    """

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ValueError when labels are passed without ``shift_labels``, or ``logits_to_keep``."""
        arguments = self._arguments(args, kwargs)
        if self._settings.group.ranks == 1 or self._is_off(module, arguments):
            return
        options = {**arguments.get("kwargs", {}), **arguments}
        name, keep = type(module).__name__, options.get("logits_to_keep")
        if isinstance(keep, Tensor) or keep:
            if _is_generating():
                _refuse_generation("by generate()")
            raise ValueError(
                f"upipe: {name} was called with logits_to_keep = {keep}, which counts from the end of this rank's "
                "shard, not of the sequence. Leave it out, and take the rows you need by their positions; "
                "deepspeed_plugin.tiled_sequence_parallel_loss never holds the logits of all rows."
            )
        if options.get("labels") is None:
            return
        if options.get("shift_labels") is not None:
            if adds_balance(module):
                raise ValueError(
                    f"upipe: output_router_logits = True: {name} was called with labels, and would add the balance "
                    "loss of this rank's rows alone (as in Transformers' Trainer). Set output_router_logits = False, "
                    "or train in a loop of your own with deepspeed_plugin.sequence_parallel_loss(engine, output, "
                    "shift_labels), which balances the whole sequence."
                )
            return
        if name.endswith("ForTokenClassification"):
            raise ValueError(
                f"upipe: {name} was called with labels, and would take the mean over those of this rank's shard. "
                "Call the model without labels, and use deepspeed_plugin.sequence_parallel_loss(engine, logits, "
                "labels) with this rank's rows of the labels, as they are."
            )
        raise ValueError(
            f"upipe: {name} was called with labels, which it would shift within this rank's "
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
        arguments = self._arguments(args, kwargs)
        if self._is_off(module, arguments):
            return
        images = [name for name in _IMAGES if arguments.get(name) is not None]
        positions = arguments.get("position_ids")
        if images and isinstance(positions, Tensor) and positions.dim() == 2:
            raise ValueError(
                f"upipe: {type(module).__name__} was called with {images[0]} and position_ids of shape "
                f"{tuple(positions.shape)}, without the components that tokens of an image have. Before sharding, "
                "compute them (get_rope_index) and put the plain positions before them: [4, batch, sequence]."
            )
