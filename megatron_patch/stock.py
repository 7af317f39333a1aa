"""Whether what UPipe stands in for is Megatron's own computation, or somebody's in its place.

What somebody put there would be passed over without a word, so it is refused by name.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

_OWN = ("megatron", "megatron_patch", "transformer_engine", "apex")
_METHODS = ("forward", "get_query_key_value_tensors")


def check_class(kind: type) -> None:
    """Raise ValueError where a method of Megatron's attention class, which UPipe replaces, is not Megatron's."""
    for name in _METHODS:
        owner = next(base for base in kind.__mro__ if name in vars(base))
        method = vars(owner)[name]
        if _module(method) != owner.__module__:
            raise ValueError(
                f"upipe: {kind.__name__}.{name} was replaced by {_module(method)}.{_name(method)}, which UPipe would "
                "not run. Remove it, or use --context-parallel-impl native."
            )


def check_core_attention(core: Any) -> None:
    """Raise ValueError where the core attention of a layer spec (a spec, class or partial) is not Megatron's."""
    kind = getattr(core, "module", core)
    kind = kind.func if isinstance(kind, functools.partial) else kind
    if isinstance(kind, type) and _module(kind).split(".")[0] not in _OWN:
        raise ValueError(
            f"upipe: the layer spec has {_module(kind)}.{kind.__name__} as core_attention, which UPipe would not run. "
            "Use a spec with Megatron's DotProductAttention or TEDotProductAttention, or --context-parallel-impl "
            "native."
        )


def addition(module: nn.Module) -> str | None:
    """What was put around a module that is read and not called; None where nothing was. Goes on after its name."""
    if "forward" in vars(module):
        return f"has a forward that was put in its place ({_name(vars(module)['forward'])}), which would not run"
    if module._forward_hooks:
        return "has forward hooks, which would not run"
    if module._backward_hooks or module._backward_pre_hooks:
        return "has backward hooks, which would not run"
    # Megatron's own wait until parameters have arrived, and are run.
    foreign = [hook for hook in module._forward_pre_hooks.values() if _module(hook).split(".")[0] not in _OWN]
    if foreign:
        return f"has a forward pre-hook ({_name(foreign[0])}) that would be given no input"
    return None


def check_norm(norm: nn.Module | None, name: str) -> None:
    """Raise ValueError where something was put around a norm of heads, which is called with the heads of one stage."""
    added = None if norm is None else addition(norm)
    if added is not None:
        raise ValueError(
            f"upipe: {name} ({type(norm).__name__}) {added}. Remove it, or use --context-parallel-impl native."
        )


def _unwrapped(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "func", function))


def _module(function: Any) -> str:
    return str(getattr(_unwrapped(function), "__module__", None))


def _name(function: Any) -> str:
    plain = _unwrapped(function)
    return str(getattr(plain, "__qualname__", type(plain).__name__))
