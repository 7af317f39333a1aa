"""What DeepSpeed makes of the ranks' gradients, which depends on its settings, and what makes up for it.

Right is the sum over the ranks of a sequence, and the mean over its replicas. With C sequence-parallel ranks among W
that DeepSpeed reduces over, D = W / C replicas, and p = ``gradient_predivide_factor``, read in
deepspeed/runtime/engine.py (``allreduce_bucket``), zero/stage_1_and_2.py (``gradient_reduction_w_predivide``,
``allreduce_bucket``) and zero/stage3.py (``__avg_scatter_grads``, ``__avg_scatter_contiguous_grads``):

    stage 0, and BF16_Optimizer                          the sum / D
    stages 1, 2    not reduce_scatter, contiguous        the sum / D; / W where p is W and not 1
                   else                                  the sum / D
    stage 3        reduce_scatter                        the sum / W
                   else, in the contiguous buffer        the sum / D; / (D * p) where p is W and not 1
                   else, not in it                       the sum / W; / (W * p) where p is W and not 1

p counts without ``prescale_gradients`` only.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gradient_factor(engine: Any) -> int:
    """What this rank's share of the loss is multiplied by so that reduced gradients are those of one process.

    Raises:
        ValueError: DeepSpeed reduces some gradients in another way than others, so that no factor is right.
    """
    optimizer: Any = getattr(engine, "optimizer", None)
    stage = engine.zero_optimization_stage()
    C = int(engine.sequence_parallel_size)
    if C == 1:
        return 1
    if not hasattr(optimizer, "reduce_scatter"):
        _check_sparse(engine)
        return 1
    W = dist.get_world_size(optimizer.dp_process_group)
    p = optimizer.gradient_predivide_factor if optimizer.postscale_gradients else 1.0
    divided_again = p != 1.0 and p == W
    if stage < 3:
        return C if divided_again and optimizer.contiguous_gradients and not optimizer.reduce_scatter else 1
    if optimizer.reduce_scatter:
        return C
    averaged, summed = (C * W, W) if divided_again else (C, 1)
    if not optimizer.contiguous_gradients:
        return averaged
    _check_bucket(engine, optimizer.reduce_bucket_size)
    return summed


def _check_bucket(engine: Any, bucket: int) -> None:
    """Raise ValueError where the contiguous buffer of ZeRO-3 does not hold the gradient of every parameter."""
    largest = max((getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters() if p.requires_grad), default=0)
    if largest > bucket:
        raise ValueError(
            f"zero_optimization.reduce_bucket_size = {bucket} with reduce_scatter = false at ZeRO-3: a parameter has "
            f"{largest} elements, and DeepSpeed averages the gradients of such parameters over sequence-parallel ranks "
            f"where it sums all others, so that no loss is right. Set reduce_bucket_size to {largest} or more, "
            "reduce_scatter to true, or contiguous_gradients to false."
        )


def _check_sparse(engine: Any) -> None:
    """Raise ValueError where sparse gradients are not divided as all others are."""
    sparse = getattr(engine, "sparse_gradients_enabled", None)
    if sparse is None or not sparse() or not engine.postscale_gradients() or engine.gradient_predivide_factor() == 1.0:
        return
    raise ValueError(
        f"gradient_predivide_factor = {engine.gradient_predivide_factor()} with sparse_gradients: DeepSpeed multiplies "
        "sparse gradients by it and divides by nothing, so that no loss is right. Leave gradient_predivide_factor out."
    )
