"""Losses whose gradients are those of one process at every ZeRO stage, whole or without whole logits.

With its defaults DeepSpeed sums gradients over sequence-parallel ranks at ZeRO 0, 1 and 2 and averages them at ZeRO-3
(:mod:`deepspeed_plugin.losses.reduction` has all cases). A loss that is right for one is off by the number of ranks for
the other; Adam hides it, gradient clipping and logged norms do not.

The tiled forms run the model with its output head replaced, for that call, by one that gives log-probabilities
of the targets. The head's weight is read inside the head's own call, so that ZeRO-3 gathers it once in forward
and once in backward, and gets its one gradient from autograd, so that it is scaled and reduced as every other
is. DeepSpeed's ``TiledFusedLogitsLoss`` computes that gradient within forward instead: neither the division by
accumulation steps nor by a token count reaches it, and a weight tied to the embedding is reduced too early.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepspeed_plugin.losses.balance import adds_balance, balance_share
from deepspeed_plugin.losses.logits import LogitsFunction, RecordedLogits, head_logits, logits_function
from deepspeed_plugin.losses.reduction import gradient_factor
from upipe_integrations.all_to_all import sum_over_group
from upipe_integrations.sharding import IGNORED, count_labels, sequence_sums, summed_token_loss
from upipe_integrations.tiled_loss import TILE_ROWS, token_log_probs

Reduction = Literal["mean", "sum"]
TiledKernel = Literal["torch", "liger"]


def sequence_parallel_loss(
    engine: Any,
    logits: Any,
    shift_labels: Tensor,
    *,
    reduction: Reduction = "mean",
    step_tokens: Tensor | int | None = None,
) -> Tensor:
    """The loss to pass to ``engine.backward``: the cross entropy of the sequence-parallel group's tokens.

    Args:
        engine: the DeepSpeed engine (UPipe or plain Ulysses).
        logits: `[B, L, vocabulary]` of this rank's rows; or the model's whole output, which has them. Where the model
            adds a balance loss of its routers (``output_router_logits``) it must be the output: this rank's share of
            the balance over the whole sequence is added, as it is, whatever `reduction` and `step_tokens`; DeepSpeed
            averages it over micro-batches.
        shift_labels: `[B, L]` next-token targets as ``UlyssesSPDataLoaderAdapter`` and ``shard_batch`` give
            them; -100 is not counted, and a rank may have none.
        reduction: ``mean`` over the group's labelled tokens, or ``sum``. DeepSpeed then averages over
            data-parallel replicas and accumulated micro-batches.
        step_tokens: with ``mean``, the labelled tokens of the whole step, :func:`labelled_tokens` of all its
            micro-batches: each token then weighs the same, however many its micro-batch has.

    Returns:
        A scalar, this rank's share. To log the group's loss, use :func:`group_mean_loss`.

    Raises:
        ValueError: the model adds a balance loss and `logits` is not its output, or its balance is not known; or
            DeepSpeed's settings are such that no loss is right, see :func:`gradient_factor`.
    """
    balance, whole = None, logits
    if not isinstance(logits, Tensor):
        balance, whole = balance_share(engine.module, logits, _group(engine)), logits.logits
    elif adds_balance(engine.module):
        raise ValueError(
            f"output_router_logits = True: {type(engine.module).__name__} adds a balance loss of its routers to its "
            "own, which logits alone do not give. Pass the model's whole output in the place of logits, or set "
            "output_router_logits = False."
        )
    total = summed_token_loss(whole, shift_labels)
    return _reduced(engine, total, shift_labels, reduction, step_tokens, balance)


def tiled_sequence_parallel_loss(
    engine: Any,
    inputs: Mapping[str, Any],
    shift_labels: Tensor,
    *,
    reduction: Reduction = "mean",
    step_tokens: Tensor | int | None = None,
    tile_rows: int | None = None,
    kernel: TiledKernel = "torch",
) -> Tensor:
    """:func:`sequence_parallel_loss` of ``engine(**inputs)``, with logits of `tile_rows` rows at a time.

    What the model does to its logits after the head (a softcap, a scale) is done to those of each tile.

    Args:
        engine: as above; its module is a Transformers causal LM with a linear output head, tied or not.
        inputs: what the model takes, without labels: this rank's shard.
        shift_labels, reduction, step_tokens: as above.
        tile_rows: rows whose logits are alive at a time; None is 1024.
        kernel: ``torch``, or ``liger``: ``liger_fused_linear_cross_entropy`` (liger-kernel, a GPU). It forms gradients
            in forward, one matrix product fewer, and holds the head's, whole, until backward; it chooses its tiles.
            Its rounding differs, so it is not chosen unasked.

    Raises:
        ValueError: the head is not a plain linear layer, the model does something to its logits that can't be done
            by rows, or that `kernel` does not know; shapes do not fit; or as above.
        ImportError: liger-kernel is asked for and missing.
    """
    _check_reduction(reduction)
    if kernel == "torch":
        rows = TILE_ROWS if tile_rows is None else tile_rows
        log_probs, output = _log_probs_and_output(engine, inputs, shift_labels, rows)
    elif kernel != "liger":
        raise ValueError(f'kernel = {kernel!r}: must be "torch" or "liger".')
    elif tile_rows is not None:
        raise ValueError(f'tile_rows = {tile_rows} with kernel = "liger": Liger chooses its tiles; leave it out.')
    else:
        log_probs, output = _summed_log_probs_by_liger(engine, inputs, shift_labels)
    balance = balance_share(engine.module, output, _group(engine))
    return _reduced(engine, -log_probs.sum(), shift_labels, reduction, step_tokens, balance)


def _summed_log_probs_by_liger(engine: Any, inputs: Mapping[str, Any], shift_labels: Tensor) -> tuple[Tensor, Any]:
    """A scalar, the sum of the log-probabilities of this rank's targets; and the model's output."""
    cross_entropy = _liger_cross_entropy()

    def compute(hidden: Tensor, head: nn.Linear, applied: LogitsFunction) -> Tensor:
        loss: Tensor = cross_entropy(
            hidden.flatten(0, -2),
            head.weight,
            shift_labels.flatten(),
            bias=head.bias,
            ignore_index=IGNORED,
            reduction="sum",
            softcap=applied.softcap,
            # Sums over its tiles in float32: in bfloat16 a sum of many tiles loses the last.
            accum_dtype=torch.float32,
        )
        return -loss

    return _run_with_head(engine, inputs, shift_labels, compute, only_softcap=True)


def _liger_cross_entropy() -> Callable[..., Any]:
    """Liger's cross entropy of a linear head's logits, if it knows what is asked of it."""
    try:
        from liger_kernel.transformers import functional
    except ImportError:
        raise ImportError('kernel = "liger" needs liger-kernel: pip install liger-kernel') from None
    function: Callable[..., Any] = functional.liger_fused_linear_cross_entropy
    needed = {"bias", "ignore_index", "reduction", "softcap", "accum_dtype"}
    missing = needed - inspect.signature(function).parameters.keys()
    if missing:
        raise ValueError(
            f'kernel = "liger": this liger-kernel has no {", ".join(sorted(missing))} in '
            "liger_fused_linear_cross_entropy. Update it (0.8.5 has them), or leave kernel out."
        )
    return function


def sequence_log_probs(
    engine: Any,
    inputs: Mapping[str, Any],
    shift_labels: Tensor,
    *,
    reduction: Reduction = "sum",
    tile_rows: int = TILE_ROWS,
) -> Tensor:
    """`[B]` log-probabilities of whole sequences, for preference losses (DPO and the like).

    The same on every rank of the group; compute the loss from them on every rank alike and pass it to
    ``engine.backward`` as it is. The gradient factor of the ZeRO stage is inside. Without gradients under
    ``torch.no_grad`` (a reference model's).

    Args:
        engine, inputs, shift_labels, tile_rows: as for :func:`tiled_sequence_parallel_loss`.
        reduction: ``sum`` over a sequence's labelled tokens, or their ``mean``.
    """
    _check_reduction(reduction)
    log_probs = target_log_probs(engine, inputs, shift_labels, tile_rows=tile_rows)
    sums = sequence_sums(log_probs, _group(engine), gradient_factor(engine))
    if reduction == "sum":
        return sums
    return sums / sum_over_group((shift_labels != IGNORED).sum(1), _group(engine)).clamp(min=1)


def target_log_probs(
    engine: Any, inputs: Mapping[str, Any], shift_labels: Tensor, *, tile_rows: int = TILE_ROWS
) -> Tensor:
    """`[B, L]` log-probabilities of this rank's targets, 0 where there are none: what the tiled forms sum."""
    log_probs, output = _log_probs_and_output(engine, inputs, shift_labels, tile_rows)
    if getattr(output, "aux_loss", None) is not None:
        raise ValueError(
            f"output_router_logits = True: {type(engine.module).__name__} adds a load-balancing loss to its own, which "
            "log-probabilities leave out. Set output_router_logits = False, or use tiled_sequence_parallel_loss."
        )
    return log_probs


def _log_probs_and_output(
    engine: Any, inputs: Mapping[str, Any], shift_labels: Tensor, tile_rows: int
) -> tuple[Tensor, Any]:
    """:func:`target_log_probs`, and the model's output."""

    def compute(hidden: Tensor, head: nn.Linear, applied: LogitsFunction) -> Tensor:
        return token_log_probs(
            hidden, head.weight, head.bias, shift_labels, logits_function=applied, tile_rows=tile_rows
        )

    return _run_with_head(engine, inputs, shift_labels, compute)


def group_mean_loss(engine: Any, loss: Tensor) -> Tensor:
    """The group's loss from every rank's share, for logging; no gradient.

    With ``step_tokens``, its mean over the step's micro-batches and replicas is the step's loss.
    """
    return sum_over_group(loss, _group(engine)) / gradient_factor(engine)


def labelled_tokens(engine: Any, shift_labels: Iterable[Tensor]) -> Tensor:
    """Labelled tokens of these micro-batches on all ranks, data-parallel replicas included: ``step_tokens``."""
    counts = [(labels != IGNORED).sum() for labels in shift_labels]
    if not counts:
        raise ValueError("shift_labels is empty: give the labels of every micro-batch of the step.")
    return sum_over_group(torch.stack(counts).sum(), engine.seq_data_parallel_group)


def _reduced(
    engine: Any,
    total: Tensor,
    shift_labels: Tensor,
    reduction: Reduction,
    step_tokens: Tensor | int | None,
    balance: Tensor | None,
) -> Tensor:
    """This rank's share of the loss from `total`, its sum over this rank's tokens, and of the balance; a scalar."""
    _check_reduction(reduction)
    if step_tokens is None:
        share = total if reduction == "sum" else total / count_labels(shift_labels, _group(engine)).clamp(min=1)
    elif reduction == "sum":
        raise ValueError('step_tokens with reduction = "sum": a sum is divided by nothing; leave one of them out.')
    else:
        replicas = engine.seq_dp_world_size // engine.sequence_parallel_size
        averaged = engine.gradient_accumulation_steps() * replicas  # DeepSpeed divides by it
        share = total * averaged / torch.as_tensor(step_tokens, device=total.device).clamp(min=1)
    if balance is not None:
        share = share + balance.to(share.device)
    return share * gradient_factor(engine)


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction = {reduction!r}: must be "mean" or "sum".')


def _run_with_head(
    engine: Any,
    inputs: Mapping[str, Any],
    shift_labels: Tensor,
    compute: Callable[[Tensor, nn.Linear, LogitsFunction], Tensor],
    *,
    only_softcap: bool = False,
) -> tuple[Tensor, Any]:
    """The result of ``compute(hidden, head, applied)``, called in the place of the output head in the engine's forward;
    and what that forward returned.

    Args:
        engine, inputs, shift_labels: as above.
        compute: of the hidden states `[B, L, E]`, the head, and what the model applies to the head's logits.
        only_softcap: whether `compute` knows no more than a softcap.

    Raises:
        ValueError: the inputs, the model or its head do not allow it; see :func:`tiled_sequence_parallel_loss`.
    """
    if "labels" in inputs or "shift_labels" in inputs:
        raise ValueError("inputs has labels: take them out; targets are the argument shift_labels, already shifted.")
    name = type(engine.module).__name__
    with _head_computes(engine.module, shift_labels, compute, only_softcap) as expected:
        output = engine(**inputs)
    logits = output.logits
    applied = logits.applied if isinstance(logits, RecordedLogits) else None
    if applied is None or applied.without_last_casts() != expected.without_last_casts():
        recorded = "unknown" if applied is None else str(applied)
        raise ValueError(
            f"{name} changes logits after its output head in a way that the forward of the head's module does not "
            f"show (done: {recorded}; shown: {expected}): a tiled loss would not be the "
            "model's. Use sequence_parallel_loss."
        )
    result: Tensor = logits.as_subclass(Tensor)
    return result, output


@contextmanager
def _head_computes(
    model: nn.Module,
    shift_labels: Tensor,
    compute: Callable[[Tensor, nn.Linear, LogitsFunction], Tensor],
    only_softcap: bool,
) -> Iterator[LogitsFunction]:
    """While it lasts, the output head of `model` returns what `compute` gives, as :class:`RecordedLogits`.

    Yields:
        What the model is expected to apply to the logits, which `compute` was told.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise ValueError(
            f"{type(model).__name__} has {type(head).__name__} as its output head: a tiled loss needs get_output_"
            "embeddings() to give a plain nn.Linear. Use sequence_parallel_loss."
        )
    expected = logits_function(model, head)
    if only_softcap:
        try:
            _ = expected.softcap
        except ValueError:
            raise ValueError(
                f'kernel = "liger": {type(model).__name__} does {expected} to its logits, and Liger knows a softcap '
                "alone. Leave kernel out."
            ) from None

    def forward(hidden: Tensor) -> RecordedLogits:
        if hidden.shape[:-1] != shift_labels.shape:
            raise ValueError(
                f"shift_labels {tuple(shift_labels.shape)} and hidden states {tuple(hidden.shape)}: each row of hidden "
                "states needs one label. Pass this rank's shard of both, and leave logits_to_keep out."
            )
        logits = head_logits(hidden, shift_labels.shape, head.out_features)
        return RecordedLogits.of(compute(hidden, head, expected), logits)

    replaced: Any = head
    replaced.forward = forward
    try:
        yield expected
    finally:
        del replaced.forward


def _group(engine: Any) -> Any:
    """The sequence-parallel group; None for one rank."""
    return engine.seq_parallel_group if engine.sequence_parallel_size > 1 else None
