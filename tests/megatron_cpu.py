"""Megatron on CPU with gloo, for tests and the demo: what its code asks of CUDA answers for the CPU.

Nothing of the product is in here, and nothing of it is needed on a GPU.
"""

from __future__ import annotations

import collections
import contextlib
import os
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def use_cpu() -> None:
    """Enough to build and train a ``GPTModel``; once a process."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cuda = torch.cuda
    cuda.current_device = lambda: _CPU
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.nn.Module.cuda = lambda self, *a, **k: self
    torch.Tensor.pin_memory = lambda self, *a, **k: self
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.synchronize = lambda *a, **k: None
    for name in ("Stream", "Event", "current_stream", "default_stream", "stream"):
        setattr(cuda, name, _Nothing)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    _OnCpu().__enter__()
    kind = torch.Tensor.type

    def named_for_cuda(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return kind(self, dtype, *args, **kwargs)
        name = kind(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = named_for_cuda

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    _allow_torch_norm_with_sequence_parallel()
    with contextlib.suppress(ImportError):
        from megatron.core.transformer.moe import moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it without having defined it
            moe_utils.te_general_gemm = None


def _allow_torch_norm_with_sequence_parallel() -> None:
    """Megatron's norm of plain torch refuses sequence parallelism; Apex's and TE's, which can't be built here, mark
    their parameters for it instead."""
    from megatron.core.transformer import torch_norm

    build = torch_norm.WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        marked, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = build(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = marked
        for parameter in norm.parameters():
            parameter.sequence_parallel = marked
        return norm

    torch_norm.WrappedTorchNorm.__new__ = new


class _Nothing:
    """A stream or event: everything can be asked of it, and nothing happens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: Any) -> bool:
        return False


class _Properties:
    major, minor, name, total_memory, multi_processor_count = 9, 0, "cpu", 1 << 34, 1


class _OnCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = _there(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(_there(a) if isinstance(a, (str, torch.device)) else a for a in args)
        return func(*args, **kwargs)


def _there(device: Any) -> Any:
    with contextlib.suppress(RuntimeError, TypeError):
        return _CPU if device is not None and torch.device(device).type == "cuda" else device
    return device


def use_cpu_for_training() -> None:
    """Enough for ``megatron.training.pretrain``."""
    use_cpu()
    cuda = torch.cuda
    answers = {
        "is_available": True,
        "device_count": 1,
        "set_device": None,
        "get_device_properties": _Properties(),
        "get_device_capability": (9, 0),
        "get_device_name": "cpu",
        "memory_stats": collections.defaultdict(int),
        "mem_get_info": (1 << 34, 1 << 34),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "init", "_lazy_init")),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        "device_memory_used": 0,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    cuda.device = lambda *args: contextlib.nullcontext()
    for name in ("Float", "Long", "Int", "Half", "BFloat16", "Byte", "Double"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):
            setattr(torch.optim.Optimizer, name, lambda self: None)

    from megatron.core.datasets import utils as dataset_utils
    from megatron.training import initialize, training

    dataset_utils.compile_helpers = lambda: None
    # The warm-up of fused kernels draws random numbers, more or fewer by context-parallel size.
    for module in (initialize, training):
        module.set_jit_fusion_options = lambda *args, **kwargs: None


def namespace(**values: Any) -> types.SimpleNamespace:
    """Parsed arguments, as far as a test needs them."""
    return types.SimpleNamespace(**values)
