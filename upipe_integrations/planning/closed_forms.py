"""Peak memory of one attention layer in closed forms: arithmetic alone, so no torch. ``measure`` checks them.

Unit: one `[B, S, D]` tensor of the compute dtype, u = B * S * D * itemsize bytes (256 MiB at one million
tokens, batch 1, D = 128, bf16). Counted: everything an attention layer allocates on one rank between its
input and its output, the incoming gradient, weight gradients and the buffers that the kernel allocates
inside its backward (:data:`BUFFERS`). Not counted: the layer's input, weights, rotary tables.

In the formulas h = H/C and k = K/C are query and KV heads per rank, chi = E/(C*D) is an `[L, E]` tensor in
units, kappa KV heads and n query heads per KV head are one rank's in one stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from upipe_integrations.mode import PRODUCT_PIECES, Mode
from upipe_integrations.schedule import Schedule, Stage

_LSE_BYTES = 4


@dataclass(frozen=True)
class Buffers:
    """What a kernel allocates inside its backward besides the results, in heads `[B, S, D]` of the compute dtype.

    Args:
        per_query_head: a sum of dq in float32.
        shared_per_query_head: of a KV head that several query heads share, for each of them: dk and dv before they are
            added up.
        shared_per_kv_head: of a KV head that several query heads share: sums of dk and dv in float32.
    """

    per_query_head: float = 2
    shared_per_query_head: float = 0
    shared_per_kv_head: float = 0

    def grouped(self, query_heads: float, kv_heads: float) -> float:
        """What there is because query heads share KV heads."""
        if query_heads == kv_heads:
            return 0
        return self.shared_per_query_head * query_heads + self.shared_per_kv_head * kv_heads


_EXPANDED, _IN_FLOAT32 = Buffers(shared_per_query_head=2), Buffers(shared_per_kv_head=4)

BUFFERS = {
    "flash-attn-2": _EXPANDED,  # mha_bwd, csrc/flash_attn/flash_api.cpp
    "flash-attn-3": _IN_FLOAT32,  # mha_bwd, hopper/flash_api.cpp
    "flash-attn-4": _IN_FLOAT32,  # _flash_attn_bwd, flash_attn/cute/interface.py
    # The same source as flash-attn-2; a batch of one sequence, as it copies dout and out of larger ones.
    "torch-cuda-flash": _EXPANDED,
    # Of cudnn-frontend's composite graph: the sum of dq, and dk and dv of every query head.
    "torch-cudnn": _EXPANDED,
    # K and V are repeated for it, and so are dk and dv.
    "torch-efficient": Buffers(shared_per_query_head=4),
}
"""By kernel, read in their sources; ``benchmarks/proof.py`` measures them on a GPU."""

USUAL_KERNEL = "flash-attn-2"


@dataclass(frozen=True)
class LayerShape:
    """What an attention layer's memory depends on, over all ranks."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int


@dataclass(frozen=True)
class PeakUnits:
    """Peaks in units u (see the module docstring)."""

    forward: float
    training: float

    def gib(self, tokens: int, head_dim: int, *, batch: int = 1, itemsize: int = 2) -> PeakUnits:
        """The same peaks in GiB for sequences of `tokens` tokens over all ranks."""
        unit = batch * tokens * head_dim * itemsize / 2**30
        return PeakUnits(self.forward * unit, self.training * unit)


def ulysses_peak(
    layer: LayerShape, ranks: int, *, one_pass_rotary: bool = False, kernel: str = USUAL_KERNEL
) -> PeakUnits:
    """Closed form for plain Ulysses in DeepSpeed's order of operations.

    `one_pass_rotary`: rotary by one fused kernel rather than by Transformers' own function. `kernel`: see
    :func:`upipe_peak`.
    """
    h, k, chi = _per_rank(layer, ranks)
    buffers = BUFFERS.get(kernel, BUFFERS[USUAL_KERNEL])
    forward = (3 if one_pass_rotary else 4) * h + 2 * k
    training = chi + (4 + buffers.per_query_head) * h + 4 * k + buffers.grouped(h, k)
    return PeakUnits(forward, training)


