"""Pretrain a GPT with Megatron: what ``pretrain_gpt.py`` of Megatron-LM does, without its special cases.

There is nothing of UPipe in here. Context-parallel attention is Megatron's own, or UPipe's with

    torchrun --nproc-per-node 8 -m megatron_patch examples/megatron/train.py \\
        --context-parallel-size 8 --context-parallel-impl upipe --upipe-chunk-heads 8 ...
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor


def datasets(samples: list[int]) -> list[GPTDataset | None]:
    """The training, validation and test sets of ``--data-path``, with at least as many samples."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()


# Every rank builds its own iterator, as every one of a context-parallel group takes its rows of the same samples.
datasets.is_distributed = True  # type: ignore[attr-defined]


def next_batch(iterator: Iterator[dict[str, Tensor]]) -> dict[str, Any]:
    """The rows of the next samples that are this context-parallel rank's."""
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(iterator).items()}
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())


def loss_sum(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """This rank's sum of token losses and number of tokens, from which Megatron makes the mean over all ranks.

    Summed in float64: what is logged is then as exact as the losses, on any number of ranks.
    """
    mask = loss_mask.view(-1).double()
    loss = torch.sum(losses.view(-1).double() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}


def forward_step(iterator: Iterator[dict[str, Tensor]], model: GPTModel) -> tuple[Tensor, Any]:
    """One microbatch."""
    batch = next_batch(iterator)
    losses = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"])
    return losses, partial(loss_sum, batch["loss_mask"])


def main() -> None:
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
