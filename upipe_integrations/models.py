"""The shapes of models that a plan needs: a table of published ones, and a reader of Transformers' config.json."""

from __future__ import annotations

import difflib
import json
import os
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
        for field, value in vars(self).items():
            if field not in ("name", "tied") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{self.name}: {_FIELDS[field]} = {value!r}: must be a positive integer.")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: num_attention_heads = {self.heads} with num_key_value_heads = {self.kv_heads}: "
                "KV heads must divide query heads."
            )

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


def find_model(name: str, cache: Path | None = None) -> Model:
    """The model called `name`: a preset, a config.json or a folder with one, or a model of the Hugging Face cache.

    Args:
        name: as a user writes it.
        cache: the folder of downloaded models; by default Hugging Face's own. Nothing is downloaded.

    Raises:
        ValueError: no such model (the closest presets are named), or a config.json that can't be read or lacks
            something, by field.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
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


def _hub_cache() -> Path:
    """Where Hugging Face keeps what it downloads, by its own variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _cached_config(name: str, cache: Path) -> Path | None:
    """config.json of the newest snapshot of a downloaded model."""
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda file: file.parent.stat().st_mtime)
    return found[-1] if found else None


def _read_config(file: Path, name: str) -> Model:
    try:
        config = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"model {name!r}: can't read {file}: {error.strerror}.") from None
    except ValueError as error:  # not JSON, or not text
        raise ValueError(f"model {name!r}: {file} is not JSON: {error}.") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"model {name!r}: {file}: must be an object of settings, as Transformers writes it.")
    return _from_config(config.get("text_config", config), str(file))


def _from_config(config: Any, where: str) -> Model:
    """A model of a config.json's fields; Transformers' defaults for KV heads, head size and tied embeddings."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where}: text_config = {config!r}: must be an object of settings.")
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(field):
            raise ValueError(
                f"{where}: {field} = {config[field]}: mixtures of experts can't be planned, as what their MLP takes "
                "depends on how tokens are routed. Plan the dense model of the same attention instead."
            )
    sizes: dict[str, Any] = {ours: config.get(theirs) for ours, theirs in _FIELDS.items()}
    if sizes["kv_heads"] is None:
        sizes["kv_heads"] = sizes["heads"]
    whole = all(isinstance(sizes[field], int) and sizes[field] > 0 for field in ("hidden_size", "heads"))
    if sizes["head_dim"] is None and whole:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["heads"]
    missing = [_FIELDS[ours] for ours, value in sizes.items() if value is None and ours not in ("kv_heads", "head_dim")]
    if missing:
        raise ValueError(f"{where}: lacks {', '.join(missing)}, which a plan needs.")
    return Model(where, **sizes, tied=bool(config.get("tie_word_embeddings", False)))
