"""What PyTorch loads at ``import torch``, so that a configuration key is enough: one function per host.

``pyproject.toml`` lists them as entry points of the group ``torch.backends``. Each only asks to be told when its
host is imported; the plugin is imported then, and no sooner. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, PyTorch's own
variable, turns them off; ``upipe info`` says which are on.

Two things must hold. An exception here would break ``import torch`` for everybody, so there is none; and
everybody waits for what is imported here, so that is wrapt alone (3 ms).
"""

from __future__ import annotations

import importlib
import logging


def deepspeed() -> None:
    """Import ``deepspeed_plugin`` once DeepSpeed's engine module is there."""
    _import_with("deepspeed_plugin", "deepspeed.runtime.engine")


def _import_with(plugin: str, host_module: str) -> None:
    """Import `plugin` after `host_module`, which must not be a module that is itself waiting for ``import torch``."""
    try:
        import wrapt

        wrapt.register_post_import_hook(lambda _: importlib.import_module(plugin), host_module)
    except Exception as error:
        logging.getLogger(__name__).warning(
            "UPipe is not turned on by configuration alone (%s: %s). Install wrapt, or `import %s` before the model is "
            "built.",
            type(error).__name__,
            error,
            plugin,
        )
