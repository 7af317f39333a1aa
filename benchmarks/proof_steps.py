"""The steps of ``proof.py`` on one GPU: each a function that yields rows, a finding each, as it has them.

A step is small where there is no GPU (``--dry-run``), and otherwise the same code. ``proof.py`` runs each in a process
of its own, as a kernel that fails leaves nothing that could go on.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import importlib.util
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from upipe_integrations import AttentionSpec, Mode, Schedule
from upipe_integrations.bench.layers import Layer, random_layer, upipe_layer
from upipe_integrations.bench.ulysses import attend_all_heads, ulysses_layer
from upipe_integrations.kernels import KERNELS, Kernel, KernelRequest, order_of_preference, select_kernel
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import (
    LayerShape,
    PeakUnits,
    ulysses_peak,
    upipe_peak,
    weight_gradients,
)
from upipe_integrations.planning.measure import fake_ranks, measured_upipe_peak
from upipe_integrations.proof.case import Case
from upipe_integrations.proof.check import Result
from upipe_integrations.proof.kernels import SIZES, TOLERANCE, kernel_cases, kernel_errors
from upipe_integrations.proof.threads import check_in_threads

Row = dict[str, Any]
"""``what`` was looked at, whether it ``held`` (None: a figure, not judged), and figures in words or numbers."""

LLAMA3_8B = LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
SMALL_LAYER = LayerShape(heads=16, kv_heads=8, head_dim=16, hidden_size=64)
RANKS = 8
MODES = {memory: Mode.named(memory) for memory in MEMORY}
MODES |= {f"{memory}, overlap": Mode.named(memory, overlap=True) for memory in ("keep", "fused")}
_NEAR = 0.03
"""Of a measured peak to its closed form, relative."""


def device_of(small: bool) -> torch.device:
    """Where a step runs."""
    return torch.device("cpu" if small else "cuda")


# ---------------------------------------------------------------- the machine


def environment(small: bool) -> Iterator[Row]:
    """Versions, and that ``auto`` takes the kernel it should: the first of the GPU's order whose package is there."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4", "deepspeed", "megatron-core", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "-"
    if not small:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    yield {"what": "versions", "held": None, **found}
    device = device_of(small)
    request = KernelRequest(device, torch.float32 if small else torch.bfloat16, 128)
    chosen, expected = select_kernel("auto", request).name, _expected(small)
    yield {"what": "the kernel of auto", "held": chosen == expected, "chosen": chosen, "expected": expected}
    for kernel in order_of_preference(device):
        yield {"what": f"kernel {kernel.name}", "held": None, "refusal": kernel.refusal(request) or "-"}


def _expected(small: bool) -> str:
    """By what is installed alone: that it can be imported and called is what is to be shown."""
    if small:
        return "torch-cpu-flash"
    major, there = torch.cuda.get_device_capability()[0], importlib.util.find_spec
    cudnn = (torch.backends.cudnn.version() or 0) > 91500
    packages = {
        "flash-attn-3": there("flash_attn_interface"),
        "flash-attn-2": there("flash_attn"),
        "torch-cudnn": cudnn,
    }
    order = {9: ("flash-attn-3", "torch-cudnn", "flash-attn-2"), 10: ("torch-cudnn", "flash-attn-2")}
    return next((name for name in order.get(major, ("flash-attn-2",)) if packages[name]), "torch-cuda-flash")


# ---------------------------------------------------------------- kernels


