"""UPipe ("untied Ulysses", arXiv 2602.21196): context-parallel attention in stages of a few heads.

The core: torch only, and it knows no training framework. ``deepspeed_plugin`` and ``megatron_patch`` put
it into DeepSpeed and Megatron.

What is exported is imported when it is first asked for: ``upipe plan`` and ``upipe --help`` need no torch, which takes
seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from upipe_integrations.attention import compute_dtype, upipe_attention, upipe_attention_qkv
    from upipe_integrations.config import UPipeConfig
    from upipe_integrations.engine.call import Staging
    from upipe_integrations.kernels import AttentionSpec, Dropout, FunctionKernel, Kernel, KernelRequest, select_kernel
    from upipe_integrations.layout import Layout
    from upipe_integrations.mode import Mode
    from upipe_integrations.projections.head_function import HeadFunction
    from upipe_integrations.projections.output import OutputProjection
    from upipe_integrations.projections.projection import AttentionProjections, HeadBlock, LowRank, Projection, Weights
    from upipe_integrations.projections.rotary import RotateHalf
    from upipe_integrations.schedule import Schedule

__all__ = [
    "AttentionProjections",
    "AttentionSpec",
    "Dropout",
    "FunctionKernel",
    "HeadBlock",
    "HeadFunction",
    "Kernel",
    "KernelRequest",
    "Layout",
    "LowRank",
    "Mode",
    "OutputProjection",
    "Projection",
    "RotateHalf",
    "Schedule",
    "Staging",
    "UPipeConfig",
    "Weights",
    "compute_dtype",
    "select_kernel",
    "upipe_attention",
    "upipe_attention_qkv",
]
__version__ = "0.1.0"

_MODULES = {
    "AttentionProjections": "projections.projection",
    "AttentionSpec": "kernels",
    "Dropout": "kernels",
    "FunctionKernel": "kernels",
    "HeadBlock": "projections.projection",
    "HeadFunction": "projections.head_function",
    "Kernel": "kernels",
    "KernelRequest": "kernels",
    "Layout": "layout",
    "LowRank": "projections.projection",
    "Mode": "mode",
    "OutputProjection": "projections.output",
    "Projection": "projections.projection",
    "RotateHalf": "projections.rotary",
    "Schedule": "schedule",
    "Staging": "engine.call",
    "UPipeConfig": "config",
    "Weights": "projections.projection",
    "compute_dtype": "attention",
    "select_kernel": "kernels",
    "upipe_attention": "attention",
    "upipe_attention_qkv": "attention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
