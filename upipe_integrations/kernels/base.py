"""What a local attention kernel is, and what it can be asked for.

Shapes: B batch, n query heads and v KV heads of this rank in one stage (n a multiple of v: query head j
attends KV head ``j // (n / v)``), S the whole sequence in natural order, D and Dv sizes of query/key and of
value heads. All tensors are `[B, heads, S, D]` views of any strides with D contiguous; ``lse`` is
``[B, n, S]`` in the kernel's accumulation precision.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention probabilities, the same in forward and recompute and for any schedule.

    Args:
        rate: probability of dropping, in [0, 1).
        seed: the same on every rank; a new one for every forward of a layer.
        heads: global numbers of the query heads a kernel is given; filled in by the engine. The mask of a
            head depends on `seed` and its number alone, not on ranks or stages.
    """

    rate: float
    seed: int
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(f"dropout rate = {self.rate}: must be at least 0 and below 1.")


@dataclass(frozen=True)
class AttentionSpec:
    """What is computed, the same for every kernel.

    Args:
        causal: position i attends positions 0..i; otherwise every position attends all.
        scale: factor on the scores; None is ``D ** -0.5``.
        window: a position attends itself and the ``window - 1`` before it (Transformers' sliding_window);
            None is no window.
        softcap: scores become ``softcap * tanh(score / softcap)``; None is none.
        dropout: None is none.
        documents: packed documents: for each batch row (or once for all rows) the boundaries
            ``(0, ..., S)`` between documents, which do not attend each other (global cu_seqlens); None is
            one document.

    Raises:
        ValueError: a value outside its range, or a window without causal attention.
    """

    causal: bool = True
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    dropout: Dropout | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ValueError(
                f"window = {self.window} with causal = {self.causal}: must be positive, and needs causal attention."
            )
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap = {self.softcap}: must be positive; None switches it off.")
        for row in self.documents or ():
            if len(row) < 2 or row[0] != 0 or any(a >= b for a, b in itertools.pairwise(row)):
                raise ValueError(
                    f"documents {row}: must be boundaries that start at 0 and rise to the sequence length."
                )

    def scale_for(self, head_dim: int) -> float:
        """The factor on the scores for heads of `head_dim`."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def features(self) -> tuple[str, ...]:
        """What is asked for beyond causal or full attention, in a user's words."""
        return tuple(
            name
            for name, wanted in (
                (WINDOW, self.window),
                (SOFTCAP, self.softcap),
                (DROPOUT, self.dropout and self.dropout.rate),
                (DOCUMENTS, self.documents),
            )
            if wanted
        )

    def documents_of(self, batch: int, length: int) -> list[tuple[slice, tuple[int, ...]]]:
        """(batch rows, boundaries) of a `[batch, length]` sequence; one entry where all rows are alike."""
        if self.documents is None:
            return [(slice(None), (0, length))]
        if len(self.documents) == 1:
            return [(slice(None), self.documents[0])]
        return [(slice(b, b + 1), self.documents[b]) for b in range(batch)]


WINDOW, SOFTCAP, DROPOUT, DOCUMENTS = "sliding window", "softcap", "dropout", "packed documents"
SINKS, VALUE_SIZE = "sinks", "value heads of another size"


@dataclass(frozen=True)
class KernelRequest:
    """What a kernel must serve; decides which one ``auto`` picks.

    Args:
        device: where the tensors are, and `dtype` what they are.
        head_dim: size of query and key heads.
        value_dim: size of value heads; None is `head_dim`.
        spec: what is computed.
        sinks: whether there are attention sinks.
        blocks: whether query rows are attended in blocks (memory mode ``"blocks"``).
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int | None = None
    spec: AttentionSpec = field(default_factory=AttentionSpec)
    sinks: bool = False
    blocks: bool = False

    def features(self) -> tuple[str, ...]:
        """Everything asked for beyond plain causal or full attention, in a user's words."""
        other_size = self.value_dim is not None and self.value_dim != self.head_dim
        return (*self.spec.features(), *((SINKS,) if self.sinks else ()), *((VALUE_SIZE,) if other_size else ()))


