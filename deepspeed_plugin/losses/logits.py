"""What a model applies to logits between its output head and its loss: a softcap, a scale, a cast, a cut vocabulary.

A tiled loss must do the same to each tile, and must know it when the head is called: under ZeRO-3 the head's weight is
gathered in that call alone. Names of attributes don't tell (``logits_scaling`` divides in Granite and multiplies
elsewhere), so the model's own forward is asked beforehand, with stand-ins for its submodules: nothing of it runs
but the code around the head. In the real call :class:`RecordedLogits` stand for the logits and record again, and the
caller compares: a forward that could not be asked, or does something else, is refused and never a wrong number.

Shapes: B batch, L rows of one rank, V vocabulary.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Names of functions whose result in a row depends on the same row alone.
_ROW_BY_ROW = {
    "div",
    "true_divide",
    "mul",
    "multiply",
    "add",
    "sub",
    "neg",
    "tanh",
    "clamp",
    "float",
    "to",
    "contiguous",
}
_CASTS = ("float", "contiguous")  # a loss casts to float32 itself
_ALIASES = ("detach", "view_as")  # how the hooks of ZeRO-3 pass a tensor through
_DESCRIPTIONS = ("shape", "dtype", "ndim", "size", "dim", "numel", "__len__", "is_floating_point")


@dataclass(frozen=True)
class Operation:
    """``function(logits, *args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, logits: Tensor) -> Tensor:
        result: Tensor = self.function(logits, *self.args, **self.kwargs)
        return result

    @property
    def treats_rows_alike(self) -> bool:
        """Whether each row of the result depends on the same row of the logits, and on constants, alone."""
        name, operands = self.function.__name__, (*self.args, *self.kwargs.values())
        if name == "__getitem__":  # [..., :n]
            index = operands[0]
            return isinstance(index, tuple) and len(index) == 2 and index[0] is ... and isinstance(index[1], slice)
        return name in _ROW_BY_ROW and all(isinstance(a, bool | int | float | torch.dtype) for a in operands)

    def __str__(self) -> str:
        return ", ".join([self.function.__name__.strip("_"), *(f"{a}" for a in self.args)])


@dataclass(frozen=True)
class LogitsFunction:
    """Operations on logits, in order. Called with logits of any rows, `[..., V]`."""

    operations: tuple[Operation, ...] = ()

    def __call__(self, logits: Tensor) -> Tensor:
        for operation in self.operations:
            logits = operation(logits)
        return logits

    def __str__(self) -> str:
        return "; ".join(map(str, self.operations)) or "nothing"

    def then(self, operation: Operation) -> LogitsFunction:
        """This, and `operation` after it."""
        return LogitsFunction((*self.operations, operation))

    def without_last_casts(self) -> LogitsFunction:
        """What makes a difference to a loss."""
        operations = list(self.operations)
        while operations and operations[-1].function.__name__ in _CASTS:
            operations.pop()
        return LogitsFunction(tuple(operations))

    @property
    def softcap(self) -> float | None:
        """The cap c, where this is c * tanh(logits / c); None where it is nothing.

        Raises:
            ValueError: it is something else.
        """
        operations = [o for o in self.operations if o.function.__name__ not in _CASTS]
        if not operations:
            return None
        if [o.function.__name__ for o in operations] != ["div", "tanh", "mul"] or operations[0].args != operations[
            2
        ].args:
            raise ValueError(f"not a softcap: {self}")
        return float(operations[0].args[0])


class RecordedLogits(Tensor):
    """Data of any shape in the place of logits: what is applied to the logits is recorded, and not done to the data.

    Shape and dtype are those the logits would have. Autograd, and with it the hooks of ZeRO-3, sees the data.

    Raises:
        ValueError: an operation that is not known to treat rows alike.
    """

    logits: Tensor
    """What the logits would be now, on the meta device: `[B, L, V]`, without values."""
    applied: LogitsFunction
    """What was applied so far."""

    @classmethod
    def of(cls, data: Tensor, logits: Tensor, applied: LogitsFunction | None = None) -> RecordedLogits:
        """`data` in the place of `logits` (a meta tensor, `[B, L, V]`), to which `applied` was applied already."""
        result = data.as_subclass(cls)
        result.logits, result.applied = logits, applied or LogitsFunction()
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            self = next(a for a in (*args, *kwargs.values()) if isinstance(a, cls))
            if name in _DESCRIPTIONS or (name == "__get__" and func.__self__.__name__ in _DESCRIPTIONS):
                return func(self.logits, *args[1:], **kwargs)
            if name in _ALIASES:
                return cls.of(func(*args, **kwargs), self.logits, self.applied)
            if args and args[0] is self:
                operation = Operation(func, args[1:], kwargs)
                if operation.treats_rows_alike:
                    return cls.of(self.view_as(self), operation(self.logits), self.applied.then(operation))
            # What is left are autograd's questions and hooks, which give no tensor.
            result = None if name == "__setitem__" else func(*args, **kwargs)
        if isinstance(result, Tensor) or name == "__setitem__":
            raise _UnknownOperation(
                f"the model does {name!r} to its logits after the output head, and a tiled loss does not know how "
                "to do that to some rows at a time. Use sequence_parallel_loss."
            )
        return result


class _UnknownOperation(ValueError):
    """An operation on logits that is not known to treat rows alike."""


def head_logits(hidden: Tensor, rows: Iterable[int], vocabulary: int) -> Tensor:
    """The logits `[*rows, V]` of a linear head, without values, on the meta device."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return torch.empty((*rows, vocabulary), dtype=dtype, device="meta")


def logits_function(model: nn.Module, head: nn.Linear) -> LogitsFunction:
    """What the module of `model` that calls `head` applies to its logits, found by running that module's forward.

    Every submodule is replaced by a stand-in that gives hidden states of one row. Where that can't work (the
    forward needs more of its decoder), nothing is assumed to be done: check against what a real call records.

    Raises:
        ValueError: an operation that can't be done row by row.
    """
    owner = next((m for m in model.modules() if any(child is head for child in m.children())), None)
    forward = getattr(getattr(owner, "forward", None), "__func__", None)
    if forward is None:
        return LogitsFunction()
    try:
        logits = forward(_StandIn(owner, head), input_ids=torch.zeros(1, 1, dtype=torch.long)).logits
        return logits.applied if isinstance(logits, RecordedLogits) else LogitsFunction()
    except _UnknownOperation:
        raise
    except Exception:  # whatever code of others does with stand-ins
        return LogitsFunction()


class _StandIn:
    """In the place of a module: its attributes, its methods bound to this, stand-ins for its submodules."""

    def __init__(self, module: Any, head: nn.Linear) -> None:
        self._module, self._head = module, head

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, nn.Module):
            return _StandIn(value, self._head)
        if isinstance(value, types.MethodType) and value.__self__ is self._module:
            return types.MethodType(value.__func__, self)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, RecordedLogits) for a in args):  # a softcap that is a module
            return type(self._module).forward(self, *args, **kwargs)
        hidden = torch.zeros(1, 1, self._head.in_features, dtype=self._head.weight.dtype)
        if self._module is not self._head:
            return _DecoderOutputs(hidden)
        return RecordedLogits.of(hidden, head_logits(hidden, (1, 1), self._head.out_features))


class _DecoderOutputs:
    """What a decoder returns: hidden states, and None for all else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, item: Any) -> Any:
        return () if isinstance(item, slice) else self.last_hidden_state
