"""What a layer keeps for backward, and in which precision it sums: the trade of memory against work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MEMORY = ("keep_heads", "keep", "recompute", "fused", "blocks")
"""Names of the memory modes, from most memory and least work to least memory and most work; see :meth:`Mode.named`."""
KEEPS = ("heads", "output", "nothing")
"""What a layer may keep for backward besides its input; ``"heads"`` is with the output."""
ACCUMULATE = ("auto", "float32")
BOTH_WAYS = "both"
OVERLAP = (False, True, BOTH_WAYS)

PRODUCT_PIECES = 64
"""Pieces in which a product is added to a sum of a wider dtype: fewer where they would be small."""
_STAGES_OF_ROUNDED_Y = 4


@dataclass(frozen=True)
class Mode:
    """How a layer trades memory for work.

    Args:
        keeps: what is kept for backward besides the layer's input: ``"heads"`` (q, k and v as every stage received
            them, and the attention output and lse), ``"output"`` (the attention output and lse, as FlashAttention
            does) or ``"nothing"`` (each stage is attended again in backward).
        output_in_loop: whether the output projection is run in the stage loop, so that neither the whole attention
            output nor its gradient ever exists; else it is run once, after the loop.
        query_blocks: blocks of a rank's rows that backward walks a stage's queries in; 1 is all rows at once.
        accumulate: ``"auto"`` sums y and dx in the compute dtype, but y over more than 4 stages, and dK and dV over
            blocks, in float32, and in bfloat16 dK and dV over stages, and dx over blocks, in as much memory but finer
            (``sums.ScaledSum``); ``"float32"`` sums everything in float32. docs/precision.md argues it.
        overlap: send the next stage's (over blocks, the next block's) heads while this one attends, for the
            memory of one more stage's exchange; ``"both"`` also sends back what a stage attended, and its gradients,
            while the next one attends, for the memory of their exchange, too.
        operator: run as the registered operator ``torch.ops.upipe.attention``, which selective activation
            checkpointing can keep the result of; see ``upipe_integrations.engine.checkpoint``.

    Raises:
        ValueError: a combination that the engine does not run: see :meth:`named` for those that it does.
    """

    keeps: str = "output"
    output_in_loop: bool = False
    query_blocks: int = 1
    accumulate: str = "auto"
    overlap: bool | str = False
    operator: bool = False

    def __post_init__(self) -> None:
        if self.keeps not in KEEPS:
            raise ValueError(f"keeps = {self.keeps!r}: must be one of {', '.join(KEEPS)}.")
        if self.output_in_loop and self.keeps != "nothing":
            raise ValueError(
                f"output_in_loop with keeps = {self.keeps!r}: the output projection in the stage loop leaves no whole "
                "attention output to keep. Set keeps to 'nothing'."
            )
        if self.overlap not in OVERLAP:
            raise ValueError(f"overlap = {self.overlap!r}: must be False, True or {BOTH_WAYS!r}.")
        if self.query_blocks < 1 or (self.query_blocks > 1 and not self.output_in_loop):
            raise ValueError(
                f"query_blocks = {self.query_blocks}: must be positive, and more than 1 only with output_in_loop."
            )

    @classmethod
    def named(
        cls,
        memory: str,
        query_blocks: int = 4,
        accumulate: str = "auto",
        overlap: bool | str = False,
        operator: bool = False,
    ) -> Mode:
        """The mode of a memory mode's name.

        Args:
            memory: ``"keep_heads"`` keeps q, k and v for backward as each stage received them, besides what ``"keep"``
                does, so that none is exchanged again, nor projected but for a head function's own gradient;
                ``"keep"`` keeps the attention output and lse (as FlashAttention does), and where the output projection
                is part of the call projects its gradient stage by stage, so that it never exists whole;
                ``"recompute"`` keeps neither and attends each stage again in backward, so that the output may be
                freed before; ``"fused"`` does so with the output projection inside the stage loop, so that neither
                the full output nor its gradient ever exists; ``"blocks"`` walks a stage's queries in blocks in
                backward, besides.
            query_blocks: blocks of a rank's rows in ``"blocks"``; other modes have one.
            accumulate, overlap, operator: as in the class.

        Raises:
            ValueError: no such name.
        """
        keeps = {"keep_heads": "heads", "keep": "output", "recompute": "nothing", "fused": "nothing"}
        if memory == "blocks":
            return cls("nothing", True, query_blocks, accumulate, overlap, operator)
        if memory not in keeps:
            raise ValueError(f"memory = {memory!r}: no such memory mode. Known: {', '.join(MEMORY)}.")
        return cls(keeps[memory], memory == "fused", 1, accumulate, overlap, operator)

    @property
    def memory(self) -> str:
        """The memory mode's name."""
        if not self.output_in_loop:
            return {"heads": "keep_heads", "output": "keep", "nothing": "recompute"}[self.keeps]
        return "fused" if self.query_blocks == 1 else "blocks"

    @property
    def overlaps_sending(self) -> bool:
        """Whether the next stage's heads travel while this one attends."""
        return bool(self.overlap)

    @property
    def overlaps_return(self) -> bool:
        """Whether what a stage gives back travels while the next one attends."""
        return self.overlap == BOTH_WAYS

    @property
    def keeps_heads(self) -> bool:
        """Whether q, k and v are kept for backward as they were received."""
        return self.keeps == "heads"

    @property
    def keeps_output(self) -> bool:
        """Whether the attention output and lse are kept for backward."""
        return self.keeps != "nothing"

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
        exact = self.accumulate == "float32" or self.query_blocks > 1
        return _promoted(dtype) if exact else dtype


def _promoted(dtype: torch.dtype) -> torch.dtype:
    import torch  # here, as the closed forms of memory and `upipe plan` need none

    return torch.promote_types(dtype, torch.float32)