class Kernel(ABC):
    """Local attention over the whole sequence, with an explicit backward (no autograd graph).

    A subclass has ``name``, :meth:`refusal`, :meth:`forward` and :meth:`backward`. What memory mode ``"blocks"`` needs
    besides is refused unless it is overridden: see :class:`BlockKernel`.
    """

    name: str
    """In settings and messages."""

    copies_slices: bool = False
    """Whether backward would copy a `dout` or `out` that lies in one buffer with other heads: these then travel, and
    arrive, in buffers of their own."""

    def longest(self, head_dim: int) -> int | None:
        """The longest sequence that it attends, in tokens; None is any."""
        return None

    def beside_exchanges(self) -> Kernel:
        """This kernel for a GPU on which an exchange is under way, where it would leave none of it to that."""
        return self

    @abstractmethod
    def refusal(self, request: KernelRequest) -> str | None:
        """Why this kernel can't serve `request`; None when it can."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """(out, lse) of softmax attention."""

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv), in the shapes of q, k, v: gradients of a KV head summed over its query heads.

        Probabilities are ``exp(score - lse)`` with the lse that is passed: one that counts more than the
        kernel's own scores (sinks) gives the right gradients.
        """

    def lse_like(self, q: Tensor) -> Tensor:
        """An empty lse of queries `q`: `[B, n, S]` in float32 or the queries' wider dtype, where it is nothing else."""
        return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))

    def block_refusal(self, spec: AttentionSpec) -> str | None:
        """Why `spec` can't be attended in blocks of query rows; None when it can."""
        return "it can't attend blocks of rows"

    def forward_block(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, start: int) -> tuple[Tensor, Tensor]:
        """(out, lse) of the query rows from `start` on; k and v are all rows that causal attention lets them see
        (``0 .. start + rows``), or the whole sequence in full attention."""
        raise ValueError(f"kernel {self.name!r}: {self.block_refusal(spec)}.")

    def backward_block(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        start: int,
        first_key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of (dout, q, k, v, out, lse), k and v being the keys from `first_key` on: dq is the part
        that goes through them. Keys end no later than the query rows, and do not begin within them. The results may
        be of a wider dtype than q, for sums of several calls."""
        raise ValueError(f"kernel {self.name!r}: {self.block_refusal(spec)}.")


class BlockKernel(Kernel):
    """A kernel for which the whole sequence is one block: ``forward`` and ``backward`` from the block forms."""

    @abstractmethod
    def block_refusal(self, spec: AttentionSpec) -> str | None:
        """See :class:`Kernel`."""

    @abstractmethod
    def forward_block(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, start: int) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""

    @abstractmethod
    def backward_block(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        start: int,
        first_key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Kernel`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        return self.forward_block(q, k, v, spec, 0)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`Kernel`."""
        dq, dk, dv = self.backward_block((dout, q, k, v, out, lse), spec, 0, 0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


HALF_PRECISION = (torch.float16, torch.bfloat16)


def unserved(request: KernelRequest, served: tuple[str, ...]) -> str | None:
    """A refusal that names the features of `request` that are not among `served`; None when all are."""
    missing = [feature for feature in request.features() if feature not in served]
    return f"it does not do {', '.join(missing)}" if missing else None


def cuda_refusal(request: KernelRequest, dtypes: tuple[torch.dtype, ...] = HALF_PRECISION) -> str | None:
    """The conditions all fused kernels on CUDA share."""
    if request.device.type != "cuda":
        return f"it needs CUDA tensors, these are on {request.device.type}"
    if request.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it computes in {names}, these are {request.dtype}"
    if request.head_dim % 8 or request.head_dim > 256:
        return f"it needs a head size that is a multiple of 8 up to 256, this is {request.head_dim}"
    major, _ = capability(request.device) or (8, 0)
    if major < 8 and request.dtype == torch.bfloat16:
        return f"it computes in bfloat16 on GPUs of compute capability 8 and up, this is {major}"
    return None


def capability(device: torch.device) -> tuple[int, int] | None:
    """The GPU's compute capability; None where there is no GPU to ask (a CPU, or fake CUDA tensors on one)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def flash_refusal(request: KernelRequest) -> str | None:
    """The conditions of FlashAttention 2's kernels, of its package's as of PyTorch's build of them."""
    reason, found = cuda_refusal(request), capability(request.device)
    if reason is not None or found is None:
        return reason
    if found[0] < 8:
        return f"it is made for GPUs of compute capability 8 and up, this is {found[0]}"
    small = found[0] == 12 or (found[0] == 8 and found[1] > 0)
    if small and 192 < request.head_dim <= 224:
        return (
            f"its backward has no heads of {request.head_dim} on GPUs of compute capability {'.'.join(map(str, found))}"
        )
    return None


def must_be_deterministic() -> bool:
    """Whether ``torch.use_deterministic_algorithms`` asks for operators that give the same bits in every run."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@dataclass(frozen=True)
class Region:
    """A rectangle of the score matrix: some batch rows, query rows and the keys they can see some of."""

    batch: slice
    rows: slice
    keys: slice

    @property
    def is_square(self) -> bool:
        """Whether rows and keys are the same positions: plain causal attention needs no mask then."""
        return self.rows == self.keys

    def masked(self, spec: AttentionSpec, device: torch.device) -> Tensor | None:
        """`[rows, keys]`, True where a query can't see a key; None where it sees all."""
        if not spec.causal:
            return None
        row = torch.arange(self.rows.start, self.rows.stop, device=device)[:, None]
        key = torch.arange(self.keys.start, self.keys.stop, device=device)[None]
        hidden = key > row
        if spec.window is not None:
            hidden |= key <= row - spec.window
        return hidden


def regions(
    spec: AttentionSpec, batch: int, length: int, block: int | None, only: slice | None = None
) -> Iterator[Region]:
    """The score matrix as regions, each query row in exactly one; nothing outside them is seen.

    `block` bounds the rows of a region; None leaves documents whole. `only` leaves out other query rows.
    """
    for rows, boundaries in spec.documents_of(batch, length):
        for start, end in itertools.pairwise(boundaries):
            step = block or end - start
            for first in range(start, end, step):
                last = min(first + step, end)
                if only is not None:
                    first, last = max(first, only.start), min(last, only.stop)
                    if first >= last:
                        continue
                low = start if spec.window is None else max(start, first - spec.window + 1)
                yield Region(rows, slice(first, last), slice(low, last if spec.causal else end))


def shifted(rows: slice, by: int) -> slice:
    """`rows` counted from another origin."""
    return slice(rows.start + by, rows.stop + by)


def common(a: slice, b: slice) -> slice | None:
    """The rows in both, or None."""
    both = slice(max(a.start, b.start), min(a.stop, b.stop))
    return both if both.start < both.stop else None
