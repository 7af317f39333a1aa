"""UPipe for Megatron: ``--context-parallel-impl upipe --upipe-chunk-heads N`` on an unmodified training script.

Three ways in:

* after ``pip install``, nothing: PyTorch loads the ``torch.backends`` entry point, which registers hooks for when
  Megatron is imported. Without the argument they change nothing but ``--help``.
* ``python -m megatron_patch pretrain_gpt.py ...``, also under ``torchrun -m``, where entry points are switched off.
* own code: :func:`upipe_options` and :func:`gpt_upipe_spec` (or :func:`upipe_spec`, which converts any layer spec)
  make what ``GPTModel`` is given, without any patch.

Importing this package imports nothing of Megatron and patches nothing; :func:`register` is what the entry point calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_patch.options import UPipeOptions
from upipe_autoload import megatron as register
from upipe_integrations.config import UPipeConfig

if TYPE_CHECKING:
    from megatron_patch.attention import UPipeSelfAttention
    from megatron_patch.specs import gpt_upipe_spec, upipe_options, upipe_spec

__all__ = [
    "UPipeConfig",
    "UPipeOptions",
    "UPipeSelfAttention",
    "gpt_upipe_spec",
    "register",
    "upipe_options",
    "upipe_spec",
]
_FROM_SPECS = ("gpt_upipe_spec", "upipe_options", "upipe_spec")


def __getattr__(name: str) -> Any:
    """What imports Megatron is imported when it is asked for."""
    if name in _FROM_SPECS:
        from megatron_patch import specs

        return getattr(specs, name)
    if name == "UPipeSelfAttention":
        from megatron_patch.attention import UPipeSelfAttention

        return UPipeSelfAttention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
