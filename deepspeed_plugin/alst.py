"""What DeepSpeed's Ulysses for Transformers (ALST) refuses at registration, put off until its attention is needed.

``UlyssesSPAttentionHF.register_with_transformers`` comes before the engine, so before anybody has seen a ds_config,
and refuses what ALST's attention can't do: heads that the ranks do not divide, a second model in the process. With
the ``upipe`` key that attention never runs. So a refused attention is registered all the same, and what ALST raised
is raised, as it was, by an engine built without the key before any with it, and by whatever calls that attention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_plugin.shards import mark_shard

_REMEDY = (
    'UPipe may serve this: add "upipe": {"chunk_heads": N} to the ds_config. Without the key, DeepSpeed\'s own '
    "refusal stands; it was put off from register_with_transformers, which sees no ds_config, until here."
)


def registered_ulysses() -> dict[str, Any]:
    """The ``UlyssesSPAttentionHF`` objects in Transformers' table of attention functions, by implementation."""
    modeling = sys.modules.get("transformers.modeling_utils")
    table = {} if modeling is None else modeling.ALL_ATTENTION_FUNCTIONS
    found = {}
    for name, function in table.items():
        # register_with_transformers puts a function there that has the object in its closure.
        ulysses = inspect.getclosurevars(function).nonlocals.get("uattn") if inspect.isfunction(function) else None
        if ulysses is not None:
            found[name] = ulysses
    return found


def is_disabled_in_eval(ulysses: Any) -> bool:
    """Whether one of these objects leaves evaluation alone; False for None, where Ulysses was not registered."""
    return bool(getattr(ulysses, "disable_in_eval", False))


def mark_shards(wrapped: Callable[..., Any], adapter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``UlyssesSPDataLoaderAdapter.__next__``, whose batches say that they are shards, also in evaluation."""
    batch = wrapped(*args, **kwargs)
    positions = batch.get("position_ids") if isinstance(batch, dict) else None
    if positions is not None:
        mark_shard(positions)
    return batch


def raise_deferred_refusal() -> None:
    """For an engine without the key: raise what ALST refused, if no engine with the key was built since."""
    refusal = _deferred_refusal(registered_ulysses())
    if refusal is not None:
        raise refusal


def drop_deferred_refusals() -> None:
    """For an engine with the key: others without it no longer raise, unless they call what was refused."""
    for ulysses in registered_ulysses().values():
        ulysses.upipe_deferred = None


def init_deferring_refusal(
    wrapped: Callable[..., None], ulysses: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``UlyssesSPAttentionHF.__init__``, whose refusal is put off."""
    arguments = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    try:
        wrapped(*args, **kwargs)
    except (ValueError, TypeError) as refusal:  # TypeError: a configuration whose head_dim is None
        _defer(refusal, ulysses, arguments["attn"], arguments.get("disable_in_eval", False))


def register_deferring_refusal(
    wrapped: Callable[..., Any], owner: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``register_with_transformers``, whose refusal of a second model is put off.

    The groups of the first registration stay, and so does whether its implementation is disabled in evaluation:
    a second registration that says otherwise is refused at once.
    """
    before = registered_ulysses()
    try:
        return wrapped(*args, **kwargs)
    except AssertionError as refusal:
        bound = inspect.signature(wrapped).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        disabled = arguments.get("disable_in_eval", False)
        implementation = arguments["core_attn_implementation"]
        first = before.get(implementation)
        if not _has_groups_of(arguments["sequence_parallel_size"]) or (
            first is not None and is_disabled_in_eval(first) != disabled
        ):
            raise
        with _groups_kept():
            mpu = wrapped(*args, **kwargs)
        ulysses = registered_ulysses()[implementation]
        # The attention that the first registration found, not the first registration's.
        attention = ulysses.attn if first is None else first.attn
        _defer(_deferred_refusal(before) or refusal, ulysses, attention, disabled)
        return mpu


def _defer(refusal: Exception, ulysses: Any, attention: Callable[..., Any], disabled_in_eval: bool) -> None:
    """Let `ulysses` raise `refusal` where it would attend, and pass on to `attention` where it would not."""
    # The frames of the traceback would keep the model alive.
    ulysses.upipe_deferred = refusal.with_traceback(None)
    ulysses.attn = attention
    if hasattr(refusal, "add_note") and _REMEDY not in getattr(refusal, "__notes__", ()):  # Python 3.11
        refusal.add_note(_REMEDY)

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if disabled_in_eval and not module.training:
            return attention(module, *args, **kwargs)
        raise refusal

    ulysses.forward = forward


def _deferred_refusal(registered: dict[str, Any]) -> Exception | None:
    """The first refusal that was put off and not dropped, of what :func:`registered_ulysses` found."""
    refusals = (getattr(ulysses, "upipe_deferred", None) for ulysses in registered.values())
    return next((refusal for refusal in refusals if refusal is not None), None)


def _state() -> Any:
    """DeepSpeed's module that holds the sequence-parallel groups."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as state

    return state


def _has_groups_of(ranks: int) -> bool:
    """Whether there are sequence-parallel groups, of `ranks` ranks."""
    state = _state()
    return state._SEQUENCE_PARALLEL_GROUP is not None and state.get_sequence_parallel_world_size() == ranks


@contextmanager
def _groups_kept() -> Iterator[None]:
    """While it lasts, making sequence-parallel groups does nothing."""
    state = _state()
    make = state.initialize_sequence_parallel
    state.initialize_sequence_parallel = lambda **ranks: None
    try:
        yield
    finally:
        state.initialize_sequence_parallel = make
