"""Vision towers under ALST, which registers itself as the attention function of every module of Transformers.

A vision tower attends whole images on every rank, so it must not exchange anything: while one of its attention modules
runs, the function that ALST wraps is registered in ALST's place.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


def attend_locally(attention: Any, registered: Mapping[str, Any]) -> bool:
    """Keep ALST out of a vision tower's attention module, by a forward of its own.

    Args:
        attention: the module.
        registered: ALST's objects by implementation, from ``registered_ulysses``.

    Returns:
        Whether ALST is the module's attention function, so that a forward was put in its place.
    """
    name: str = attention.config._attn_implementation
    ulysses = registered.get(name)
    if ulysses is None:
        return False
    local = _WithFunction(name, ulysses.attn, vars(attention).get("forward"))
    attention.forward = types.MethodType(local, attention)
    return True


def attend_as_before(attention: Any) -> None:
    """Undo :func:`attend_locally`, whatever forward the module had."""
    local: _WithFunction = attention.forward.__func__
    del attention.forward
    if local.before is not None:
        attention.forward = local.before


@dataclass(frozen=True)
class _WithFunction:
    """A module's forward, run while `function` is registered as the attention called `name`.

    Args:
        before: the module's own forward in the place of its class's; None where it has none.
    """

    name: str
    function: Callable[..., Any]
    before: Callable[..., Any] | None

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _registered(self.name, self.function):
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(module).forward(module, *args, **kwargs)


@contextmanager
def _registered(name: str, function: Callable[..., Any]) -> Iterator[None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS[name]
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = before
