"""What a layer keeps for backward, and in which precision it sums: the trade of memory against work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MEMORY = ("keep_heads", "keep", "recompute", "fused", "blocks")
"""From most memory and least work to least memory and most work; see :class:`Mode`."""
ACCUMULATE = ("auto", "float32")
PRODUCT_PIECES = 64
"""Pieces in which a product is added to a sum of a wider dtype: fewer where they would be small."""
_STAGES_OF_ROUNDED_Y = 4


@dataclass(frozen=True)
class Mode:
    """How a layer trades memory for work.

    Args:
        memory: ``"keep_heads"`` keeps q, k and v for backward as each stage received them, besides what ``"keep"``
            does, so that none is exchanged again, nor projected but for a head function's own gradient;
            ``"keep"`` keeps the attention output and lse (as FlashAttention does), and where the output projection is
            part of the call (``takes_output``) projects its gradient stage by stage, so that it never exists whole;
            ``"recompute"`` keeps neither and attends each stage again in backward, so that the output may be
            freed before; ``"fused"`` does so with the output projection inside the stage loop, so that neither
            the full output nor its gradient ever exists; ``"blocks"`` walks a stage's queries in blocks in
            backward, besides.
        query_blocks: blocks of a rank's rows in ``"blocks"``.
        accumulate: ``"auto"`` sums y and dx in the compute dtype, but y over more than 4 stages, and dK and dV over
            blocks, in float32, and in bfloat16 dK and dV over stages, and dx over blocks, in as much memory but finer
            (``sums.ScaledSum``); ``"float32"`` sums everything in float32. docs/precision.md argues it.
        overlap: send the next stage's (in ``"blocks"`` the next block's) heads while this one attends, for the
            memory of one more stage's exchange.
        operator: run as the registered operator ``torch.ops.upipe.attention``, which selective activation
            checkpointing can keep the result of; see ``upipe_integrations.engine.checkpoint``.
    """

    memory: str = "keep"
    query_blocks: int = 4
    accumulate: str = "auto"
    overlap: bool = False
    operator: bool = False

    @property
    def keeps_heads(self) -> bool:
        """Whether q, k and v are kept for backward as they were received."""
        return self.memory == "keep_heads"

    @property
    def keeps_output(self) -> bool:
        """Whether the attention output and lse are kept for backward."""
        return self.memory in ("keep_heads", "keep")

    @property
    def takes_output(self) -> bool:
        """Whether the output projection can be part of the call."""
        return self.keeps_output or self.fuses_output

    @property
    def fuses_output(self) -> bool:
        """Whether the output projection is in the stage loop."""
        return self.memory in ("fused", "blocks")

    @property
    def blocks(self) -> int:
        """Blocks of a rank's rows in backward; 1 is none."""
        return self.query_blocks if self.memory == "blocks" else 1

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that dx is summed in over stages."""
        return _promoted(dtype) if self.accumulate == "float32" else dtype

    def sums_y_exactly(self, stages: int) -> bool:
        """Whether y is summed over stages in float32."""
        return stages > 1 and (self.accumulate == "float32" or stages > _STAGES_OF_ROUNDED_Y)

    def y_sum_dtype(self, dtype: torch.dtype, stages: int) -> torch.dtype:
        """The dtype that y is summed in over stages: its memory is forward's, which is not the training peak."""
        return _promoted(dtype) if self.sums_y_exactly(stages) else dtype

    def kv_sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that dK and dV are summed in over stages and blocks; for bfloat16 see ``sums.ScaledSum``."""
        exact = self.accumulate == "float32" or self.blocks > 1
        return _promoted(dtype) if exact else dtype


def _promoted(dtype: torch.dtype) -> torch.dtype:
    import torch  # here, as the closed forms of memory and `upipe plan` need none

    return torch.promote_types(dtype, torch.float32)
