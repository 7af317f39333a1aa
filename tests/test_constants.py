"""No layer copies from the host, or to it, once its index tensors were made; and no fake tensor outlives its mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_in_process
from upipe_integrations import (
    AttentionProjections,
    AttentionSpec,
    Layout,
    Mode,
    OutputProjection,
    Projection,
    Schedule,
    Staging,
    Weights,
    select_kernel,
    upipe_attention,
)
from upipe_integrations.constants import constant
from upipe_integrations.kernels import KernelRequest
from upipe_integrations.kernels.flash_form import _packings
from upipe_integrations.planning.measure import FlashWorkspace, fake_ranks

HEADS = {
    # query heads, KV heads, ranks, chunk_heads
    "even": (16, 8, 4, 4),
    "fewer KV heads than ranks": (16, 2, 4, 8),
    "uneven groups": (12, 4, 4, 8),
    "off the grid": (28, 4, 8, 8),
}
LAYOUTS = {"contiguous": Layout(), "zigzag": Layout.zigzag(), "packed zigzag": Layout.packed_zigzag((0, 32, 64))}
D = 8
S = 64


class FromHost(TorchDispatchMode):
    """Names the operators that on a GPU would wait: a tensor made of Python numbers, a number read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        devices = {t.device.type for t in args if isinstance(t, Tensor)} | {str((kwargs or {}).get("device") or "")}
        if name in ("lift_fresh", "_local_scalar_dense", "nonzero") or (
            name in ("copy_", "_to_copy") and len({d.split(":")[0] for d in devices if d}) > 1
        ):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def layer(heads: int, kv_heads: int, ranks: int, chunk_heads: int, mode: Mode, layout: Layout):
    """A step of one layer, as a function, on one rank of a group without peers: only what runs is of interest."""
    torch.manual_seed(0)
    E = heads * D
    x = torch.randn(1, S // ranks, E, requires_grad=True)
    wq, wk, wv = (torch.randn(n * D, E, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    wo, sinks = torch.randn(E, E, requires_grad=True), torch.randn(heads, requires_grad=True)
    schedule = Schedule.build(heads=heads, kv_heads=kv_heads, ranks=ranks, chunk_heads=chunk_heads)
    request = KernelRequest(x.device, x.dtype, D, sinks=True)
    staging = Staging(schedule, dist.group.WORLD, select_kernel("auto", request), layout, mode)
    projections = AttentionProjections(*(Projection(Weights(w), D) for w in (wq, wk, wv)))

    def step() -> None:
        y = upipe_attention(x, projections, staging, AttentionSpec(), sinks=sinks, output=OutputProjection(wo))
        torch.autograd.grad(y.sum(), [x, wq, wk, wv, wo, sinks])

    return step


def _copies(sizes: tuple[int, int, int, int]) -> dict[str, list[str]]:
    found = {}
    with fake_ranks(sizes[2]):
        for memory in ("keep_heads", "keep", "fused", "blocks"):
            for name, layout in LAYOUTS.items():
                blocks = 2 if memory == "blocks" else 1
                if blocks > 1 and layout.documents is not None:
                    continue  # refused
                mode = Mode.named(memory, query_blocks=blocks) if blocks > 1 else Mode.named(memory)
                step = layer(*sizes, mode, layout)
                step()
                with FromHost() as host:
                    step()
                found[f"{memory}, {name}"] = host.seen
    return found


@pytest.mark.parametrize("sizes", HEADS.values(), ids=HEADS)
def test_a_step_makes_no_tensor_from_the_host(sizes: tuple[int, int, int, int]) -> None:
    found = run_in_process(_copies, sizes)
    assert {case: seen for case, seen in found.items() if seen} == {}
    assert len(found) == 11


def test_the_recorder_sees_what_would_wait() -> None:
    t = torch.zeros(4)
    with FromHost() as host:
        t[[0, 1]]
        torch.tensor([1])
        t.sum().item()
        torch.zeros(1).to("meta")
    assert len(host.seen) == 4


def _fake_then_real() -> None:
    real, documents = torch.empty(1), AttentionSpec(documents=((0, 3, 8),))
    with FakeTensorMode(allow_non_fake_inputs=True):
        packed = _packings(documents, torch.empty(1, 8, 2, 4))[0][1]
        assert type(packed.cu_seqlens) is not Tensor
        fake = torch.empty(1)
        assert type(constant((5, 6), fake)) is not Tensor
        assert type(constant((7,), real)) is Tensor  # of a weight that is not fake
        Layout.zigzag().to_natural(torch.empty(8, 2), 0, 2)
    assert _packings(documents, torch.empty(1, 8, 2, 4))[0][1].cu_seqlens.tolist() == [0, 3, 8]
    assert constant((5, 6), real).tolist() == [5, 6] and constant((7,), real).tolist() == [7]
    assert constant((5, 6), real) is constant((5, 6), real)
    assert Layout.zigzag().to_natural(torch.arange(8.0), 0, 2).tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(constant((5, 6), torch.empty(1))) is not Tensor


def test_no_fake_tensor_is_kept() -> None:
    _fake_then_real()


def _measured_then_real() -> None:
    with fake_ranks(4):
        with FakeTensorMode(allow_non_fake_inputs=True):
            layer(28, 4, 4, 8, Mode.named("fused"), Layout.zigzag())()
        layer(28, 4, 4, 8, Mode.named("fused"), Layout.zigzag())()
        q = torch.empty(1, 4, 64, 8, dtype=torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(q)
            FlashWorkspace().forward(fake, fake, fake, AttentionSpec(documents=((0, 32, 64),)))
        with FakeTensorMode() as mode:  # another mode
            fake = mode.from_tensor(q)
            FlashWorkspace().forward(fake, fake, fake, AttentionSpec(documents=((0, 32, 64),)))


def test_a_real_step_after_a_measured_one() -> None:
    run_in_process(_measured_then_real)


def test_what_an_evaluation_made_serves_training() -> None:
    with torch.inference_mode():
        index = constant((3, 1, 2), torch.empty(1))
    t = torch.randn(4, requires_grad=True)
    t.index_select(0, index).sum().backward()
    assert t.grad is not None and t.grad.tolist() == [0, 1, 1, 1]
