"""UPipe for DeepSpeed: ``"upipe": {"chunk_heads": N}`` in the ds_config replaces Ulysses attention.

Importing this package arms the switch: engines built afterwards look for the key. Nothing happens without
it. :func:`register` and :func:`unregister` do the same explicitly. Neither DeepSpeed nor Transformers is
imported here.
"""

from deepspeed_plugin.checkpointing import enable_checkpointing
from deepspeed_plugin.distributed import DistributedAttention
from deepspeed_plugin.losses.loss import (
    group_mean_loss,
    labelled_tokens,
    sequence_log_probs,
    sequence_parallel_loss,
    tiled_sequence_parallel_loss,
)
from deepspeed_plugin.switch import register, unregister

__all__ = [
    "DistributedAttention",
    "enable_checkpointing",
    "group_mean_loss",
    "labelled_tokens",
    "register",
    "sequence_log_probs",
    "sequence_parallel_loss",
    "tiled_sequence_parallel_loss",
    "unregister",
]

register()
