"""The entry point that PyTorch loads (group ``torch.backends``): registers hooks for when Megatron is imported.

It runs in every process that imports torch, so it imports as little as it can and never raises.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns it off, as it does for every such entry point.
"""

from __future__ import annotations

# Megatron's module -> the function of megatron_patch.patches that patches it when it is imported.
HOOKS = {
    "megatron.training.arguments": "patch_arguments",
    "megatron.training.argument_utils": "patch_config",
    "megatron.training.yaml_arguments": "patch_yaml",
    "megatron.core.models.gpt.gpt_model": "patch_gpt",
    "megatron.core.models.hybrid.hybrid_model": "patch_hybrid",
    "megatron.core.models.mamba.mamba_model": "patch_mamba",
    "megatron.core.models.bert.bert_model": "patch_bert",
    "megatron.core.models.T5.t5_model": "patch_t5",
}
_registered = False


def register() -> None:
    """Register the hooks, once; quiet where wrapt is not installed."""
    global _registered
    if _registered:
        return
    try:
        from wrapt import register_post_import_hook
    except ImportError:
        return
    for module, function in HOOKS.items():
        register_post_import_hook(f"megatron_patch.patches:{function}", module)
    _registered = True
