"""The steps of ``proof.py`` on several GPUs, a rank on each, over NCCL; in small on CPU ranks, over gloo."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from proof_steps import LLAMA3_8B, SMALL_LAYER, Row, contenders, row_of_case, train_step

from upipe_integrations.bench.layers import Layer, random_layer
from upipe_integrations.kernels import KernelRequest, select_kernel
from upipe_integrations.local_ranks import LocalRanks
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.components import CONTEXT_GIB, Method
from upipe_integrations.planning.models import find_model
from upipe_integrations.planning.plan import Plan
from upipe_integrations.planning.setup import Setup
from upipe_integrations.proof.case import Case
from upipe_integrations.proof.check import check_all

ROOT = Path(__file__).resolve().parents[1]


def ranks_of(small: bool) -> int:
    """How many there are: a power of two, as heads are cut evenly."""
    found = 2 if small else torch.cuda.device_count()
    return max(n for n in (1, 2, 4, 8) if n <= found)


def _ranks(small: bool) -> LocalRanks:
    # The modules that ranks are given functions of are beside this file.
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    return LocalRanks(ranks_of(small), backend="gloo" if small else "nccl", environment=environment)


def exact(small: bool) -> Iterator[Row]:
    """Every mode on the ranks against one process: exact, and in bfloat16 by the GPU's kernel."""
    C = ranks_of(small)
    head_dim, length = (16, 64) if small else (128, 1024)
    common = {"head_dim": head_dim, "seq_len": length, "ranks": C, "device": "cpu" if small else "cuda"}
    cases = [
        Case(
            4 * C, 2 * C, chunk_heads=C, kernel=kernel, dtype=dtype, memory=memory, query_blocks=2, overlap=overlap,
            sinks=memory == "keep", **common,
        )
        for (dtype, kernel), memory, overlap in itertools.product(
            ((torch.float64, "math"), (torch.bfloat16, "auto")), MEMORY, (False, True)
        )
    ]  # fmt: skip
    yield from map(row_of_case, cases, check_all(cases, seconds=60))


def exchange(small: bool) -> Iterator[Row]:
    """A training step's exchanges, and how much of their time nothing else runs, from a profile of rank 0."""
    with _ranks(small) as ranks:
        for what, by_rank in ranks.call(_profiles, small, seconds=200)[0].items():
            yield {"what": what, "held": None, **by_rank}


def _profiles(small: bool) -> dict[str, dict[str, float]]:
    """Of this rank: milliseconds of a step, of its exchanges, and of exchanges beside which nothing ran."""
    C = dist.get_world_size()
    shape, tokens = (SMALL_LAYER, 64 * C) if small else (LLAMA3_8B, 128 << 10)
    dtype = torch.float32 if small else torch.bfloat16
    device = torch.device("cpu") if small else torch.device("cuda", dist.get_rank())
    kernel = select_kernel("auto", KernelRequest(device, dtype, shape.head_dim, blocks=True))
    layer = random_layer(shape, tokens, dtype).shard(dist.get_rank(), C).map(lambda t: t.to(device)).as_leaves()
    dy = layer.x.detach().flip(1).clone()
    runs = contenders(shape, kernel, C, 2 * C)
    return {name: _profile(run, layer, dy) for name, run in runs.items()}