def ring_peak(layer: LayerShape, ranks: int) -> PeakUnits:
    """Closed form for ring attention over rows, causal and balanced (zigzag), as ``ring-flash-attention`` writes it.

    Every rank keeps all heads of its rows and KV travels. Forward: q, K, V, the K and V that arrive, the output in
    float32 and a block's. Backward, for chi of the incoming gradient and q, out, dout (3h), K, V and those that arrive
    (4k): the results of a block (h + 2k), sums in float32 of dq (2h) and of dK, dV, which travel too (8k), and
    FlashAttention's float32 dq (h) and expanded dK, dV under GQA (h), for half of the rows.
    """
    h, chi = layer.heads / ranks, layer.hidden_size / (ranks * layer.head_dim)
    k = layer.kv_heads / ranks
    training = chi + 3 * h + 4 * k + (h + 2 * k) + 2 * h + 8 * k + h + (h if h != k else 0)
    return PeakUnits(h + 4 * k + 2 * h + h, training)


def upipe_peak(
    layer: LayerShape,
    schedule: Schedule,
    mode: Mode | None = None,
    *,
    with_output: bool = True,
    kernel: str = USUAL_KERNEL,
) -> PeakUnits:
    """Closed form for the engine with `schedule` in `mode` (None keeps out and lse), rotary in one pass.

    `with_output`: whether the call has the output projection, in modes that may have it or not. `kernel`: whose
    buffers are counted, of :data:`BUFFERS`; for one that is not there (a CPU's) FlashAttention 2's.
    """
    mode = mode or Mode()
    buffers = BUFFERS.get(kernel, BUFFERS[USUAL_KERNEL])
    h, _, chi = _per_rank(layer, schedule.ranks)
    lse = h * _LSE_BYTES / (2 * layer.head_dim)
    stages = [
        _StageSizes.of(stage, after if mode.overlap else None)
        for stage, after in zip_longest(schedule.stages, schedule.stages[1:])
    ]
    after = mode.keeps_output and with_output
    forward = _forward_peak(stages, mode, h, chi, lse, after)
    return PeakUnits(forward, _training_peak(stages, mode, h, chi, schedule.ranks, after, buffers))


def weight_gradients(layer: LayerShape, tokens: int, schedule: Schedule, mode: Mode) -> float:
    """Gradients of the layer's four weights in units, which :func:`upipe_peak` leaves out: length adds nothing.

    In ``"blocks"`` a stage's rows of two of them are in float32 besides.
    """
    rows = 2 * (layer.heads + layer.kv_heads) + (4 * schedule.chunk_heads if mode.query_blocks > 1 else 0)
    return rows * layer.hidden_size / tokens


def received_heads(schedule: Schedule) -> int:
    """What ``"keep_heads"`` keeps more than ``"keep"``, in units: q, k and v of all stages as a rank receives them."""
    return sum(_StageSizes.of(stage, None).received for stage in schedule.stages)


def low_rank_terms(layer: LayerShape, ranks: int, rank: int) -> float:
    """What low-rank terms of altogether `rank` columns add to a training peak: their input, its gradient in float32."""
    return 3 * rank / (ranks * layer.head_dim)


@dataclass(frozen=True)
class _StageSizes:
    """One rank's heads in a stage, and those of the next stage that are in flight meanwhile (0 without overlap).

    ``paired``: on some rank the groups are uneven, so that the kernel is given a KV head per query head.
    """

    q: int
    kappa: int
    opens_kv: bool
    closes_kv: bool
    paired: bool
    next_q: int
    next_kappa: int

    @classmethod
    def of(cls, stage: Stage, after: Stage | None) -> _StageSizes:
        next_q, next_kappa = (0, 0) if after is None else (after.q.per_rank, after.kv.per_rank * after.opens_kv)
        q, kappa = stage.q.per_rank, stage.kv.per_rank
        paired = not all(stage.grouped_evenly(rank) for rank in range(len(stage.q.by_rank)))
        return cls(q, kappa, stage.opens_kv, stage.closes_kv, paired, next_q, next_kappa)

    @property
    def received(self) -> int:
        """What the stage is sent to attend: its q, and the K and V that it opens."""
        return self.q + 2 * self.kappa * self.opens_kv

    def on_the_way_back(self, mode: Mode) -> int:
        """Sent and received of what the stage gives back in backward, with dK and dV where it closes them."""
        return 2 * self.q * (1 + mode.output_in_loop) + 4 * self.kappa * self.closes_kv

    def in_flight(self, parts: int, *, kv: bool = True) -> int:
        """Sent and received for the next stage: `parts` tensors of query heads, and K and V."""
        return 2 * parts * self.next_q + 4 * self.next_kappa * kv


