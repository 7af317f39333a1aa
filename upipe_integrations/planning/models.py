"""Shapes of models: a table of published ones, and a reader of Transformers' config.json.

A plan needs a whole :class:`Model`; ``upipe check`` and ``upipe bench`` need its :class:`Attention` alone, of which a
config.json tells more than sizes.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Model:
    """A dense decoder-only model: grouped-query attention and a gated MLP in every layer.

    Args:
        name: what it is called in a plan.
        layers, hidden_size, intermediate_size: as Transformers calls them.
        heads, kv_heads, head_dim: of attention.
        vocab_size: rows of the embedding.
        tied: whether the embedding is the output layer's weight too.

    Raises:
        ValueError: sizes that make no model; the message names the field.
    """

    name: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self.name, {field: getattr(self, field) for field in _FIELDS}, "a plan")

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: the projections of attention and of the MLP; norms and biases are left out."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden_size
        return attention + 3 * self.intermediate_size * self.hidden_size

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA of `rank` on all linear layers of a layer: `rank` times inputs and outputs of each."""
        E, q, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return rank * (2 * (E + q) + 2 * (E + kv) + 3 * (E + self.intermediate_size))

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and as many of the output layer unless tied."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.layer_parameters + self.embedding_parameters * (1 if self.tied else 2)


# Where Transformers' config.json has what Model needs.
_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}


def _check_sizes(name: str, sizes: Mapping[str, Any], reader: str) -> None:
    """Raises ValueError for a size that is not there, is no size, or fits no other."""
    missing = [_FIELDS[ours] for ours, value in sizes.items() if value is None and ours not in ("kv_heads", "head_dim")]
    if missing:
        raise ValueError(f"{name}: lacks {', '.join(missing)}, which {reader} needs.")
    for field, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {_FIELDS[field]} = {value!r}: must be a positive integer.")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(
            f"{name}: num_attention_heads = {sizes['heads']} with num_key_value_heads = {sizes['kv_heads']}: "
            "KV heads must divide query heads."
        )


