"""Whether what UPipe stands in for is Transformers' own computation, or somebody's in its place.

UPipe does what a class's forward does with Transformers' attention functions. A forward, or an attention function, that
somebody put there would be passed over without a word, so it is refused by name: when UPipe is put in, and at the
model's door in every forward, as it may be put there at any time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed_plugin.alst import registered_ulysses


@dataclass(frozen=True)
class StockAttention:
    """The attention modules of a model, and what runs in their place.

    Args:
        layers: the modules by name.
        forward: the function that was put in the place of their forward.
    """

    layers: Mapping[str, nn.Module]
    forward: Callable[..., Any]

    def check(self) -> None:
        """Raise ValueError where something else than the stock computation is stood in for, or stands in for UPipe."""
        seen: set[tuple[type, str]] = set()
        for name, module in self.layers.items():
            put_there = vars(module).get("forward")
            if put_there is not None and not _leads_to(put_there, self.forward):
                raise ValueError(
                    f"upipe: {name} ({type(module).__name__}) was given another forward ({_name(put_there)}) after "
                    "UPipe was put in, so that each rank would attend its own shard. Remove it, or remove "
                    "the 'upipe' key."
                )
            config: Any = module.config
            kind = type(module), str(config._attn_implementation)
            if kind not in seen:
                seen.add(kind)
                check_function(name, module)


def check_module(name: str, module: nn.Module) -> None:
    """Raise ValueError where a forward was put in the place of the one that the module's class has."""
    if "forward" in vars(module):
        raise ValueError(
            f"upipe: {name} ({type(module).__name__}) has a forward of its own ({_name(vars(module)['forward'])}), in "
            "the place of its class's, which UPipe would not run. Remove it, or remove the 'upipe' key."
        )
    check_function(name, module)


def check_function(name: str, module: Any) -> None:
    """Raise ValueError where the class's forward, or its attention function, is not Transformers'."""
    kind = type(module)
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    if _module(forward) != owner.__module__:
        raise ValueError(
            f"upipe: {name}: {kind.__name__}.forward was replaced by {_module(forward)}.{_name(forward)}, which UPipe "
            "would not run. Remove it, or remove the 'upipe' key."
        )
    implementation = module.config._attn_implementation
    for function in _functions(kind, implementation):
        if _package(function) not in _OWN:
            raise ValueError(
                f"upipe: {name}: attn_implementation = {implementation!r} is {_module(function)}.{_name(function)}, an "
                "attention function that is not Transformers' own and that UPipe would not run. Set "
                "attn_implementation to 'sdpa' or 'flash_attention_2', or remove the 'upipe' key."
            )


# ALST's function is DeepSpeed's; attention kernels of the hub come by way of the package "kernels".
_OWN = ("transformers", "deepspeed", "kernels", "flash_attn", "flash_attn_interface")


def _functions(kind: type, implementation: str) -> Iterator[Any]:
    """What attends for a class under that name: with ALST, its function and the one that it wraps."""
    modeling: Any = sys.modules["transformers.modeling_utils"]
    function = modeling.ALL_ATTENTION_FUNCTIONS.get(implementation)
    if function is None:  # eager: the modelling file's
        function = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
    if function is not None:
        yield function
    ulysses = registered_ulysses().get(implementation)
    if ulysses is not None:
        yield ulysses.attn


def _leads_to(forward: Any, wanted: Callable[..., Any], depth: int = 3) -> bool:
    """Whether calling `forward` is calling `wanted`, as far as wrappers show it."""
    if forward is wanted or getattr(forward, "__func__", None) is wanted:
        return True
    if depth == 0:
        return False
    inner = [getattr(forward, name, None) for name in ("__wrapped__", "func", "__func__", "_torchdynamo_orig_callable")]
    cells = getattr(forward, "__closure__", None) or ()
    inner += [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
    inner += [default for default in getattr(forward, "__defaults__", None) or () if callable(default)]
    return any(_leads_to(each, wanted, depth - 1) for each in inner if each is not None and each is not forward)


def _unwrapped(function: Any) -> Any:
    return inspect.unwrap(getattr(function, "func", function))


def _module(function: Any) -> str:
    return str(getattr(_unwrapped(function), "__module__", None))


def _package(function: Any) -> str:
    return _module(function).split(".")[0]


def _name(function: Any) -> str:
    plain = _unwrapped(function)
    return str(getattr(plain, "__qualname__", type(plain).__name__))
