"""Small index tensors that a layer needs again in every forward, made once for a device.

``torch.tensor(numbers, device="cuda")``, like an index by a list, copies from the host and waits for the copy: in a
layer's loop the GPU then waits for Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def constant(numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[len(numbers)]` on `device`, made once; not to be written to."""
    return made_once(torch.tensor, numbers, device, dtype)


def made_once(
    make: Callable[..., Tensor], value: Any, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """``make(value, dtype=dtype)`` on `device`, made once for equal arguments; not to be written to.

    Under a mode in which tensors are not real ones (``FakeTensorMode``) it is made anew, and is one of the mode's: what
    is kept is real, and stays so.

    Args:
        make: a function of the module or of PyTorch, which makes the tensor in the host's memory.
        value: hashable.
        device: where it is needed.
        dtype: of the tensor.
    """
    if type(torch.empty(0, device=device)) is Tensor:
        return _kept(make, value, device, dtype)
    return make(value, dtype=dtype).to(device)


@lru_cache(maxsize=4096)
def _kept(make: Callable[..., Tensor], value: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # or training could not save it after an evaluation had made it
        return make(value, dtype=dtype).to(device)
