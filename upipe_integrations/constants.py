"""Small index tensors that a layer needs again in every forward, made once for a device.

``torch.tensor(numbers, device="cuda")``, like an index by a list, copies from the host and waits for the copy: in a
layer's loop the GPU then waits for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


def constant(numbers: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[len(numbers)]` where `like` is, made once; not to be written to."""
    return made_once(torch.tensor, numbers, like, dtype)


def made_once(make: Callable[..., Tensor], value: Any, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """``make(value, dtype=dtype)`` where `like` is, made once for equal arguments; not to be written to.

    For a fake tensor (``FakeTensorMode``) it is made anew, and is a fake one: what is kept is real.

    Args:
        make: a function of the module or of PyTorch, which makes the tensor in the host's memory.
        value: hashable.
        like: a tensor that the result is used with.
        dtype: of the result.
    """
    if type(like) in (Tensor, nn.Parameter):
        return _kept(make, value, like.device, dtype)
    return make(value, dtype=dtype).to(like.device)


@lru_cache(maxsize=4096)
def _kept(make: Callable[..., Tensor], value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    # An inference tensor could not be saved by training, once an evaluation had made it.
    with _disable_current_modes(), torch.inference_mode(False):
        return make(value, dtype=dtype).to(device)