def _profile(run: Callable[[Layer], torch.Tensor], layer: Layer, dy: torch.Tensor) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    on_gpu = layer.x.is_cuda
    train_step(run, layer, dy)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        train_step(run, layer, dy)
        if on_gpu:
            torch.cuda.synchronize()
    events = [e for e in seen.events() if not on_gpu or e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [
        (e.time_range.start, e.time_range.end, "nccl" in e.name.lower() or "gloo" in e.name.lower()) for e in events
    ]
    exchanges = _union([(a, b) for a, b, is_exchange in spans if is_exchange])
    others = _union([(a, b) for a, b, is_exchange in spans if not is_exchange]) if on_gpu else []
    length = max(b for _, b, _ in spans) - min(a for a, _, _ in spans)
    exposed = _length(exchanges) - _length(_overlap(exchanges, others))
    return {"step_ms": length / 1e3, "exchanges_ms": _length(exchanges) / 1e3, "exposed_ms": exposed / 1e3}


Span = tuple[float, float]


def _union(spans: list[Span]) -> list[Span]:
    """The same time in spans that do not touch."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _overlap(some: list[Span], others: list[Span]) -> list[Span]:
    """The time in both, of spans as :func:`_union` gives them."""
    found, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            found.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)


def training(small: bool) -> Iterator[Row]:
    """Steps under ZeRO-3 with prefetch and overlap: UPipe's losses are Ulysses's."""
    missing = _missing("deepspeed", "transformers")
    if missing:
        yield {"what": "ZeRO-3", "held": None, "left_out": missing}
        return
    from proof_models import train

    steps, found = 3 if small else 20, {}
    for name in ("Ulysses", "UPipe"):
        with _ranks(small) as ranks:
            found[name] = ranks.call(train, small, name == "UPipe", steps, seconds=200)[0]
    off = {
        key: max(abs(a / b - 1) for a, b in zip(found["UPipe"][key], found["Ulysses"][key], strict=True))
        for key in ("loss", "grad_norm")
    }
    # Losses of random tokens near log(vocabulary), whose differences are rounding's; it grows over optimizer steps.
    tolerance = {"loss": 1e-5, "grad_norm": 1e-3} if small else {"loss": 5e-3, "grad_norm": 5e-2}
    seconds = {name: statistics.median(run["seconds"][1:]) for name, run in found.items()}
    yield {
        "what": f"ZeRO-3, {steps} steps", "held": all(off[key] <= tolerance[key] for key in off),
        "loss_off": off["loss"], "grad_norm_off": off["grad_norm"], "last_loss": found["UPipe"]["loss"][-1],
        "seconds": seconds["UPipe"], "over_Ulysses": seconds["UPipe"] / seconds["Ulysses"],
    }  # fmt: skip


def million(small: bool) -> Iterator[Row]:
    """Llama3-8B at 1M tokens, end to end: every rank's peak against ``upipe plan``."""
    missing = _missing("deepspeed", "transformers")
    if missing:
        yield {"what": "Llama3-8B", "held": None, "left_out": missing}
        return
    from proof_models import one_long_step

    C = ranks_of(small)
    setup = Setup(C, 80, offload=("optimizer",), tiled_loss=True)
    method = Method("upipe", "fused", C)
    plan = Plan(find_model("llama3-8b"), setup, chunk_heads=(C,), memory=("fused",)).memory(method, 1 << 20)
    planned = plan.total - plan.reserve - CONTEXT_GIB
    with _ranks(small) as ranks:
        for rank, found in enumerate(ranks.call(one_long_step, small, seconds=280)):
            peak = found["peak"] / 2**30
            held = None if small else peak <= 1.03 * planned
            yield {
                "what": f"rank {rank}", "held": held, "GiB": peak, "planned_GiB": planned, "loss": found["loss"],
                "seconds": found["seconds"],
            }  # fmt: skip


def megatron(small: bool) -> Iterator[Row]:
    """Pretraining by Megatron, tensor and context parallel, gradients summed in float32: UPipe prints native's losses.

    Native is Transformer Engine's context parallelism; where that is not installed, one context-parallel rank.
    """
    missing = _missing("megatron.training", "numpy")
    if missing:
        yield {"what": "Megatron", "held": None, "left_out": missing}
        return
    sys.path.insert(0, str(ROOT))
    from examples.common.runs import follow
    from examples.megatron.arguments import read_arguments
    from examples.megatron.dataset import build

    C, steps = ranks_of(small), 2 if small else 20
    engine = importlib.util.find_spec("transformer_engine") is not None and not small
    tp = 2 if C >= 4 else 1
    cp, length = C // tp, 256 if small else 16384
    shared = read_arguments(ROOT / "configs" / "megatron" / "demo.args")
    if not small:
        on_gpu = {"gloo": "nccl", "local": "transformer_engine" if engine else "local"}
        shared = [on_gpu.get(word, word) for word in shared if word != "--use-cpu-initialization"]
        shared += ["--bf16", "--accumulate-allreduce-grads-in-fp32"]
    shared += ["--tensor-model-parallel-size", str(tp), *(["--sequence-parallel"] if tp > 1 else [])]
    upipe = ["--context-parallel-size", str(cp), "--context-parallel-impl", "upipe", "--upipe-chunk-heads", str(cp)]
    native = ["--context-parallel-size", str(cp if engine else 1)]
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
    variables |= {"TORCHDYNAMO_DISABLE": "1"} if small else {}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        build(data / "text")
        shared += ["--data-path", str(data / "text"), "--data-cache-path", str(data / "cache"), "--seed", "1"]
        shared += ["--train-iters", str(steps), "--seq-length", str(length), "--max-position-embeddings", str(length)]
        for name, arguments in (("native", native), ("UPipe", upipe)):
            records = follow(
                ["-m", "megatron_patch", str(ROOT / "examples" / "megatron" / "on_cpu.py"), *shared, *arguments],
                name=name.lower(),
                ranks=C if name == "UPipe" or engine else tp,
                threads=1,
                output_dir=data,
                environment={**variables, "PYTHONPATH": str(ROOT)},
            )
            losses[name] = [record["loss"] for record in records]
    off = max(abs(a / b - 1) for a, b in zip(losses["UPipe"], losses["native"], strict=True))
    yield {
        "what": f"TP {tp}, CP {cp} against {'native CP' if engine else 'one context-parallel rank'}",
        "held": len(losses["UPipe"]) == steps and off <= (1e-5 if small else 1e-2), "loss_off": off,
        "last_loss": losses["UPipe"][-1],
    }  # fmt: skip


def _missing(*packages: str) -> str | None:
    lacking = [name for name in packages if not _is_there(name)]
    return f"{', '.join(lacking)} not installed" if lacking else None


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


STEPS: dict[str, tuple[Callable[[bool], Iterator[Any]], int]] = {
    "exact": (exact, 120),
    "exchange": (exchange, 120),
    "training": (training, 300),
    "million": (million, 400),
    "megatron": (megatron, 300),
}
"""By name: the step, and its seconds."""
