"""Peak memory of one attention layer, measured: the instrument that checks the closed forms of ``memory``.

On fake tensors every operator runs at full scale without data, on one rank of a process group without peers: no GPU
and no memory are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from upipe_integrations.attention import upipe_attention
from upipe_integrations.engine.call import Staging
from upipe_integrations.kernels import KERNELS, AttentionSpec, KernelRequest, TorchCudaFlash
from upipe_integrations.mode import Mode
from upipe_integrations.planning.closed_forms import USUAL_KERNEL, LayerShape, PeakUnits
from upipe_integrations.projections.output import OutputProjection
from upipe_integrations.projections.projection import AttentionProjections, Projection, Weights
from upipe_integrations.projections.rotary import RotateHalf
from upipe_integrations.schedule import Schedule

# The CUDA caching allocator rounds blocks up to this.
_BLOCK_BYTES = 512


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """A default process group of `ranks` ranks of which this process is the first, and the others are not there.

    Raises:
        RuntimeError: the process has a default group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group: measure in a process of its own.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def empty_layer(shape: LayerShape, rows: int) -> list[Tensor]:
    """x, wq, wk, wv and wo, which want gradients, and cos and sin, for `rows` of one rank; in bfloat16, not filled."""
    H, K, D, E = shape.heads, shape.kv_heads, shape.head_dim, shape.hidden_size
    sizes = ((1, rows, E), (H * D, E), (K * D, E), (K * D, E), (E, H * D), (1, rows, D), (1, rows, D))
    tensors = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
    for leaf in tensors[:5]:
        leaf.requires_grad_()
    return tensors


def measured_peak(
    shape: LayerShape, tokens: int, attention: Callable[..., Tensor], *, projects: bool = False
) -> PeakUnits:
    """Peaks of one layer on one rank of the default group, in bfloat16, all weight gradients included.

    Args:
        shape: the layer.
        tokens: of the whole sequence.
        attention: `(x, wq, wk, wv, wo, cos, sin)` to the attended heads `[1, L, H * D]`; their output projection
            is run here, by autograd, for the training peak alone.
        projects: `attention` returns y `[1, L, E]` itself.
    """
    L = tokens // dist.get_world_size()
    unit = tokens * shape.head_dim * torch.bfloat16.itemsize
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as live:
        tensors = empty_layer(shape, L)
        before = live.current
        with torch.no_grad():
            live.reset_peak()
            attention(*tensors)
            forward = live.peak - before
        y = attention(*tensors)
        if not projects:
            y = F.linear(y, tensors[4])
        dy = torch.empty_like(y)
        edge = torch.autograd.graph.get_gradient_edge(y)
        del y
        live.reset_peak()
        torch.autograd.backward(edge, dy)
        return PeakUnits(forward / unit, (live.peak - before) / unit)


def measured_upipe_peak(
    shape: LayerShape,
    schedule: Schedule,
    mode: Mode,
    tokens: int,
    *,
    with_output: bool = True,
    kernel: str = USUAL_KERNEL,
) -> PeakUnits:
    """:func:`measured_peak` of the engine; `with_output` and `kernel` as in ``closed_forms.upipe_peak``."""
    projects = mode.output_in_loop or (mode.keeps_output and with_output)

    def attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        D, rotary = shape.head_dim, RotateHalf(cos, sin)
        projections = AttentionProjections(
            Projection(Weights(wq), D, rotary=rotary),
            Projection(Weights(wk), D, rotary=rotary),
            Projection(Weights(wv), D),
        )
        output = OutputProjection(wo) if projects else None
        staging = Staging(schedule, dist.group.WORLD, FlashWorkspace(kernel), mode=mode)
        return upipe_attention(x, projections, staging, output=output)

    return measured_peak(shape, tokens, attention, projects=projects)


class LiveMemory(TorchDispatchMode):
    """Counts bytes of live tensor storages that are made while it is active; exact.

    Works on real and on fake tensors; repeatable on fake ones (with real collectives a worker thread may hold
    a buffer a moment longer). A storage that was there before counts from its first use: use inputs once
    before the baseline is read. ``current`` and ``peak`` are in bytes, blocks rounded as the CUDA
    caching allocator does. What a kernel allocates and frees inside one operator is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        self.peak = max(self.peak, self.current)
        return result

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak = self.current

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        if size == 0 or key in self._live:
            return
        self._live[key] = size
        self.current += size
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.current -= self._live.pop(key)


class FlashWorkspace(TorchCudaFlash):
    """PyTorch's CUDA flash kernel that also allocates, visibly, what a kernel's backward does inside.

    For measuring with :class:`LiveMemory` on fake tensors. What is allocated is written down here from the kernels'
    sources once more, and not taken from the closed forms that it checks.

    Args:
        kernel: whose: ``"flash-attn-2"``, ``"flash-attn-3"``, ``"flash-attn-4"``, ``"torch-cuda-flash"`` or
            ``"torch-cudnn"``.
    """

    def __init__(self, kernel: str = USUAL_KERNEL) -> None:
        self._kernel = kernel
        self.copies_slices = KERNELS[kernel].copies_slices

    def refusal(self, request: KernelRequest) -> str | None:
        """None: fake tensors need no GPU."""
        return None

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        workspace = self._workspace(dout, q, k, out)
        grads = super().backward(dout, q, k, v, out, lse, spec)
        del workspace
        return grads

    def backward_block(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        start: int,
        first_key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dout, q, k, _, out, _ = tensors
        workspace = self._workspace(dout, q, k, out)
        grads = super().backward_block(tensors, spec, start, first_key)
        del workspace
        return grads

    def _workspace(self, dout: Tensor, q: Tensor, k: Tensor, out: Tensor) -> list[Tensor]:
        """What backward of these `[B, heads, S, D]` holds beside its results."""
        workspace = [q.new_empty(q.shape, dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)]
        if self._kernel == "torch-cuda-flash":
            workspace += [dout.transpose(1, 2).contiguous(), out.transpose(1, 2).contiguous()]
        in_float32 = self._kernel in ("flash-attn-3", "flash-attn-4")
        if in_float32:  # the lse of powers of two
            workspace.append(q.new_empty(q.shape[:3], dtype=torch.float32))
        if q.shape[1] != k.shape[1]:
            shape = k.shape if in_float32 else (q.shape[0], q.shape[1], *k.shape[2:])
            workspace += [q.new_empty(shape, dtype=torch.float32 if in_float32 else q.dtype) for _ in ("dk", "dv")]
        return workspace
