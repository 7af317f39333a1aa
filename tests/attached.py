"""Transformers' models with UPipe in their attention layers, run on shards without an engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.models import shard
from upipe_integrations import UPipeConfig
from upipe_integrations.sharding import mean_token_loss


def attached(model, chunk_heads: int, group=None, kernel: str = "auto", memory: str = "keep"):
    from deepspeed_plugin.attach import attach
    from deepspeed_plugin.group import SequenceGroup

    dtype = next(model.parameters()).dtype
    return attach(
        model, UPipeConfig(chunk_heads, kernel, memory), SequenceGroup(group), device=torch.device("cpu"), dtype=dtype
    )


def sharded(model, batch, group, positions=None) -> dict[str, torch.Tensor]:
    """Like ``single_process``, of a model with UPipe, on shards."""
    C = dist.get_world_size(group)
    model.zero_grad(set_to_none=True)
    if positions is None:
        positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    logits = model(input_ids=shard(batch["input_ids"], group), position_ids=shard(positions, group)).logits
    loss = mean_token_loss(logits.double(), shard(batch["labels"], group), group)
    # mean_token_loss computes in float32, as training does; here the gradient must be exact.
    exact = (
        torch.nn.functional.cross_entropy(
            logits.double().flatten(0, 1), shard(batch["labels"], group).flatten(), ignore_index=-100, reduction="sum"
        )
        / (batch["labels"] != -100).sum()
    )
    assert abs(float((loss - exact).detach())) < 1e-5
    exact.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    total = exact.detach().clone()
    for t in (total, *grads.values()):
        dist.all_reduce(t, group=group)
    parts = [torch.empty_like(logits) for _ in range(C)]
    dist.all_gather(parts, logits.detach().contiguous(), group=group)
    return {"logits": torch.cat(parts, 1), "loss": total, **grads}


def exact_norms(model: torch.nn.Module) -> torch.nn.Module:
    """`model`, and in this process every other with its norm classes, which compute in float32 else."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            type(module).forward = _exact_rms_norm
    return model


def _exact_rms_norm(self, x):
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
