"""The balance loss of a mixture of experts, over the rows of all ranks of a sequence.

It is the number of experts times the sum over experts of f * p: the fraction of all rows that choose an expert, and the
mean probability that routers give it (Switch Transformer, arXiv 2101.03961, equations 4 to 6). Both are of the whole
sequence, so a rank's own rows do not give it. Its gradient goes through p alone, and so is a sum over rows, of which a
rank has its share.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from upipe_integrations.all_to_all import Group, group_ranks, sum_over_group


def adds_balance(model: nn.Module) -> bool:
    """Whether the model's configuration adds a balance loss of routers to its own loss."""
    config = getattr(model, "config", None)
    return config is not None and bool(getattr(_text_config(config), "output_router_logits", False))


def balance_share(model: nn.Module, output: Any, group: Group) -> Tensor | None:
    """This rank's share of what the model would add to its loss for its routers; None where it adds nothing.

    Args:
        model: of Transformers.
        output: what it returned for this rank's rows.
        group: the sequence-parallel group. The shares of its ranks add up to the balance loss of the whole sequence.

    Raises:
        ValueError: the model's balance is not the one that is known here.
    """
    if getattr(output, "aux_loss", None) is None:
        return None
    config = _text_config(model.config)
    logits = output.router_logits
    by_row = torch.cat([layer.to(logits[0].device) for layer in logits])
    _check_formula(model, by_row.shape[-1], config.num_experts_per_tok)
    coefficient: float = config.router_aux_loss_coef
    return coefficient * _share(by_row, config.num_experts_per_tok, group)


def _text_config(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _share(logits: Tensor, chosen: int, group: Group) -> Tensor:
    """A scalar, from the logits of all layers `[rows, experts]`, of which each row chooses as many as `chosen`."""
    rows, experts = logits.shape
    probabilities = torch.softmax(logits, -1)
    choices = torch.topk(probabilities, chosen, -1).indices
    counts = torch.bincount(choices.flatten(), minlength=experts).to(probabilities.dtype)
    total = rows * group_ranks(group)
    fractions = sum_over_group(counts, group) / total
    return experts * (fractions * probabilities.sum(0) / total).sum()


def _check_formula(model: nn.Module, experts: int, chosen: int) -> None:
    """Raise ValueError unless the model's modelling file computes the same, which is tried on made-up logits."""
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    generator = torch.Generator().manual_seed(0)
    layers: Sequence[Tensor] = [torch.randn(5, experts, generator=generator) for _ in range(2)]
    theirs = None if function is None else function(tuple(layers), experts, chosen, None)
    if theirs is None or not torch.allclose(_share(torch.cat(list(layers)), chosen, None), theirs, rtol=1e-5):
        raise ValueError(
            f"output_router_logits = True: the balance loss of {type(model).__name__} is not the one that is served "
            "over sequence-parallel ranks. Set output_router_logits = False."
        )
