"""The arguments of a small model for Megatron's training scripts, and whether Megatron is there to take them."""

from __future__ import annotations

import importlib.util

import pytest

MEGATRON = importlib.util.find_spec("megatron") is not None
TRAINING = MEGATRON and importlib.util.find_spec("megatron.training") is not None
needs_megatron = pytest.mark.skipif(not MEGATRON, reason="megatron-core is not installed")
needs_training = pytest.mark.skipif(
    not TRAINING, reason="this megatron-core has no megatron.training (0.17 and later have, for Python 3.12)"
)
MODEL = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "16"),
    *("--group-query-attention", "--num-query-groups", "8", "--seq-length", "64", "--max-position-embeddings", "64"),
    *("--micro-batch-size", "1", "--attention-dropout", "0", "--hidden-dropout", "0", "--transformer-impl", "local"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-rope-fusion"),
    *("--position-embedding-type", "rope", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"),
    *("--distributed-backend", "gloo"),
]
UPIPE = ["--context-parallel-impl", "upipe"]