def kernels(small: bool) -> Iterator[Row]:
    """Every kernel that can run, in every case that it serves, against attention in float64."""
    device = device_of(small)
    cases = kernel_cases(sizes=((64, 64), (192, 128)) if small else SIZES)
    for name, kernel in KERNELS.items():
        errors: dict[str, float] = {}
        refused, failed = 0, None
        for case in cases:
            if case.refusal(kernel, device) is not None:
                refused += 1
                continue
            try:
                errors[str(case)] = max(kernel_errors(kernel, case, device).values())
            except Exception as error:  # a row, and the next kernel
                failed = f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                break
        if not errors and failed is None:
            yield {"what": name, "held": None, "refusal": str(cases[4].refusal(kernel, device)), "cases": 0}
            continue
        worst = max(errors, key=lambda case: (math.isnan(errors[case]), errors[case]), default="-")
        held = failed is None and not any(not e <= TOLERANCE[torch.bfloat16] for e in errors.values())
        row = {"what": name, "held": held, "cases": len(errors), "refused": refused}
        yield {**row, "worst": errors.get(worst, float("nan")), "in": worst, **({"failed": failed} if failed else {})}


def offsets(small: bool) -> Iterator[Row]:
    """Heads that lie beyond 2 ** 31 elements in their buffers: q, dout and out at the ends of one, and alone."""
    device, D, n = device_of(small), 128, 2
    S, total = (256, 12) if small else (65536, 3 * 88)  # 65536 * 264 * 128 is 2.2e9
    dtype = torch.bfloat16
    buffer = torch.zeros(S, 1, total, D, dtype=dtype, device=device)
    places = [buffer[:, :, first : first + n].permute(1, 2, 0, 3) for first in (0, total // 2, total - n)]
    generator = torch.Generator(device=device).manual_seed(0)
    for place in places:
        place.copy_(torch.randn(place.shape, dtype=dtype, device=device, generator=generator))
    q, dout, out_place = places
    k, v = (torch.randn(S, 1, 1, D, dtype=dtype, device=device, generator=generator).permute(1, 2, 0, 3) for _ in "kv")
    specs = {"causal": AttentionSpec(), "documents": AttentionSpec(documents=((0, S // 3, S),))}
    for kernel, (what, spec) in itertools.product(KERNELS.values(), specs.items()):
        reason = kernel.refusal(KernelRequest(device, dtype, D, spec=spec))
        if reason is not None or kernel.name == "math":
            continue
        out, lse = kernel.forward(q, k, v, spec)
        out_place.copy_(out)
        far = (out, *kernel.backward(dout, q, k, v, out_place, lse, spec))
        alone_q, alone_dout = (t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for t in (q, dout))
        near_out, near_lse = kernel.forward(alone_q, k, v, spec)
        near = (near_out, *kernel.backward(alone_dout, alone_q, k, v, near_out, near_lse, spec))
        errors = {name: _relative(a, b) for name, a, b in zip(("out", "dq", "dk", "dv"), far, near, strict=True)}
        worst = max(errors.values())
        yield {"what": f"{kernel.name}, {what}", "held": worst <= 2**-7, "elements": buffer.numel(), "worst": worst}


def _relative(ours: Tensor, right: Tensor) -> float:
    return float((ours.float() - right.float()).norm() / right.float().norm())


# ---------------------------------------------------------------- the engine


def modes(small: bool) -> Iterator[Row]:
    """Every mode on 8 ranks, threads on one device, against one process: exact, and in bfloat16 by the GPU's kernel."""
    device = device_of(small).type
    head_dim, length, ranks = (16, 64, 4) if small else (64, 512, RANKS)
    common = {"head_dim": head_dim, "seq_len": length, "ranks": ranks, "one_device": True, "device": device}
    precisions = [(torch.float64, "math"), (torch.bfloat16, "auto")]
    cases = [
        Case(
            2 * ranks, ranks, chunk_heads=ranks, kernel=kernel, dtype=dtype, memory=memory, query_blocks=2,
            overlap=overlap, **common,
        )
        for (dtype, kernel), memory, overlap in itertools.product(precisions, MEMORY, (False, True))
    ]  # fmt: skip
    yield from map(row_of_case, cases, check_in_threads(cases))


def row_of_case(case: Case, result: Result) -> Row:
    """What came of a case that was compared with one process."""
    what = f"{case.memory}{', overlap' if case.overlap else ''}, {str(case.dtype).removeprefix('torch.')}"
    if result.refusal is not None:
        return {"what": what, "held": False, "refusal": result.refusal}
    worst, held = result.worst, all(finding.agrees for finding in result.findings)
    return {"what": what, "held": held, "worst": worst.error, "of": worst.tensor, "tolerance": worst.tolerance}


@contextmanager
def one_rank(ranks: int) -> Iterator[None]:
    """A default group of `ranks` of which this process is the first: an exchange copies what is sent, so that numbers
    stay numbers and take the time of a copy."""

    def copy(received: Tensor, send: Tensor, group: Any = None, async_op: bool = False) -> Any:
        received.copy_(send)
        return _Done() if async_op else None

    exchange = dist.all_to_all_single
    with fake_ranks(ranks):
        dist.all_to_all_single = copy
        try:
            yield
        finally:
            dist.all_to_all_single = exchange


class _Done:
    def wait(self) -> None:
        """It is done."""


def layer_of_one_rank(shape: LayerShape, tokens: int, ranks: int, device: torch.device) -> tuple[Layer, Tensor]:
    """A rank's layer for a sequence of `tokens` in bfloat16, made on `device`, and the gradient of its output."""
    layer = random_layer(shape, tokens // ranks, torch.bfloat16, device=device).as_leaves()
    return layer, layer.x.detach().flip(1).clone()


def train_step(run: Callable[[Layer], Tensor], layer: Layer, dy: Tensor) -> None:
    """Forward and backward, as a training step has them."""
    for leaf in layer.leaves().values():
        leaf.grad = None
    y = run(layer)
    edge = torch.autograd.graph.get_gradient_edge(y)
    del y  # as in a model, whose next layer has read it
    torch.autograd.backward(edge, dy)


def contenders(shape: LayerShape, kernel: Kernel, ranks: int, heads: int) -> dict[str, Callable[[Layer], Tensor]]:
    schedule = Schedule.build(heads=shape.heads, kv_heads=shape.kv_heads, ranks=ranks, chunk_heads=heads)

    def upipe(mode: Mode) -> Callable[[Layer], Tensor]:
        return lambda layer: upipe_layer(layer, schedule, mode, dist.group.WORLD, kernel)

    return {"Ulysses": lambda layer: ulysses_layer(layer, dist.group.WORLD, kernel)} | {
        f"UPipe {name}": upipe(mode) for name, mode in MODES.items()
    }


def memory(small: bool) -> Iterator[Row]:
    """The peak of one rank of 8 by the allocator, against the closed form of the kernel that ran; Ulysses beside it.

    Without a GPU the same layer on fake tensors, at the same lengths.
    """
    shape, device = LLAMA3_8B, device_of(small)
    schedule = Schedule.build(heads=32, kv_heads=8, ranks=RANKS, chunk_heads=8)
    for tokens, (what, mode) in itertools.product((128 << 10, 512 << 10, 1 << 20), {"Ulysses": None, **MODES}.items()):
        unit = tokens * shape.head_dim * 2
        if tokens == 1 << 20 and not small and what not in ("Ulysses", "keep", "blocks"):
            continue  # ten seconds each
        blocks = mode is not None and mode.query_blocks > 1
        kernel = None if small else select_kernel("auto", KernelRequest(device, torch.bfloat16, 128, blocks=blocks))
        name = kernel.name if kernel is not None else "torch-cuda-flash"
        if mode is None:
            form = ulysses_peak(shape, RANKS, kernel=name)
            form = PeakUnits(form.forward, form.training + weight_gradients(shape, tokens, schedule, Mode()))
        else:
            form = upipe_peak(shape, schedule, mode, kernel=name)
            form = PeakUnits(form.forward, form.training + weight_gradients(shape, tokens, schedule, mode))
        if small:
            if mode is None or (blocks and tokens < 1 << 20):
                continue
            with fake_ranks(RANKS):
                peak, reserved = measured_upipe_peak(shape, schedule, mode, tokens, kernel=name).training, None
        else:
            assert kernel is not None
            run = contenders(shape, kernel, RANKS, 8)[what if mode is None else f"UPipe {what}"]
            try:
                peak, reserved = _allocated(shape, tokens, run, device)
            except torch.OutOfMemoryError:
                yield {"what": f"{what}, {tokens >> 10}K", "held": None, "form_units": form.training, "peak": "OOM"}
                continue
            peak, reserved = peak / unit, reserved / unit
        # Beside the forms: row sums, log-sum-exps, and what a product rounds up to; 64 MiB on short sequences.
        slack = 0.5 + (64 << 20) / unit
        off = peak / form.training - 1
        held = abs(off) <= _NEAR or abs(peak - form.training) <= slack if mode is not None else None
        yield {
                "what": f"{what}, {tokens >> 10}K", "held": held, "form_units": form.training, "peak_units": peak,
                "off": off, "GiB": peak * unit / 2**30,
                **({} if reserved is None else {"reserved_GiB": reserved * unit / 2**30}),
            }  # fmt: skip


def _allocated(shape: LayerShape, tokens: int, run: Callable[[Layer], Tensor], device: torch.device) -> tuple[int, int]:
    """(peak, reserved at the peak) in bytes beyond the layer's input and weights, dy included."""
    with one_rank(RANKS):
        warm, dy = layer_of_one_rank(shape, 64 * RANKS * 8, RANKS, device)
        train_step(run, warm, dy)  # workspaces of products, and what is made once
        del warm, dy
        gc.collect()
        torch.cuda.empty_cache()
        layer, dy = layer_of_one_rank(shape, tokens, RANKS, device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, reserved = torch.cuda.memory_allocated() - dy.nbytes, torch.cuda.memory_reserved() - dy.nbytes
        train_step(run, layer, dy)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - reserved


def speed(small: bool) -> Iterator[Row]:
    """Seconds of a training step of one rank of 8, in turn: Ulysses, UPipe by mode, and PyTorch's own attention."""
    device, ranks = device_of(small), RANKS
    shape, repeats_at = (SMALL_LAYER, {512: 2}) if small else (LLAMA3_8B, {128 << 10: 5, 256 << 10: 2})
    dtype = torch.bfloat16
    kernel = select_kernel("auto", KernelRequest(device, dtype, shape.head_dim, blocks=True))
    runs = contenders(shape, kernel, ranks, ranks) | {"stock SDPA": _stock}
    for tokens, repeats in repeats_at.items():
        with one_rank(ranks):
            layer, dy = layer_of_one_rank(shape, tokens, ranks, device)
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(-1, repeats):
                for name, run in runs.items():
                    _wait(device)
                    begin = time.perf_counter()
                    train_step(run, layer, dy)
                    _wait(device)
                    if repeat >= 0:
                        seconds[name].append(time.perf_counter() - begin)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        for name, median in medians.items():
            spread = (max(seconds[name]) - min(seconds[name])) / median
            yield {
                "what": f"{name}, {tokens} tokens", "held": None, "seconds": median, "spread": spread,
                "over_Ulysses": median / medians["Ulysses"], "kernel": kernel.name,
            }  # fmt: skip


def _stock(layer: Layer) -> Tensor:
    """Ulysses around ``scaled_dot_product_attention``, which chooses its kernel itself."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        C = dist.get_world_size()
        # One rank's heads over the whole sequence, as an exchange gives them; gradients come back the same way.
        q, k, v = (t.unflatten(2, (C, -1)).permute(0, 2, 1, 3, 4).flatten(1, 2).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return out.unflatten(1, (C, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)

    return F.linear(attend_all_heads(layer, attention), layer.wo)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def synchronisation(small: bool) -> Iterator[Row]:
    """A step of every mode in which nothing may wait for the GPU: replicated KV heads, uneven groups, sinks or not."""
    device = device_of(small)
    llama = SMALL_LAYER if small else LLAMA3_8B
    shapes = {"8B": llama, "8B with sinks": llama, "uneven heads": LayerShape(28, 4, 64, 256)}
    for (what, shape), (name, mode) in itertools.product(shapes.items(), MODES.items()):
        dtype, blocks = torch.bfloat16, mode.query_blocks > 1
        kernel = select_kernel(
            "auto", KernelRequest(device, dtype, shape.head_dim, sinks="sinks" in what, blocks=blocks)
        )
        schedule = Schedule.build(heads=shape.heads, kv_heads=shape.kv_heads, ranks=RANKS, chunk_heads=RANKS)

        sinks = torch.zeros(shape.heads, device=device, requires_grad=True) if "sinks" in what else None

        def run(
            layer: Layer,
            schedule: Schedule = schedule,
            mode: Mode = mode,
            kernel: Kernel = kernel,
            sinks: Tensor | None = sinks,
        ) -> Tensor:
            return upipe_layer(layer, schedule, mode, dist.group.WORLD, kernel, sinks=sinks)

        with one_rank(RANKS):
            layer, dy = layer_of_one_rank(shape, 512 if small else 4096, RANKS, device)
            train_step(run, layer, dy)
            waited = None
            if not small:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                train_step(run, layer, dy)
            except RuntimeError as error:
                waited = " ".join(str(error).split())[:200]
            finally:
                if not small:
                    torch.cuda.set_sync_debug_mode("default")
        held = None if small else waited is None
        yield {"what": f"{what}, {name}", "held": held, **({"waited": waited} if waited else {})}


def compiled(small: bool) -> Iterator[Row]:
    """``torch.compile`` of a layer, whole graphs, against eager mode."""
    device, shape = device_of(small), SMALL_LAYER if small else dataclasses.replace(LLAMA3_8B, hidden_size=1024)
    for name, mode in MODES.items():
        blocks = mode.query_blocks > 1
        kernel = select_kernel("auto", KernelRequest(device, torch.bfloat16, shape.head_dim, blocks=blocks))
        schedule = Schedule.build(heads=shape.heads, kv_heads=shape.kv_heads, ranks=1, chunk_heads=shape.heads // 4)

        def run(layer: Layer, schedule: Schedule = schedule, mode: Mode = mode, kernel: Kernel = kernel) -> Tensor:
            return upipe_layer(layer, schedule, mode, None, kernel)

        torch.compiler.reset()
        whole = torch.compile(run, fullgraph=True, backend="aot_eager" if small else "inductor")
        results = []
        for way in (run, whole):
            layer, dy = layer_of_one_rank(shape, 1024, 1, device)
            y = way(layer)
            y.backward(dy)
            results.append([y.detach(), *(leaf.grad for leaf in layer.leaves().values())])
        worst = max(_relative(a, b) for a, b in zip(*results, strict=True))
        # The same operator in the graph; what is around it is rounded once more or less.
        yield {"what": name, "held": worst <= 2**-6, "worst": worst}


def sliding_window(small: bool) -> Iterator[Row]:
    """A sliding-window model of Transformers' under DeepSpeed: its peak grows with its length, not with its square."""
    missing = [name for name in ("deepspeed", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        yield {"what": "model", "held": None, "left_out": f"{' and '.join(missing)} not installed"}
        return
    from proof_models import window_model_peaks

    lengths = (256, 512) if small else (16384, 32768)
    peaks = window_model_peaks(lengths, device_of(small))
    grown = peaks[1] / peaks[0]
    for length, peak in zip(lengths, peaks, strict=True):
        yield {"what": f"L = {length}", "held": grown < 2.5, "GiB": peak / 2**30, "twice_the_length": grown}


STEPS: dict[str, tuple[Callable[[bool], Iterator[Row]], int]] = {
    "environment": (environment, 20),
    "kernels": (kernels, 110),
    "offsets": (offsets, 30),
    "modes": (modes, 50),
    "memory": (memory, 150),
    "speed": (speed, 60),
    "synchronisation": (synchronisation, 30),
    "compiled": (compiled, 60),
    "sliding_window": (sliding_window, 30),
}
"""By name: the step, and its seconds. They are nine minutes together."""
