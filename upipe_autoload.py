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
    """Import ``deepspeed_plugin`` once DeepSpeed's engine module is imported."""
    _import_with("deepspeed_plugin", "deepspeed.runtime.engine")


# Megatron's module -> the function of megatron_patch.patches that is told when it is imported.
_MEGATRON = {
    "megatron.training.arguments": "patch_arguments",
    "megatron.training.argument_utils": "patch_config",
    "megatron.training.yaml_arguments": "patch_yaml",
    "megatron.core.models.gpt.gpt_model": "patch_gpt",
    "megatron.core.models.hybrid.hybrid_model": "patch_hybrid",
    "megatron.core.models.mamba.mamba_model": "patch_mamba",
    "megatron.core.models.bert.bert_model": "patch_bert",
    "megatron.core.models.T5.t5_model": "patch_t5",
}


def megatron() -> None:
    """Add UPipe's arguments to Megatron's, and what they do, once its modules are imported."""
    try:
        import wrapt

        for host_module, function in _MEGATRON.items():
            wrapt.register_post_import_hook(f"megatron_patch.patches:{function}", host_module)
    except Exception as error:
        _say_it_is_off("megatron_patch", error)


# A host's module and what its plugin leaves in it.
_MARKS = {
    "deepspeed": ("deepspeed.runtime.engine", "DeepSpeedEngine.upipe"),
    "megatron": ("megatron.core.models.gpt.gpt_model", "GPTModel.__init__.__wrapped__"),
}


def is_patched(host: str) -> bool:
    """Import the host, and say whether its plugin has patched it: what ``upipe info`` asks a process of its own."""
    module, mark = _MARKS[host]
    found = importlib.import_module(module)
    for name in mark.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def _import_with(plugin: str, host_module: str) -> None:
    """Import `plugin` after `host_module`, which must not be a module that is itself waiting for ``import torch``."""
    try:
        import wrapt

        wrapt.register_post_import_hook(lambda _: importlib.import_module(plugin), host_module)
    except Exception as error:
        _say_it_is_off(plugin, error)


def _say_it_is_off(plugin: str, error: Exception) -> None:
    logging.getLogger(__name__).warning(
        "%s is not turned on by configuration alone (%s: %s). Install wrapt.", plugin, type(error).__name__, error
    )
