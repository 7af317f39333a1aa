"""A loss whose gradients are those of one process at every ZeRO stage.

DeepSpeed sums gradients over sequence-parallel ranks at ZeRO 0, 1 and 2 and averages them at ZeRO-3 (with
its default ``reduce_scatter``). A loss that is right for one is off by the number of ranks for the other;
Adam hides it, gradient clipping and logged norms do not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from upipe_integrations.all_to_all import sum_over_group
from upipe_integrations.sharding import mean_token_loss


def sequence_parallel_loss(engine: Any, logits: Tensor, shift_labels: Tensor) -> Tensor:
    """The loss to pass to ``engine.backward``: the mean cross entropy over the sequence-parallel group's tokens.

    Args:
        engine: the DeepSpeed engine (UPipe or plain Ulysses).
        logits: `[B, L, vocabulary]` of this rank's rows.
        shift_labels: `[B, L]` next-token targets as ``UlyssesSPDataLoaderAdapter`` and ``shard_batch`` give
            them; -100 is not counted, and a rank may have none.

    Returns:
        A scalar. To log the mean loss, sum it over the group (and at ZeRO-3 divide by the ranks):
        :func:`group_mean_loss` does.
    """
    return mean_token_loss(logits, shift_labels, _group(engine)) * gradient_factor(engine)


def gradient_factor(engine: Any) -> int:
    """What this rank's share of the loss is multiplied by so that reduced gradients are those of one process."""
    averaged = engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter()
    return int(engine.sequence_parallel_size) if averaged else 1


def group_mean_loss(engine: Any, loss: Tensor) -> Tensor:
    """The group's mean loss from every rank's :func:`sequence_parallel_loss`, for logging; no gradient."""
    return sum_over_group(loss, _group(engine)) / gradient_factor(engine)


def _group(engine: Any) -> Any:
    return engine.seq_parallel_group if engine.sequence_parallel_size > 1 else None
