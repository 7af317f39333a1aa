"""The plugin's answer to ``upipe check MODEL``, which asks by an entry point: would UPipe be put into that model?"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepspeed_plugin.transformers.facts import attention_facts, find_attention
from upipe_integrations import UPipeConfig


def serves(fields: Mapping[str, Any], settings: Sequence[UPipeConfig], ranks: int) -> str:
    """What would be replaced in the model of a configuration: it is built without data, and read as for training.

    Args:
        fields: those of a Transformers config.json.
        settings: possible ``upipe`` blocks; the model must be served with each.
        ranks: the number of ranks that share a sequence.

    Returns:
        A clause: "replaces 32 LlamaAttention".

    Raises:
        ImportError: DeepSpeed or Transformers is not installed.
        ValueError: the model is not known to Transformers, or it or the settings are refused.
    """
    for package in ("deepspeed", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} is not installed")
    layers = find_attention(_without_data(fields))
    for config in settings:
        facts = [attention_facts(name, module, torch.device("cpu"), config.mode) for name, module in layers.items()]
        for fact in facts:
            config.schedule(heads=fact.heads, kv_heads=fact.kv_heads, ranks=ranks)
    classes = Counter(type(module).__name__ for module in layers.values())
    return f"replaces {', '.join(f'{count} {name}' for name, count in classes.items())}"


def _without_data(fields: Mapping[str, Any]) -> torch.nn.Module:
    """The causal language model of a configuration, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = fields.get("model_type")
    if kind is None:
        raise ValueError("the configuration lacks model_type, so that Transformers can't build the model.")
    rest = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(kind, **rest)
        with torch.device("meta"):  # eager attention: every model has it, in the same classes
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # Transformers' own words, of many types
        raise ValueError(f"Transformers can't build a {kind}: {' '.join(str(error).split())}") from None
    return model
