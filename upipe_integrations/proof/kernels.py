"""A local attention kernel against attention written out in float64: what a GPU's kernels are proven with.

Every kernel is an operator of somebody else's, compiled for some GPUs, sizes and layouts. The cases have what the
engine gives it: heads that are slices of one buffer, odd lengths, groups of query heads, and each feature.

Shapes: B batch, S length, n query heads, v KV heads, D and Dv sizes of query/key and of value heads. Tensors are
`[B, heads, S, D]` views of buffers `[S, B, heads, D]`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from upipe_integrations.kernels import AttentionSpec, Kernel, KernelRequest

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2**-8, torch.bfloat16: 2**-6}
"""Largest Frobenius norm of a difference to float64, relative. In half precision scores, probabilities and results are
each rounded to 2 ** -9 (bfloat16) or 2 ** -12, which adds up to a few times that; a wrong row, head or mask shows as
0.1 and more."""

SIZES = ((64, 64), (80, 80), (128, 128), (256, 256), (192, 128))
FEATURES = ("causal", "full", "window", "documents", "softcap", "sinks", "blocks")
_BLOCK_ROWS, _TILE = 64, 128


@dataclass(frozen=True)
class KernelCase:
    """What a kernel is asked for.

    Args:
        head_dim, value_dim: D and Dv.
        feature: of ``FEATURES``.
        batch, length: B and S.
        heads, kv_heads: n and v.
        together: whether q, k and v are slices of one buffer, and q, dout and out of another.
        dtype: of everything.
    """

    head_dim: int
    value_dim: int
    feature: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    together: bool
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        size = str(self.head_dim) if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        together = ", one buffer" if self.together else ""
        heads = f"{self.heads} and {self.kv_heads} heads of {size}"
        return f"{self.feature}, {heads}, {self.batch} x {self.length}{together}"

    @property
    def spec(self) -> AttentionSpec:
        """What is computed."""
        S = self.length
        if self.feature == "documents":
            return AttentionSpec(documents=((0, 1, S // 3, S // 3 + 7, S),))
        window = S // 5 + 1 if self.feature == "window" else None
        return AttentionSpec(
            causal=self.feature != "full", window=window, softcap=2.0 if self.feature == "softcap" else None
        )

    def request(self, device: torch.device) -> KernelRequest:
        """What the kernel must serve."""
        sinks, blocks = self.feature == "sinks", self.feature == "blocks"
        return KernelRequest(device, self.dtype, self.head_dim, self.value_dim, self.spec, sinks, blocks)

    def refusal(self, kernel: Kernel, device: torch.device) -> str | None:
        """Why `kernel` can't serve the case; None where it can."""
        reason = kernel.refusal(self.request(device))
        if reason is None and self.feature == "blocks":
            reason = kernel.block_refusal(self.spec)
            if reason is None and self.value_dim != self.head_dim:
                reason = "blocks need value heads of the same size"
        return reason


def kernel_cases(
    dtype: torch.dtype = torch.bfloat16, *, sizes: tuple[tuple[int, int], ...] = SIZES
) -> list[KernelCase]:
    """Every size with every feature twice, and every batch, length, grouping and layout with each of them."""
    # Of coprime periods, so that all combinations come in turn.
    batches, heads = itertools.cycle((1, 2)), itertools.cycle(((2, 2), (4, 1), (6, 2)))
    lengths, layouts = itertools.cycle((257, 384, 509, 640, 1)), itertools.cycle((True, True, False, False))
    cases = []
    for (D, Dv), feature, _ in itertools.product(sizes, FEATURES, range(2)):
        length = next(lengths)
        if feature == "blocks":
            length = 4 * _TILE
        elif feature != "causal" and length == 1:
            length = 130
        n, v = next(heads)
        cases.append(KernelCase(D, Dv, feature, next(batches), length, n, v, next(layouts), dtype))
    return cases


def kernel_errors(kernel: Kernel, case: KernelCase, device: torch.device) -> dict[str, float]:
    """Relative errors of out, dq, dk and dv of `kernel` against float64."""
    q, k, v, dout, sinks = _tensors(case, device)
    run = _in_blocks if case.feature == "blocks" else _at_once
    got = run(kernel, case, q, k, v, dout, sinks)
    right = _written_out(case, q, k, v, dout, sinks)
    errors = {}
    for name, ours, theirs in zip(("out", "dq", "dk", "dv"), got, right, strict=True):
        scale = theirs.norm()
        # dq and dk of a single row, which attends itself alone, are zero.
        errors[name] = float((ours.double() - theirs).norm() / scale) if scale > 0 else float(ours.double().norm())
    return errors


