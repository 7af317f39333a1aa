"""What the server of ranks imports and finds out once, so that ranks forked from it need not.

Nothing here may start a thread.
"""

import gc
import importlib
import os
from contextlib import suppress

os.environ.setdefault("DS_ACCELERATOR", "cpu")

MODULES = (
    "torch.testing._internal.distributed.fake_pg",
    "deepspeed",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
    "accelerate",
    "peft",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.optimizer",
)


def without_shared_memory() -> None:
    """No operator of DeepSpeed is compiled: ``inference_all_reduce``, which training never calls, goes through gloo.

    DeepSpeed compiles that operator for half a minute wherever it finds none for the very path of its installation.
    It asks which operators can be built here once a process; the answer is kept, so ranks find it there.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


for _name in MODULES:
    with suppress(ImportError):
        importlib.import_module(_name)
with suppress(ImportError):
    without_shared_memory()
# Ranks share the pages of all that was imported, and their collectors need not walk it.
gc.collect()
gc.freeze()
