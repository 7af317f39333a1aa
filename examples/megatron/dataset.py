"""The demo's text as one of Megatron's own datasets, of the bytes that Megatron's byte-level tokenizer gives."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

from examples.common.corpus import library_files

VOCABULARY = 256
END_OF_DOCUMENT = 255
"""A byte that UTF-8 does not use; also what ``--tokenizer-type NullTokenizer --vocab-size 256`` takes for it."""


def build(prefix: Path) -> int:
    """Write ``<prefix>.bin`` and ``<prefix>.idx``, one document per module; returns the number of tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"}, vocab_size=VOCABULARY, _eos_id=END_OF_DOCUMENT
    )
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint8)
    total = 0
    for file in library_files():
        tokens = [*tokenizer.tokenize(file.read_text(errors="replace")), tokenizer.eod]
        builder.add_document(torch.tensor(tokens), [len(tokens)])
        total += len(tokens)
    builder.finalize(f"{prefix}.idx")
    return total