def _forward_peak(stages: list[_StageSizes], mode: Mode, h: float, chi: float, lse: float, after: bool) -> float:
    """`after`: whether the output projection is run after the stage loop."""
    wide = 2 if mode.sums_y_exactly(len(stages)) else 1
    result = chi * wide if mode.output_in_loop else h
    first_added = 2 if mode.overlaps_return else 1
    peak = 0.0
    if mode.output_in_loop and wide == 2:  # y is rounded into a tensor of its own at the end
        peak = result + chi
    if mode.overlap:  # K, V and q of the first stage are all sent before the first is waited for
        peak = max(peak, 2 * stages[0].q + 4 * stages[0].kappa)
    kept = 0
    for number, s in enumerate(stages):
        kept += s.received * mode.keeps_heads
        so_far = 0 if number < first_added else result
        left = kept or (0 if s.closes_kv else 2 * s.kappa)  # of q, K and V, after they were attended
        before = stages[number - 1] if mode.overlaps_return and number > 0 else None
        on_the_way_back = 0 if before is None else 2 * before.q
        attending = so_far + (kept or s.q + 2 * s.kappa) + s.q + (2 * s.q if s.paired else 0) + on_the_way_back
        sending_back = so_far + left + 2 * s.q
        writing = result + left + s.q + (0 if before is None else s.q)
        if mode.output_in_loop:
            writing += s.q + (2 * chi / PRODUCT_PIECES if wide == 2 else 0)
        if number == 0 and mode.overlaps_return:  # written while the next stage's is there
            writing = 0
        peak = max(peak, max(attending, sending_back, writing) + s.in_flight(1) + lse)
    return max(peak, result + kept + chi + lse) if after else peak


def _training_peak(
    stages: list[_StageSizes], mode: Mode, h: float, chi: float, ranks: int, after: bool, buffers: Buffers
) -> float:
    """`after` as in :func:`_forward_peak`: the gradient of what was attended is then never whole."""
    wide = 2 if mode.accumulate == "float32" else 1
    # Beside a stage: the incoming gradients, what was kept, and dx so far.
    incoming = chi + h * mode.keeps_output + h * (not (mode.output_in_loop or after))
    kept = sum(s.received for s in stages) * mode.keeps_heads
    peak = 0.0
    for number, s in enumerate(stages):
        before = stages[number - 1] if mode.overlaps_return and number > 0 else None
        on_the_way_back = 0 if before is None else before.on_the_way_back(mode)
        grouped, per_query = buffers.grouped(s.q, s.kappa), 4 + buffers.per_query_head
        if mode.query_blocks > 1:
            # A block of q and dout is sent and received; then a piece of it is attended, tile by tile.
            exchanging = 4 * s.q / mode.query_blocks
            piece = s.q / (mode.query_blocks * ranks)
            attending = 2 * s.q / mode.query_blocks + per_query * piece + (2 * s.kappa + grouped) / ranks
            if s.paired:  # K and V up to the piece; then a tile's with their gradients, one of which in float32
                attending = 2 * s.q / mode.query_blocks + max(2 * s.q + piece, 6 * s.q / ranks + per_query * piece)
            # In flight: the stage's next block, or the next stage's first with its K and V.
            next_stage = 4 * s.next_q / mode.query_blocks + 4 * s.next_kappa
            in_flight = max(exchanging, next_stage) if mode.overlap else 0
            stage = chi * wide + 6 * s.kappa + max(exchanging, attending) + in_flight
            if mode.overlaps_return:  # the block before
                stage += exchanging + (0 if before is None else 4 * before.kappa * before.closes_kv)
        else:
            sums = (0 if number < (2 if mode.overlaps_return else 1) else chi * wide) + (
                0 if s.opens_kv else 2 * s.kappa * wide
            )
            attending = per_query * s.q + (2 * s.kappa + 4 * s.q if s.paired else 4 * s.kappa + grouped)
            kept -= s.received * mode.keeps_heads  # which `attending` counts; the rest is of later stages
            parts = 1 + mode.keeps_output + (not mode.keeps_heads)
            stage = kept + sums + attending + s.in_flight(parts, kv=not mode.keeps_heads) + on_the_way_back
        peak = max(peak, incoming + stage)
    return peak


def _per_rank(layer: LayerShape, ranks: int) -> tuple[float, float, float]:
    """(h, k, chi); KV heads fewer than ranks are replicated to one per rank."""
    return (
        layer.heads / ranks,
        max(layer.kv_heads / ranks, 1.0),
        layer.hidden_size / (ranks * layer.head_dim),
    )
