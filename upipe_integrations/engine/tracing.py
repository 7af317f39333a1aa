"""Running Python for real while torch.compile traces: what it would trace in vain, or must not trace.

Traced code may look up packages on disk or keep a registry only in a function that is run then and there, with its
result a constant of the graph. PyTorch has a mark for those (``torch.compiler.assume_constant_result``); what they
are given must be constants too, or objects from outside. Dataclasses made by the traced code are neither, so they are
handed over flat and built again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_R = TypeVar("_R")


def run_while_tracing(function: Callable[..., _R], *args: Any) -> _R:
    """``function(*args)``, which in compiled code runs once, when it is traced.

    The result, a number or string or None, may depend on nothing but the arguments: numbers, strings, dtypes, devices,
    process groups, functions, objects from outside of the compiled code, and tuples and dataclasses of these. Compiled
    code is guarded by their values, or for objects by identity.
    """
    if not torch.compiler.is_compiling():
        return function(*args)
    result: _R = _call_with_flat(function, *_flat(args, []))
    return result


def _call_with_flat(function: Callable[..., _R], *flat: Any) -> _R:
    return function(*_rebuilt(iter(flat)))


# The mark, without the second that importing the compiler would add to importing this module.
_call_with_flat._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _flat(value: Any, into: list[Any]) -> list[Any]:
    """`into` with what `value` is made of, in the order in which :func:`_rebuilt` builds it again."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        into.append(type(value))
        for field in dataclasses.fields(value):
            if field.init:
                _flat(getattr(value, field.name), into)
    elif isinstance(value, tuple):
        into += [tuple, len(value)]
        for item in value:
            _flat(item, into)
    # Tracing takes a number that was another one before for a variable; so read, it is a constant.
    elif isinstance(value, int) and not isinstance(value, bool):
        into.append(range(value).stop)
    elif isinstance(value, float):
        into.append(float.fromhex(value.hex()))
    else:
        into.append(value)
    return into


def _rebuilt(flat: Iterator[Any]) -> Any:
    kind = next(flat)
    if kind is tuple:
        return tuple([_rebuilt(flat) for _ in range(next(flat))])
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(*[_rebuilt(flat) for field in dataclasses.fields(kind) if field.init])
    # A process group comes in a wrapper, as an object that is not looked into.
    return getattr(kind, "real_obj", kind)
