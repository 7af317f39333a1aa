"""On the PYTHONPATH of what a test launches: DeepSpeed compiles no operator there; see ``tests/preload.py``."""

import wrapt


def _without_shared_memory(ops) -> None:
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


wrapt.register_post_import_hook(_without_shared_memory, "deepspeed.ops")