_PUBLISHED = (
    #     name, layers, hidden, intermediate, heads, KV heads, head size, vocabulary, tied: from their config.json
    Model("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
    Model("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256),
    Model("llama3-405b", 126, 16384, 53248, 128, 8, 128, 128256),
    Model("llama3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    Model("llama3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, tied=True),
    Model("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32768),
    Model("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064),
    Model("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064),
    Model("qwen2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064),
    Model("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064),
    Model("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, tied=True),
    Model("qwen3-1.7b", 28, 2048, 6144, 16, 8, 128, 151936, tied=True),
    Model("qwen3-4b", 36, 2560, 9728, 32, 8, 128, 151936, tied=True),
    Model("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936),
    Model("qwen3-14b", 40, 5120, 17408, 40, 8, 128, 151936),
    Model("qwen3-32b", 64, 5120, 25600, 64, 8, 128, 151936),
)


PRESETS = {model.name: model for model in _PUBLISHED}
"""Published models by name."""


@dataclass(frozen=True)
class Attention:
    """One kind of a model's attention layers, as far as its config.json tells.

    Args:
        heads, kv_heads, head_dim, hidden_size: its sizes.
        window: a token sees itself and the ``window - 1`` before it; None sees all before it.
        softcap: the cap of the scores; None is none.
        scale: the factor on the scores; None is ``head_dim ** -0.5``.
        sinks, bias, norm: a sink per query head, biases of the projections, a norm per query and key head.
    """

    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    bias: bool = False
    norm: bool = False


# What these models compute and their config.json does not say.
_SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa")


_BIAS = ("qwen2", "qwen2_moe", "phi")


_NORM = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")


_WINDOWED, _FULL = "sliding_attention", ("full_attention", "attention")


@dataclass(frozen=True)
class ModelConfig:
    """A configuration as Transformers writes it.

    Args:
        name: where it is from: a file, or the name of a preset.
        fields: its fields; of a model of text and images, those of its text.
    """

    name: str
    fields: Mapping[str, Any]

    def model(self) -> Model:
        """The model, for a plan.

        Raises:
            ValueError: a field that is not there or makes no model, a mixture of experts, or attention that UPipe does
                not serve.
        """
        model = _from_config(self.fields, self.name)
        self.attention()
        return model

    def attention(self) -> tuple[Attention, ...]:
        """The kinds of its attention layers.

        Where layers have a window and ``layer_types`` does not say which, those with one and those without.

        Raises:
            ValueError: a field that is not there or makes no attention, or attention that UPipe does not serve.
        """
        fields = self.fields
        if fields.get("kv_lora_rank"):
            raise ValueError(
                f"{self.name}: kv_lora_rank = {fields['kv_lora_rank']}: latent attention can't be run from its config "
                "alone. Run its heads instead: --heads 128 --head-dim 192 --value-dim 128 for DeepSeek-V3."
            )
        sizes = {ours: size for ours, size in _sizes(fields).items() if ours in ("heads", "kv_heads", "head_dim")}
        sizes["hidden_size"] = fields.get("hidden_size")
        _check_sizes(self.name, sizes, "attention")
        query_scalar, kind = self._number("query_pre_attn_scalar"), fields.get("model_type")
        common = Attention(
            **sizes,
            softcap=self._number("attn_logit_softcapping"),
            scale=query_scalar**-0.5 if query_scalar else self._number("attention_multiplier"),
            sinks=kind in _SINKS,
            bias=kind in _BIAS or any(fields.get(f) is True for f in ("attention_bias", "qkv_bias", "use_bias")),
            norm=kind in _NORM or fields.get("use_qk_norm") is True,
        )
        return tuple(dataclasses.replace(common, window=window) for window in self._windows())

    def _windows(self) -> tuple[int | None, ...]:
        kinds = self.fields.get("layer_types")
        window = self.fields.get("sliding_window") or None
        if isinstance(window, bool) or not isinstance(window, int | None) or (window is not None and window < 1):
            raise ValueError(f"{self.name}: sliding_window = {window!r}: must be a positive integer or null.")
        if kinds is None:
            return (None,) if window is None or self.fields.get("use_sliding_window") is False else (window, None)
        if not isinstance(kinds, list) or not kinds:
            raise ValueError(f"{self.name}: layer_types = {kinds!r}: must be a list of kinds of layers.")
        other = sorted({str(kind) for kind in kinds} - {_WINDOWED, *_FULL})
        if other:
            raise ValueError(f"{self.name}: layer_types has {', '.join(other)}, which UPipe does not serve.")
        if _WINDOWED in kinds and window is None:
            raise ValueError(f"{self.name}: lacks sliding_window, which its layers of type {_WINDOWED} need.")
        found = ((window,) if _WINDOWED in kinds else ()) + ((None,) if set(kinds) - {_WINDOWED} else ())
        return found

    def _number(self, field: str) -> float | None:
        value = self.fields.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{self.name}: {field} = {value!r}: must be a positive number or null.")
        return float(value)


def find_model(name: str, cache: Path | None = None) -> Model:
    """The model called `name`, for a plan; see :func:`find_config`.

    Raises:
        ValueError: no such model, or a config.json that can't be read or lacks something, by field.
    """
    preset = PRESETS.get(name.lower())
    return find_config(name, cache).model() if preset is None else preset


def find_config(name: str, cache: Path | None = None) -> ModelConfig:
    """The configuration of `name`: a preset, a config.json or a folder with one, or a model of Hugging Face's cache.

    Args:
        name: as a user writes it.
        cache: the folder of downloaded models; by default Hugging Face's own. Nothing is downloaded.

    Raises:
        ValueError: no such model (the closest presets are named), or a config.json that can't be read.
    """
    preset = PRESETS.get(name.lower())
    if preset is not None:
        return _preset_config(preset)
    path = Path(name)
    if path.is_dir():
        return _read_config(path / "config.json", name)
    if path.is_file():
        return _read_config(path, name)
    cached = _cached_config(name, cache or _hub_cache())
    if cached is not None:
        return _read_config(cached, name)
    closest = difflib.get_close_matches(name.lower().split("/")[-1], PRESETS, n=3, cutoff=0.5)
    advice = f"the closest presets are {', '.join(closest)}" if closest else f"presets are {', '.join(PRESETS)}"
    raise ValueError(
        f"model {name!r}: no preset, no config.json or folder with one, and not downloaded here; {advice}."
    )


def _preset_config(model: Model) -> ModelConfig:
    # Names of presets begin with Transformers' names of their families, version and all for Qwen.
    family = re.match(r"qwen\d|[a-z]+", model.name)
    assert family is not None
    fields = {theirs: getattr(model, ours) for ours, theirs in _FIELDS.items()}
    return ModelConfig(
        model.name, {"model_type": family[0], **fields, "tie_word_embeddings": model.tied, "sliding_window": None}
    )


def _hub_cache() -> Path:
    """Where Hugging Face keeps what it downloads, by its own variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _cached_config(name: str, cache: Path) -> Path | None:
    """config.json of the newest snapshot of a downloaded model."""
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda file: file.parent.stat().st_mtime)
    return found[-1] if found else None


def _read_config(file: Path, name: str) -> ModelConfig:
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"model {name!r}: can't read {file}: {error.strerror}.") from None
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"model {name!r}: {file} is not JSON: {error}.") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"model {name!r}: {file}: must be an object of settings, as Transformers writes it.")
    fields = config.get("text_config", config)
    if not isinstance(fields, Mapping):
        raise ValueError(f"{file}: text_config = {fields!r}: must be an object of settings.")
    return ModelConfig(str(file), fields)


def _from_config(config: Mapping[str, Any], where: str) -> Model:
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(field):
            raise ValueError(
                f"{where}: {field} = {config[field]}: mixtures of experts can't be planned, as what their MLP takes "
                "depends on how tokens are routed. Plan the dense model of the same attention instead."
            )
    if config.get("kv_lora_rank"):
        raise ValueError(
            f"{where}: kv_lora_rank = {config['kv_lora_rank']}: latent attention can't be planned, as its key and "
            "value heads differ in size. Plan a model of as many heads and their larger size: it takes more."
        )
    return Model(where, **_sizes(config), tied=bool(config.get("tie_word_embeddings", False)))


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes by our names; Transformers' defaults for KV heads and head size."""
    sizes: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in _FIELDS.items()}
    if sizes["kv_heads"] is None:
        sizes["kv_heads"] = sizes["heads"]
    whole = all(isinstance(sizes[field], int) and sizes[field] > 0 for field in ("hidden_size", "heads"))
    if sizes["head_dim"] is None and whole:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["heads"]
    return sizes
