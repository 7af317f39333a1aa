"""Train a small Llama-architecture model on long sequences of real text with DeepSpeed and sequence parallelism.

What UPipe asks of a training script is the ``upipe`` key in the ds_config; ``deepspeed_plugin`` is imported for
its loss, and for a checkout that isn't installed. The rest is DeepSpeed's ordinary Ulysses (ALST) recipe. Without
the key this script trains with Ulysses, and with one process and no ``sequence_parallel_size`` it trains without
sequence parallelism:

    torchrun --nproc-per-node 2 -m examples.deepspeed.train --config configs/deepspeed/demo.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_plugin
from examples.common.corpus import library_files
from examples.deepspeed.attention_memory import attention_peak


class LibrarySource(Dataset):
    """`count` sequences of the bytes of Python's standard library, taken from all over it in an order of `seed`.

    Raises:
        ValueError: there are not as many.
    """

    def __init__(self, count: int, seq_len: int, seed: int) -> None:
        text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in library_files())), dtype=torch.uint8)
        available = len(text) // seq_len
        if count > available:
            raise ValueError(f"{count} sequences of {seq_len} bytes: the standard library has {available}.")
        rows = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:count]
        self._sequences = text[: available * seq_len].view(available, seq_len)[rows].long()

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self._sequences[index]
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(len(tokens))}


def build_model(seq_len: int, seed: int) -> LlamaForCausalLM:
    """A byte-level Llama, the same on every rank."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=seq_len,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def build_engine(model: LlamaForCausalLM, ds_config: dict[str, Any]) -> Any:
    """The DeepSpeed engine; UPipe is in it if and only if `ds_config` has the ``upipe`` key."""
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=ds_config.get("sequence_parallel_size", 1),
        micro_batch_size=ds_config["train_micro_batch_size_per_gpu"],
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config, mpu=mpu)
    return engine


def build_loader(engine: Any, dataset: Dataset) -> UlyssesSPDataLoaderAdapter:
    """Batches 0, 1, 2, ... of `dataset`, each cut along the sequence over the ranks of the group."""
    # Every rank loads samples of its own; the adapter hands them round, first rank 0's, then rank 1's.
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    group = engine.seq_parallel_group if engine.sequence_parallel_size > 1 else dist.group.WORLD
    return UlyssesSPDataLoaderAdapter(
        loader, dist.get_rank(group), group, dist.get_world_size(group), get_accelerator().current_device_name()
    )


def train(engine: Any, loader: UlyssesSPDataLoaderAdapter) -> Iterator[dict[str, float]]:
    """One optimizer step per batch; yields its loss, gradient norm before clipping, and duration."""
    engine.train()
    began = time.perf_counter()
    for batch in loader:
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        shift_labels = batch.pop("shift_labels")
        logits = engine(**batch).logits
        loss = deepspeed_plugin.sequence_parallel_loss(engine, logits, shift_labels)
        engine.backward(loss)
        engine.step()
        mean_loss = float(deepspeed_plugin.group_mean_loss(engine, loss.detach()))
        ended = time.perf_counter()
        yield {"loss": mean_loss, "grad_norm": float(engine.get_global_grad_norm()), "seconds": ended - began}
        began = ended


def attention_memory(engine: Any, seq_len: int) -> int:
    """Peak bytes of the first layer's attention in training, the largest of all ranks."""
    rows = seq_len // engine.sequence_parallel_size
    first = rows * (dist.get_rank() % engine.sequence_parallel_size)
    positions = torch.arange(first, first + rows, device=engine.device)[None]
    model = engine.module.model
    peak = torch.tensor(attention_peak(model.layers[0].self_attn, model.rotary_emb, positions), device=engine.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def _reporter(path: Path | None) -> Callable[[dict[str, Any]], None]:
    """A function that prints a record on rank 0 and appends it to the file at `path`, if there is one."""

    def say(record: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            line = json.dumps(record)
            print(line, flush=True)
            if path is not None:
                with path.open("a") as file:
                    file.write(line + "\n")

    return say


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed configuration (JSON)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens per sequence (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="also write what is printed to this file, as JSON lines")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    ds_config = json.loads(arguments.config.read_text())
    deepspeed.init_distributed()
    say = _reporter(arguments.report)

    model = build_model(arguments.seq_len, arguments.seed)
    engine = build_engine(model, ds_config)
    dataset = LibrarySource(arguments.steps, arguments.seq_len, arguments.seed)
    loader = build_loader(engine, dataset)
    if "upipe" in ds_config:
        say({"upipe": engine.upipe.summary})
    for record in train(engine, loader):
        say(record)
    say({"attention_bytes": attention_memory(engine, arguments.seq_len)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
