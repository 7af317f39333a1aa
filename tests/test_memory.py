"""Peak memory at paper scale, measured on fake tensors, against closed forms and against a usual Ulysses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.pairwise import pairwise
from tests.ranks import run_in_process, run_in_processes
from tests.ulysses import AllToAll, Attend
from upipe_integrations import (
    AttentionProjections,
    LowRank,
    Mode,
    OutputProjection,
    Projection,
    RotateHalf,
    Schedule,
    Staging,
    Weights,
    upipe_attention,
    upipe_attention_qkv,
)
from upipe_integrations.planning.closed_forms import LayerShape, PeakUnits, low_rank_terms, ulysses_peak, upipe_peak
from upipe_integrations.planning.measure import (
    FlashWorkspace,
    LiveMemory,
    fake_ranks,
    measured_peak,
    measured_upipe_peak,
)

RANKS = 8
TOKENS = 1 << 20
MODES = {
    "keep_heads": Mode.named("keep_heads"),
    "keep": Mode(),
    "keep_heads, outside": Mode.named("keep_heads"),  # the output projection is the caller's
    "keep, outside": Mode(),
    "recompute": Mode.named("recompute"),
    "fused": Mode.named("fused"),
    "keep, exact sums": Mode(accumulate="float32"),
    "fused, exact sums": Mode.named("fused", accumulate="float32"),
    "blocks": Mode.named("blocks", query_blocks=4),
    "keep_heads, overlap": Mode.named("keep_heads", overlap=True),
    "keep, overlap": Mode(overlap=True),
    "fused, overlap": Mode.named("fused", overlap=True),
    "blocks, overlap": Mode.named("blocks", overlap=True),
    "keep_heads, overlap both": Mode.named("keep_heads", overlap="both"),
    "keep, overlap both": Mode(overlap="both"),
    "fused, overlap both": Mode.named("fused", overlap="both"),
    "blocks, overlap both": Mode.named("blocks", overlap="both"),
}
LLAMA3_8B = LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
QWEN3_32B = LayerShape(heads=64, kv_heads=8, head_dim=128, hidden_size=5120)
MHA = LayerShape(heads=32, kv_heads=32, head_dim=128, hidden_size=4096)
QWEN25_7B = LayerShape(heads=28, kv_heads=4, head_dim=128, hidden_size=3584)
"""Which 8 ranks do not divide: uneven groups, KV heads on several ranks, a last stage that is filled up."""
LAYERS = {"8b": LLAMA3_8B, "32b": QWEN3_32B, "7b": QWEN25_7B, "mha": MHA}


class _OnePassRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, cos, sin):
        ctx.save_for_backward(cos, sin)
        return torch.empty_like(t)

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_like(grad), None, None


def _rotate_half(t):
    half = t.shape[-1] // 2
    return torch.cat((-t[..., half:], t[..., :half]), -1)


def _rotate_like_transformers(t, cos, sin):
    return t * cos[:, :, None] + _rotate_half(t) * sin[:, :, None]


def _rotate_in_two_steps(t, cos, sin):
    rotated = _rotate_half(t)  # the name keeps it alive through the sum: one tensor more
    return t * cos[:, :, None] + rotated * sin[:, :, None]


def _ulysses(x, wq, wk, wv, wo, cos, sin, D, rotary):
    b, L, _ = x.shape
    q, k, v = (F.linear(x, w).view(b, L, -1, D) for w in (wq, wk, wv))
    q, k = rotary(q, cos, sin), rotary(k, cos, sin)
    q, k, v = (AllToAll.apply(t, True) for t in (q, k, v))
    out = Attend.apply(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), FlashWorkspace()).transpose(1, 2)
    del q, k, v
    return AllToAll.apply(out, False).reshape(b, L, -1)


def _upipe_cases() -> list[tuple[str, int, str]]:
    """(layer, chunk_heads, mode): every two of them meet; and what is compared with numbers, at 8 heads per stage."""
    pairs = pairwise({"layer": ("8b", "32b"), "chunk_heads": (16, 24, "all"), "mode": tuple(MODES)})
    heads = [LAYERS[c["layer"]].heads if c["chunk_heads"] == "all" else c["chunk_heads"] for c in pairs]
    # 32b has eight such stages, whose sums in float32 and blocks take longest to trace.
    small = [("8b", 8, mode) for mode in MODES]
    small += [("32b", 8, mode) for mode in MODES if "overlap" not in mode and "exact sums" not in mode]
    return [*small, *((case["layer"], U, case["mode"]) for case, U in zip(pairs, heads, strict=True))]


UPIPE_CASES = _upipe_cases()
KERNEL_CASES = [
    (name, mode, kernel)
    for name, mode, kernels in (
        ("8b", "keep", ("torch-cuda-flash", "torch-cudnn", "flash-attn-3", "flash-attn-4")),
        ("8b", "keep_heads, overlap", ("torch-cuda-flash", "flash-attn-3")),
        ("8b", "fused", ("torch-cuda-flash", "flash-attn-3")),
        ("mha", "keep", ("torch-cuda-flash", "flash-attn-3")),
        ("8b", "blocks", ("flash-attn-3",)),
    )
    for kernel in kernels
]
"""The kernels beside FlashAttention 2."""


def _measured_given(layer: LayerShape, chunk_heads: int) -> PeakUnits:
    """Peaks of the form for given heads, beyond q, k, v: its output and their gradients count."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    unit = TOKENS * layer.head_dim * 2
    schedule = Schedule.build(heads=layer.heads, kv_heads=layer.kv_heads, ranks=RANKS, chunk_heads=chunk_heads)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as live:
        q, k, v = (
            torch.empty(1, TOKENS // RANKS, n, layer.head_dim, dtype=torch.bfloat16).requires_grad_()
            for n in (layer.heads, layer.kv_heads, layer.kv_heads)
        )
        before = live.current
        live.reset_peak()
        out = upipe_attention_qkv(q, k, v, Staging(schedule, dist.group.WORLD, FlashWorkspace()))
        forward = live.peak - before
        live.reset_peak()
        out.backward(torch.empty_like(out))
        return PeakUnits(forward / unit, (live.peak - before) / unit)


def _given_form(layer: LayerShape, chunk_heads: int) -> PeakUnits:
    """O(U) beyond output, incoming gradient and the gradients of q, k, v."""
    h, k, n = layer.heads / RANKS, layer.kv_heads / RANKS, chunk_heads / RANKS
    stage = 4 * n + 4 + 2 + 2 * n + (2 * n if n > 1 else 0)
    return PeakUnits(h + 2 * n + 2 + h / 64, 2 * h + (h + 2 * k) + stage)


_TRACERS = 2


def _peaks(tracer: int) -> dict[str, tuple[PeakUnits, PeakUnits]]:
    """(measured, closed form) of every method for both models, of one of the processes that share them."""
    with fake_ranks(RANKS):
        return {name: peaks() for name, peaks in itertools.islice(_cases(), tracer, None, _TRACERS)}


def _upipe_peaks(layer: LayerShape, schedule: Schedule, mode_name: str) -> tuple[PeakUnits, PeakUnits]:
    mode, given = MODES[mode_name], "outside" not in mode_name
    return (
        measured_upipe_peak(layer, schedule, mode, TOKENS, with_output=given),
        upipe_peak(layer, schedule, mode, with_output=given),
    )


def _ulysses_peaks(
    layer: LayerShape, rotate: Callable[..., torch.Tensor], one_pass: bool = False
) -> tuple[PeakUnits, PeakUnits]:
    measured = measured_peak(layer, TOKENS, lambda *t: _ulysses(*t, layer.head_dim, rotate))
    return measured, ulysses_peak(layer, RANKS, one_pass_rotary=one_pass)


def _kernel_peaks(layer: LayerShape, schedule: Schedule, mode_name: str, kernel: str) -> tuple[PeakUnits, PeakUnits]:
    mode = MODES[mode_name]
    return measured_upipe_peak(layer, schedule, mode, TOKENS, kernel=kernel), upipe_peak(
        layer, schedule, mode, kernel=kernel
    )


def _given_peaks(layer: LayerShape, chunk_heads: int) -> tuple[PeakUnits, PeakUnits]:
    return _measured_given(layer, chunk_heads), _given_form(layer, chunk_heads)


def _cases() -> Iterator[tuple[str, Callable[[], tuple[PeakUnits, PeakUnits]]]]:
    for name, layer in {"8b": LLAMA3_8B, "32b": QWEN3_32B}.items():
        yield f"{name} ulysses", partial(_ulysses_peaks, layer, _rotate_like_transformers)
        yield f"{name} ulysses two-step", partial(_ulysses_peaks, layer, _rotate_in_two_steps)
        yield f"{name} ulysses one-pass", partial(_ulysses_peaks, layer, _OnePassRotary.apply, one_pass=True)
        for U in (8, 16):
            yield f"{name} given {U}", partial(_given_peaks, layer, U)
    for name, mode_name, kernel in KERNEL_CASES:
        layer = LAYERS[name]
        for U in (8, layer.heads):
            schedule = Schedule.build(heads=layer.heads, kv_heads=layer.kv_heads, ranks=RANKS, chunk_heads=U)
            yield f"{name} {kernel} {U} {mode_name}", partial(_kernel_peaks, layer, schedule, mode_name, kernel)
    for name, U, mode_name in UPIPE_CASES:
        layer = LAYERS[name]
        schedule = Schedule.build(heads=layer.heads, kv_heads=layer.kv_heads, ranks=RANKS, chunk_heads=U)
        yield f"{name} upipe {U} {mode_name}", partial(_upipe_peaks, layer, schedule, mode_name)
    for U, (mode_name, mode) in itertools.product((16, 24), MODES.items()):
        if (mode.keeps_heads or mode.query_blocks > 1) and not (U == 24 and mode.overlap):
            schedule = Schedule.build(heads=28, kv_heads=4, ranks=RANKS, chunk_heads=U)
            yield f"7b upipe {U} {mode_name}", partial(_upipe_peaks, QWEN25_7B, schedule, mode_name)


@pytest.fixture(scope="module")
def peaks():
    first, second = run_in_processes(_TRACERS, _peaks, seconds=600)
    return first | second


@pytest.mark.parametrize(
    ("name", "forward", "training"),
    [
        ("8b upipe 8 keep_heads", 14.2, 26.5),
        ("32b upipe 8 keep_heads", 23.3, 37.0),
        ("8b upipe 8 keep_heads, outside", 12.2, 30.5),
        ("32b upipe 8 keep_heads, outside", 20.3, 45.0),
        ("8b upipe 8 keep", 8.2, 24.5),
        ("8b upipe 8 keep, outside", 8.2, 28.5),
        ("8b upipe 8 recompute", 8.2, 24.6),
        ("8b upipe 8 fused", 8.2, 20.6),
        ("32b upipe 8 keep", 13.3, 31.0),
        ("32b upipe 8 keep, outside", 12.3, 39.0),
        ("32b upipe 8 recompute", 12.3, 31.0),
        ("32b upipe 8 fused", 15.2, 23.0),  # y over 8 stages is summed in float32
        ("8b upipe 8 blocks", 8.2, 15.6),
        ("32b upipe 8 blocks", 15.2, 18.0),
        ("7b upipe 16 blocks", 15.6, 24.5),
        # dout and out travel in buffers of their own, so that the kernel copies nothing: 26.4 and 52.4 without.
        ("8b torch-cuda-flash 8 keep", 8.2, 24.5),
        ("8b torch-cuda-flash 32 keep", 16.2, 44.6),
    ],
)
def test_peak_is_at_most(peaks, name, forward, training):
    measured, _ = peaks[name]
    assert measured.forward <= forward
    assert measured.training <= training


@pytest.mark.parametrize(
    ("name", "forward", "training"),
    [
        ("8b ulysses", 18.0, 40.3),
        ("8b ulysses two-step", 22.0, 40.3),
        ("8b ulysses one-pass", 14.0, 40.3),
        ("32b ulysses", 34.0, 73.6),
        ("32b ulysses two-step", 42.0, 73.6),
        ("32b ulysses one-pass", 26.0, 73.6),
    ],
)
def test_usual_ulysses_measures_what_the_comparison_says(peaks, name, forward, training):
    measured, _ = peaks[name]
    assert measured.forward == pytest.approx(forward, abs=0.1)
    assert measured.training == pytest.approx(training, abs=0.4)


def test_every_peak_is_its_closed_form(peaks):
    checked = {name: pair for name, pair in peaks.items() if "two-step" not in name}
    assert len(UPIPE_CASES) == len(set(UPIPE_CASES)) >= (1 + 3) * len(MODES) + 7
    assert len(checked) == 2 * (2 + 2) + len(UPIPE_CASES) + 7 + 3 + 2 * len(KERNEL_CASES)
    for name, (measured, form) in checked.items():
        layer = LAYERS[name.split()[0]]
        # Not in the forms: weight gradients (q, k, v, o), and FlashAttention's row sums, 1/32 of a head.
        weights = 2 * (layer.heads + layer.kv_heads) * layer.hidden_size / TOKENS
        if "blocks" in name:  # and a stage's rows of two of them in float32
            weights += 4 * int(name.split()[2]) * layer.hidden_size / TOKENS
        assert form.forward - 0.05 <= measured.forward <= form.forward + 0.15, name
        assert form.training - 0.05 <= measured.training <= form.training + weights + 0.3, name


def _peak_with_low_rank(rank: int) -> float:
    """The training peak, fused, with a term of `rank` on q, k and v each, given by the caller."""
    schedule = Schedule.build(heads=32, kv_heads=8, ranks=RANKS, chunk_heads=8)
    mode = MODES["fused"]

    def attention(x, wq, wk, wv, wo, cos, sin):
        def projection(weight, rotary):
            low = LowRank(
                *(torch.empty(*size, rank, dtype=x.dtype).requires_grad_() for size in (x.shape[:2], weight.shape[:1]))
            )
            return Projection(Weights(weight, low_rank=low if rank else None), 128, rotary=rotary)

        rotary = RotateHalf(cos, sin)
        projections = AttentionProjections(projection(wq, rotary), projection(wk, rotary), projection(wv, None))
        group, kernel = dist.group.WORLD, FlashWorkspace()
        return upipe_attention(x, projections, Staging(schedule, group, kernel, mode=mode), output=OutputProjection(wo))

    return measured_peak(LLAMA3_8B, TOKENS, attention, projects=True).training


def _low_rank_difference() -> float:
    """What terms of rank 256 add."""
    with fake_ranks(RANKS):
        return _peak_with_low_rank(256) - _peak_with_low_rank(0)


def test_low_rank_terms_take_their_input_and_its_gradient():
    form = low_rank_terms(LLAMA3_8B, RANKS, 3 * 256)
    assert form == 2.25
    # Not in the form: the gradient of B, 6144 by 256.
    assert form - 0.01 <= run_in_process(_low_rank_difference) <= form + 0.04


def test_units_convert_to_gib():
    assert PeakUnits(8, 28).gib(1 << 20, 128) == PeakUnits(2.0, 7.0)
    assert PeakUnits(8, 28).gib(1 << 20, 128, batch=2, itemsize=4).forward == 8.0