def _tensors(case: KernelCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v, dout and sinks."""
    generator = torch.Generator().manual_seed(0)
    B, S, n, v = case.batch, case.length, case.heads, case.kv_heads

    def heads_of(number: int, size: int, in_buffer: tuple[int, int]) -> Tensor:
        values = torch.randn(S, B, number, size, generator=generator, dtype=torch.float64)
        first, total = in_buffer
        buffer = torch.full((S, B, total, size), float("nan"), dtype=case.dtype, device=device)
        mine = buffer[:, :, first : first + number]
        mine.copy_(values)
        return mine.permute(1, 2, 0, 3)

    alone = not case.together or case.value_dim != case.head_dim
    q = heads_of(n, case.head_dim, (0, n if alone else n + 2 * v))
    k = heads_of(v, case.head_dim, (0, v) if alone else (n, n + 2 * v))
    values = heads_of(v, case.value_dim, (0, v) if alone else (n + v, n + 2 * v))
    dout = heads_of(n, case.value_dim, (n if case.together else 0, 3 * n if case.together else n))
    sinks = torch.randn(n, generator=generator, dtype=torch.float64).to(device) if case.feature == "sinks" else None
    return q, k, values, dout, sinks


def _beside(out: Tensor, case: KernelCase) -> Tensor:
    """`out` as it arrives beside other heads in one buffer."""
    if not case.together:
        return out
    B, n, S, Dv = out.shape
    buffer = out.new_full((S, B, 3 * n, Dv), float("nan"))
    mine = buffer[:, :, 2 * n :].permute(1, 2, 0, 3)
    mine.copy_(out)
    return mine


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    if sinks is None:
        return out, lse
    both = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    return out * (lse - both).exp()[..., None].to(out.dtype), both


def _at_once(
    kernel: Kernel, case: KernelCase, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sinks: Tensor | None
) -> tuple[Tensor, ...]:
    out, lse = _with_sinks(*kernel.forward(q, k, v, case.spec), sinks)
    out = _beside(out, case)
    return out, *kernel.backward(dout, q, k, v, out, lse, case.spec)


def _in_blocks(
    kernel: Kernel, case: KernelCase, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sinks: Tensor | None
) -> tuple[Tensor, ...]:
    """Blocks of query rows, each backward over tiles of the keys that it sees, as in memory mode ``"blocks"``."""
    spec = case.spec
    out = torch.empty_like(dout)
    dq, dk, dv = (torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v))
    for start in range(0, case.length, _BLOCK_ROWS):
        rows, end = slice(start, start + _BLOCK_ROWS), start + _BLOCK_ROWS
        of_block, lse = kernel.forward_block(q[:, :, rows], k[:, :, :end], v[:, :, :end], spec, start)
        out[:, :, rows] = of_block
        for first in range(0, end, _TILE):
            keys = slice(first, min(first + _TILE, end))
            tensors = (dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], of_block, lse)
            parts = kernel.backward_block(tensors, spec, start, first)
            for total, part, where in zip((dq, dk, dv), parts, (rows, keys, keys), strict=True):
                total[:, :, where].add_(part)
    return out, dq, dk, dv


def _written_out(
    case: KernelCase, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sinks: Tensor | None
) -> tuple[Tensor, ...]:
    """Out, dq, dk and dv by a softmax of all scores, under autograd in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    spec, S, group = case.spec, case.length, case.heads // case.kv_heads
    scores = q.unflatten(1, (-1, group)) @ k.unsqueeze(2).mT * case.head_dim**-0.5  # [B, v, n / v, S, S]
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~_seen(spec, S, q.device), float("-inf"))
    if sinks is not None:
        column = sinks.view(1, case.kv_heads, group, 1, 1).expand(*scores.shape[:3], S, 1)
        scores = torch.cat([scores, column], -1)
    probabilities = torch.softmax(scores, -1)[..., :S]
    out = (probabilities @ v.unsqueeze(2)).flatten(1, 2)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def _seen(spec: AttentionSpec, S: int, device: torch.device) -> Tensor:
    """`[S, S]`, whether a row sees a key."""
    row, key = torch.arange(S, device=device)[:, None], torch.arange(S, device=device)[None]
    seen = key <= row if spec.causal else torch.ones(S, S, dtype=torch.bool, device=device)
    if spec.window is not None:
        seen &= key > row - spec.window
    if spec.documents is not None:
        ends = torch.tensor(spec.documents[0][1:], device=device)
        seen &= torch.searchsorted(ends, row, right=True) == torch.searchsorted(ends, key, right=True)
    return seen
