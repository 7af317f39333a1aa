"""DeepSpeed's ``DistributedAttention`` in stages of a few heads, around the same local attention.

The local attention is the user's: any callable. A stage's call of it is not kept but made again in backward, so it
must be repeatable, treat heads alike, and have nothing else to give a gradient to; what can be checked of that is, by
calling it twice on made-up heads before a module's first exchange, so that all ranks know what any of them found.
Random numbers (dropout) are drawn again as they were.

Shapes: L rows of the sequence on this rank, S = L * ranks, B batch, H query heads, n of them in a stage on this rank.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepspeed_plugin.transformers.layer import CHILD
from upipe_integrations import (
    AttentionSpec,
    Dropout,
    FunctionKernel,
    Schedule,
    Staging,
    UPipeConfig,
    upipe_attention_qkv,
)
from upipe_integrations.all_to_all import Group, gather_integers, group_ranks

_LAYER_MODULE = "deepspeed.sequence.layer"
# A rate of 0 drops nothing; with it the engine tells the kernel which heads it is called for.
_WITH_HEADS = AttentionSpec(causal=False, dropout=Dropout(0.0, seed=0))
_SAMPLE = 1024
_REPEATABLE = 0.05


class DistributedAttention(nn.Module):
    """``deepspeed.sequence.layer.DistributedAttention`` in stages.

    Args:
        local_attention: attention over the whole sequence for some heads, called with q, k, v
            `[S, B, heads, D]` (or `[B, S, heads, D]`, as `gather_idx` says) and the further arguments of
            ``forward``; returns `[S, B, heads, Dv]` or `[S, B, heads * Dv]`. In a stage KV heads are as many as query
            heads, or the model's number of query heads attend each.
        sequence_process_group: the sequence-parallel group.
        scatter_idx: the dimension of heads: 2.
        gather_idx: the dimension of the sequence: 0 (sequence first) or 1 (batch first).
        sp_stream: None; ``overlap`` takes its place.
        num_kv_heads: None, or a divisor of the keys' heads.
        chunk_heads: query heads per stage over all ranks; a multiple of the ranks.
        overlap: as the key of that name: True sends the next stage's heads while this one attends.

    Raises:
        ValueError: the arguments ask for what can't be served; the message names which and the remedy.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: torch.distributed.ProcessGroup,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
        *,
        chunk_heads: int,
        overlap: bool | str = False,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.sp_stream = sp_stream
        self.num_kv_heads = num_kv_heads
        config = UPipeConfig(chunk_heads, overlap=overlap)
        check_instance("DistributedAttention", self, config)
        self.upipe = DistributedState(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of this rank's rows, like upstream's.

        Args:
            query: `[L, B, H, D]`, or `[B, L, H, D]` with ``gather_idx`` 1; `key` and `value` like it with KV heads.
            batch_dim_idx: the dimension of the batch: 1, or 0 with ``gather_idx`` 1.
            rotary_pos_emb: (cos, sin) of the whole sequence, applied to q and k after the exchange, or None.
            args, kwargs: passed to the local attention.
        """
        return distributed_forward(self, query, key, value, batch_dim_idx, rotary_pos_emb, *args, **kwargs)


@dataclass
class DistributedState:
    """What a module holds whose calls are staged.

    Attributes:
        config: its settings.
        verified: whether its local attention was tried, in evaluation (False) and in training (True).
    """

    config: UPipeConfig
    verified: set[bool] = field(default_factory=set)


def find_distributed_attention(model: nn.Module) -> dict[str, nn.Module]:
    """DeepSpeed's ``DistributedAttention`` modules of `model` by name.

    Raises:
        ValueError: one is of a class that overrides its forward, or has UPipe already.
    """
    layer = sys.modules.get(_LAYER_MODULE)
    if layer is None:
        return {}
    theirs: type[nn.Module] = layer.DistributedAttention
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, DistributedAttention) or (isinstance(module, theirs) and hasattr(module, CHILD)):
            raise ValueError(
                f"upipe: {name} has UPipe already. Remove the 'upipe' key where the model builds "
                "deepspeed_plugin.DistributedAttention itself; else call undo() on its attachment (engine.upipe) first."
            )
        if not isinstance(module, theirs):
            continue
        if type(module).forward is not theirs.forward:
            raise ValueError(
                f"upipe: {name} is a {type(module).__name__} with a forward of its own, which UPipe can't stand in "
                "for. Build it on deepspeed_plugin.DistributedAttention, or remove the 'upipe' key."
            )
        found[name] = module
    return found


def check_instance(name: str, module: Any, config: UPipeConfig) -> None:
    """Raise ValueError unless `module`, with the attributes of DeepSpeed's class, can be served under `config`."""
    ranks = group_ranks(module.spg)
    if config.chunk_heads % ranks:
        raise ValueError(
            f"upipe.chunk_heads = {config.chunk_heads}: must be a multiple of the {ranks} ranks of {name}'s group."
        )
    for key, value, served in (("memory", config.memory, "keep"), ("kernel", config.kernel, "auto")):
        if value != served:
            raise ValueError(
                f"upipe.{key} = {value!r}: {name} attends by a local attention of its own, to heads "
                f"that are projected already, so only {served!r} is possible. Leave upipe.{key} out."
            )
    if module.sp_stream is not None:
        raise ValueError(
            f"upipe: {name} has an sp_stream, on which other modules of the model compute; UPipe does not wait for it. "
            "Build the model without it (Megatron-DeepSpeed: without --ds-sequence-parallel-overlap-comm) and use "
            "upipe.overlap."
        )
    if module.scatter_idx != 2 or module.gather_idx not in (0, 1):
        raise ValueError(
            f"upipe: {name} has scatter_idx = {module.scatter_idx} and gather_idx = {module.gather_idx}: must be 2 "
            "(heads) and 0 or 1 (the sequence)."
        )
    parameters = module.local_attn.named_parameters() if isinstance(module.local_attn, nn.Module) else ()
    trained = [parameter for parameter, p in parameters if p.requires_grad]
    if trained:
        raise ValueError(
            f"upipe: the local attention of {name} has trained parameters ({', '.join(trained)}), which would get no "
            "gradient. Apply them outside of it, or freeze them."
        )


@functools.lru_cache(maxsize=64)
def _schedule(config: UPipeConfig, heads: int, kv_heads: int, ranks: int) -> Schedule:
    return config.schedule(heads=heads, kv_heads=kv_heads, ranks=ranks)


def distributed_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch_dim_idx: int,
    rotary_pos_emb: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The forward of :class:`DistributedAttention`, and of any module that has its attributes; see there for shapes.

    Raises:
        ValueError: shapes do not fit, an argument would get no gradient, or the local attention can't be served;
            before any exchange, on every rank alike.
    """
    if batch_dim_idx not in (0, 1) or batch_dim_idx == module.gather_idx:
        raise ValueError(
            f"batch_dim_idx = {batch_dim_idx} with gather_idx = {module.gather_idx}: one of the first two dimensions "
            "is the batch and the other the sequence. Pass 1 with gather_idx 0, 0 with gather_idx 1."
        )
    if any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((rotary_pos_emb, args, kwargs))):
        raise ValueError(
            "upipe: an argument of the local attention beyond q, k and v requires a gradient and would get none. "
            "Detach it, or remove the 'upipe' key."
        )
    if query.dim() != 4 or key.dim() != 4 or (module.num_kv_heads and key.shape[2] % module.num_kv_heads):
        raise ValueError(
            f"query of shape {tuple(query.shape)} and key of shape {tuple(key.shape)}: must be of four dimensions, "
            f"heads the third, and the key's heads a multiple of num_kv_heads = {module.num_kv_heads}."
        )
    state: DistributedState = module.upipe
    local = _LocalAttention(module, rotary_pos_emb, args, kwargs, query.device.type)
    schedule = _schedule(state.config, query.shape[2], key.shape[2], group_ranks(module.spg))
    staging = Staging(schedule, module.spg, FunctionKernel(local, "local attention"), mode=state.config.mode)
    if bool(module.training) not in state.verified:
        _verify(local, schedule, query, key, value, module.spg)
        state.verified.add(bool(module.training))
    if module.gather_idx == 0:  # [L, B, heads, D] is the engine's [B, L, heads, D] with other strides
        q, k, v = (t.transpose(0, 1) for t in (query, key, value))
        out = upipe_attention_qkv(q, k, v, staging, _WITH_HEADS).transpose(0, 1)
    else:
        out = upipe_attention_qkv(query, key, value, staging, _WITH_HEADS)
    return out.flatten(2) if local.flattens_heads else out


class _WrongShape(ValueError):
    """The result of a local attention has not the shape that it must have."""


class _LocalAttention:
    """The local attention in one call of the module: for the same heads it gives the same, whenever it is called."""

    def __init__(self, module: Any, rotary: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str):
        self._module = module
        self._rotary = rotary
        self._args = args
        self._kwargs = kwargs
        self._autocast = (
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
        )
        self.sequence_first: bool = module.gather_idx == 0
        self._first_calls: dict[tuple[int, ...], list[Tensor] | None] = {}
        self.flattens_heads = False
        """Whether the result has heads and their size in one dimension; known after the first call."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """`[B, n, S, D]` tensors to `[B, n, S, Dv]`."""
        assert spec.dropout is not None
        heads = spec.dropout.heads
        if heads not in self._first_calls:
            before = _random_states(q.device)
            out = self.attend(q, k, v)
            drew = any(not torch.equal(a, b) for a, b in zip(before, _random_states(q.device), strict=True))
            self._first_calls[heads] = before if drew else None
            return out
        with _with_random_states(self._first_calls[heads], q.device):
            return self.attend(q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # [B, n, S, D] -> [S, B, n, D] where the sequence is first, [B, S, n, D] where the batch is.
        order = (2, 0, 1, 3) if self._module.gather_idx == 0 else (0, 2, 1, 3)
        query, key, value = (t.permute(order).contiguous() for t in (q, k, v))
        if self._rotary is not None:
            from deepspeed.sequence.layer import apply_rotary_pos_emb

            cos, sin = (t.permute(1, 0, 2, 3) for t in self._rotary)
            query, key = (apply_rotary_pos_emb(t, cos, sin) for t in (query, key))
        device_type, dtype, enabled = self._autocast
        with torch.autocast(device_type, dtype=dtype, enabled=enabled):
            out: Tensor = self._module.local_attn(query, key, value, *self._args, **self._kwargs)
        n = query.shape[2]
        self.flattens_heads = out.dim() == 3
        if out.shape[:2] != query.shape[:2] or out.shape[2] % n or (out.dim() == 4 and out.shape[2] != n):
            raise _WrongShape(
                f"upipe: the local attention gave {tuple(out.shape)} for a query of {tuple(query.shape)} and a key of "
                f"{tuple(key.shape)}: must be [{query.shape[0]}, {query.shape[1]}, {n} heads, head size] or the last "
                "two in one. It is called with the heads of one stage, and must take its numbers of heads from them."
            )
        # [S, B, n * Dv] or [S, B, n, Dv] (or batch first) -> [B, n, S, Dv]
        by_head = out.unflatten(2, (n, -1)) if self.flattens_heads else out
        back = (1, 2, 0, 3) if self._module.gather_idx == 0 else (0, 2, 1, 3)
        return by_head.permute(back).to(q.dtype)


# ---------------------------------------------------------------- trying it


class _Verdict(enum.IntEnum):
    """What one rank found of its local attention; the number travels to the other ranks."""

    FINE = 0
    RAISED = 1
    SHAPE = 2
    HIDDEN = 3
    NOT_REPEATED = 4


def _words(verdict: _Verdict) -> str:
    if verdict == _Verdict.RAISED:
        return "raised an error: see those ranks' output."
    if verdict == _Verdict.SHAPE:
        return "gave another shape than that of the query: see those ranks' output."
    if verdict == _Verdict.HIDDEN:
        return (
            "reads a tensor beyond its arguments that requires a gradient, which it would not get. Pass its result to "
            "the attention instead, or remove the 'upipe' key."
        )
    return (
        "gave another result when it was called again, as it is in backward: as dropout from a random state of its own "
        "does (Megatron's RNG tracker). Set attention dropout to 0, or remove the 'upipe' key."
    )


def _verify(
    local: _LocalAttention, schedule: Schedule, query: Tensor, key: Tensor, value: Tensor, group: Group
) -> None:
    """Raise ValueError, on every rank alike, unless the local attention of all ranks can be served.

    It is tried on heads of a stage's shapes: those of this rank's rows, repeated to the length of the sequence. Random
    states are as before afterwards.
    """
    stage, ranks = schedule.stages[0], schedule.ranks
    counts = (stage.q.per_rank, stage.kv.per_rank, stage.kv.per_rank)
    # [L, B, heads, D], or [B, L, heads, D], -> [B, heads, S, D]
    order = (1, 2, 0, 3) if local.sequence_first else (0, 2, 1, 3)
    made_up = [
        t.detach().permute(order)[:, :n].repeat(1, 1, ranks, 1).requires_grad_()
        for t, n in zip((query, key, value), counts, strict=True)
    ]
    raised: Exception | None = None
    try:
        verdict = _try(local, made_up)
    except Exception as error:  # the user's function: the other ranks must not wait for this one
        verdict, raised = _Verdict.SHAPE if isinstance(error, _WrongShape) else _Verdict.RAISED, error
    by_rank = [said for (said,) in gather_integers([int(verdict)], group, query.device)]
    if raised is not None:
        raise raised
    for worst in (_Verdict.RAISED, _Verdict.SHAPE, _Verdict.HIDDEN, _Verdict.NOT_REPEATED):
        if worst in by_rank:
            where = [rank for rank, said in enumerate(by_rank) if said == worst]
            raise ValueError(f"upipe: on sequence-parallel ranks {where} the local attention {_words(worst)}")


def _try(local: _LocalAttention, heads: list[Tensor]) -> _Verdict:
    device = heads[0].device
    states = _random_states(device)
    with torch.enable_grad(), _with_random_states(states, device):
        out = local.attend(*heads)
    if any(all(leaf is not known for known in heads) for leaf in _graph_leaves(out)):
        return _Verdict.HIDDEN
    sample = _sample(out)
    del out
    with torch.no_grad(), _with_random_states(states, device):
        again = _sample(local.attend(*heads))
    repeated = bool((again - sample).abs().max() <= _REPEATABLE * sample.abs().max())
    return _Verdict.FINE if repeated else _Verdict.NOT_REPEATED


def _sample(out: Tensor) -> Tensor:
    """About 1024 values of `out`, evenly spread: `[n]`."""
    flat = out.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone()


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


@contextlib.contextmanager
def _with_random_states(states: list[Tensor] | None, device: torch.device) -> Iterator[None]:
    if states is None:
        yield
        return
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.set_rng_state(states[0])
        if devices:
            torch.get_device_module(device).set_rng_state(states[1], device)
        yield


def _graph_leaves(out: Tensor) -> list[Tensor]:
    """Every leaf of autograd's graph that `out` depends on."""
    leaves, seen, waiting = [], set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves
