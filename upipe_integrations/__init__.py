"""UPipe ("untied Ulysses", arXiv 2602.21196): context-parallel attention in stages of a few heads.

The core: torch only, and it knows no training framework. ``deepspeed_plugin`` and ``megatron_patch`` put
it into DeepSpeed and Megatron.
"""

from upipe_integrations.attention import AttentionProjections, compute_dtype, upipe_attention, upipe_attention_qkv
from upipe_integrations.config import UPipeConfig
from upipe_integrations.kernels import AttentionSpec, Dropout, FunctionKernel, KernelRequest, select_kernel
from upipe_integrations.layout import Layout
from upipe_integrations.mode import Mode
from upipe_integrations.projection import HeadFunction, OutputProjection, Projection, RotateHalf
from upipe_integrations.schedule import Schedule

__all__ = [
    "AttentionProjections",
    "AttentionSpec",
    "Dropout",
    "FunctionKernel",
    "HeadFunction",
    "KernelRequest",
    "Layout",
    "Mode",
    "OutputProjection",
    "Projection",
    "RotateHalf",
    "Schedule",
    "UPipeConfig",
    "compute_dtype",
    "select_kernel",
    "upipe_attention",
    "upipe_attention_qkv",
]
__version__ = "0.1.0"
