"""Peak memory of the contenders where no allocator counts it: traced on fake tensors, as ``upipe plan --trace`` does.

In bfloat16, and with what FlashAttention allocates inside its backward, whatever the timed run computes in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from upipe_integrations.bench.job import FORWARD, Job, StepPeak, Ulysses, UPipe
from upipe_integrations.bench.layers import Layer
from upipe_integrations.bench.ulysses import ulysses_heads
from upipe_integrations.planning.closed_forms import LayerShape, PeakUnits
from upipe_integrations.planning.measure import FlashWorkspace, fake_ranks, measured_peak, measured_upipe_peak


def traced_peaks(job: Job) -> Iterator[StepPeak]:
    """Peaks of Ulysses and UPipe at every length; needs a process without a process group."""
    with fake_ranks(job.ranks):
        for tokens in job.tokens:
            for contender in job.contenders:
                if isinstance(contender, UPipe):
                    mode = dataclasses.replace(contender.mode, operator=False)  # a trace sees into Python alone
                    schedule = contender.schedule(job.shape, job.ranks)
                    units = measured_upipe_peak(job.shape, schedule, mode, tokens)
                else:
                    assert isinstance(contender, Ulysses)
                    units = measured_ulysses_peak(job.shape, tokens)
                gib = units.gib(tokens, job.shape.head_dim)
                for step in job.steps:
                    peak = gib.forward if step == FORWARD else gib.training
                    yield StepPeak(contender, tokens, step, peak * 2**30)


def measured_ulysses_peak(shape: LayerShape, tokens: int) -> PeakUnits:
    """:func:`~upipe_integrations.measure.measured_peak` of plain Ulysses."""

    def attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layer = Layer(x, wq, wk, wv, wo, cos, sin, shape.head_dim)
        return ulysses_heads(layer, dist.group.WORLD, FlashWorkspace())

    return measured_peak(shape, tokens, attention)
