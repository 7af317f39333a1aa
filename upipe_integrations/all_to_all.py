"""Sequence shards to head shards and back. The only file of the core that calls a collective.

Shapes: C ranks, L rows of the sequence per rank, S = C * L, B batch, n heads of one rank in one stage,
D head size. An exchange buffer is ``[C, L, B, n, D]``. Sending, piece c goes to rank c and holds this
rank's rows of rank c's heads; received, piece c came from rank c and holds rank c's rows of this rank's
heads, so that the buffer *is* the whole sequence ``[S, B, n, D]`` and attention reads a view of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
"""A sequence-parallel process group; None is a group of one rank that needs no communication."""


def group_ranks(group: Group) -> int:
    """Ranks of `group`."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This process's rank within `group` (not its global rank)."""
    return 0 if group is None else dist.get_rank(group)


def exchange(send: Tensor, group: Group) -> Tensor:
    """All-to-all over the first dimension of a contiguous `[C, ...]` buffer; a group of one returns it as is."""
    if group_ranks(group) == 1:
        return send
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return received


@dataclass
class InFlight:
    """An exchange that was started; :meth:`wait` gives what was received."""

    received: Tensor
    _send: Tensor | None = None
    _work: dist.Work | None = None

    def wait(self) -> Tensor:
        """What was received; the send buffer is let go."""
        if self._work is not None:
            self._work.wait()
        self._send = self._work = None
        return self.received


def start_exchange(send: Tensor, group: Group, *, overlap: bool) -> InFlight:
    """:func:`exchange`, not waited for if `overlap`: it goes on while this rank computes."""
    if not overlap or group_ranks(group) == 1:
        return InFlight(exchange(send, group))
    received = torch.empty_like(send)
    return InFlight(received, send, dist.all_to_all_single(received, send, group=group, async_op=True))


def gather_over_group(value: Tensor, group: Group) -> list[Tensor]:
    """Every rank's `value` (of the same shape on each), by rank, outside autograd."""
    if group_ranks(group) == 1:
        return [value]
    value = value.contiguous()
    everyone = [torch.empty_like(value) for _ in range(group_ranks(group))]
    dist.all_gather(everyone, value, group=group)
    return everyone


def gather_integers(values: list[int], group: Group, device: torch.device) -> list[list[int]]:
    """Every rank's `values` (as many on each), by rank: for checks that all ranks must decide alike."""
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    return [row.tolist() for row in gather_over_group(mine, group)]


def sum_over_group(value: Tensor, group: Group) -> Tensor:
    """The sum of `value` over the group's ranks, outside autograd."""
    total = value.detach().clone()
    if group_ranks(group) > 1:
        dist.all_reduce(total, group=group)
    return total


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """`[B, L / T, E]` on each of the group's T ranks -> `[B, L, E]` on all, rank after rank."""
    if group_ranks(group) == 1:
        return x
    part = x.transpose(0, 1).contiguous()
    whole = part.new_empty(group_ranks(group) * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole.transpose(0, 1)


def reduce_scatter_rows(grad: Tensor, group: Group) -> Tensor:
    """`[B, L, E]` on each of the group's T ranks -> this rank's `[B, L / T, E]` of the sum."""
    if group_ranks(group) == 1:
        return grad
    whole = grad.transpose(0, 1).contiguous()
    part = whole.new_empty(whole.shape[0] // group_ranks(group), *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole, group=group)
    return part.transpose(0, 1)


def send_view(heads: Tensor, ranks: int) -> Tensor:
    """`[B, L, C*n, D]` -> view `[C, L, B, n, D]`: piece c is for rank c."""
    by_rank: Tensor = heads.unflatten(2, (ranks, -1))
    return by_rank.permute(2, 1, 0, 3, 4)


def sequence_pieces(attended: Tensor, ranks: int) -> Tensor:
    """`[B, n, S, D]` -> contiguous `[C, L, B, n, D]`: piece c is for rank c; no copy where the memory allows."""
    B, n, S, D = attended.shape
    return attended.permute(2, 0, 1, 3).contiguous().view(ranks, S // ranks, B, n, D)
