"""One call of the engine as data: what is constant for a layer, and what a forward is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.all_to_all import Group
from upipe_integrations.kernels import AttentionSpec, Kernel
from upipe_integrations.layout import Layout
from upipe_integrations.mode import Mode
from upipe_integrations.projections.output import OutputProjection
from upipe_integrations.projections.source import HeadSource
from upipe_integrations.projections.structure import HoldsTensors
from upipe_integrations.schedule import Schedule


@dataclass(frozen=True, init=False)
class Staging:
    """How a layer's attention is run in stages: all that is the same in every forward.

    Args:
        schedule: from ``UPipeConfig.schedule`` or ``Schedule.build``, for the ranks of `group`.
        group: sequence-parallel group, or None for a group of one.
        kernel: local attention, from ``select_kernel``.
        layout: which rows a rank holds; None is contiguous, rank r holding rows ``[r * L, (r + 1) * L)``.
        mode: what is kept for backward; None keeps the attention output.
        x_group: ranks among which a rank's L rows of x are split once more (Megatron's sequence parallelism over its
            tensor-parallel group): x is then `[B, L / T, E]`, gathered forward and again backward so that only the
            shard is kept, and its gradient is summed over them; None is none. The result has all L rows.
    """

    schedule: Schedule
    group: Group
    kernel: Kernel
    layout: Layout
    mode: Mode
    x_group: Group

    def __init__(
        self,
        schedule: Schedule,
        group: Group,
        kernel: Kernel,
        layout: Layout | None = None,
        mode: Mode | None = None,
        x_group: Group = None,
    ) -> None:
        # Not by default_factory or default objects, which torch.compile does not trace.
        set_field = object.__setattr__
        set_field(self, "schedule", schedule)
        set_field(self, "group", group)
        set_field(self, "kernel", kernel)
        set_field(self, "layout", Layout() if layout is None else layout)
        set_field(self, "mode", Mode() if mode is None else mode)
        set_field(self, "x_group", x_group)


@dataclass(frozen=True)
class Call(HoldsTensors):
    """Everything of one call.

    Args:
        q, k, v: where query, key and value heads come from.
        output: the output projection, in the stage loop or after it as the mode says; None leaves it to the caller.
        sinks: `[H]` or None.
        spec: what is computed.
        staging: how it is run.
        dtype: what it is computed in.
    """

    holds = ("q", "k", "v", "output", "sinks")

    q: HeadSource
    k: HeadSource
    v: HeadSource
    output: OutputProjection | None
    sinks: Tensor | None
    spec: AttentionSpec
    staging: Staging
    dtype: torch.dtype

    @property
    def output_in_loop(self) -> OutputProjection | None:
        """The output projection where each stage's attended heads are added through it."""
        return self.output if self.staging.mode.output_in_loop else None

    @property
    def output_after(self) -> OutputProjection | None:
        """The output projection where it takes all attended heads at once, after the stage loop."""
        return None if self.staging.mode.output_in_loop else self.output
