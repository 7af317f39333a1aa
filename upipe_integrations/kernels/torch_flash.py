"""PyTorch's own attention kernels, called as the ATen operators behind scaled_dot_product_attention.

The operators are used rather than the public function because they return the log-sum-exp and come with
an explicit backward, so no autograd graph of a stage is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from upipe_integrations.constants import constant
from upipe_integrations.kernels.base import (
    DOCUMENTS,
    HALF_PRECISION,
    SINKS,
    VALUE_SIZE,
    WINDOW,
    AttentionSpec,
    BlockKernel,
    Kernel,
    KernelRequest,
    Region,
    capability,
    common,
    cuda_refusal,
    flash_refusal,
    must_be_deterministic,
    regions,
    shifted,
    unserved,
)
from upipe_integrations.kernels.flash_form import FlashForm, Packing
from upipe_integrations.kernels.math import per_query_head, sum_groups

_aten = torch.ops.aten

# A window is attended in blocks of query rows: a mask of block * (block + window) is built for each.
_WINDOW_BLOCK_ROWS = 1024
# The CPU operator's backward adds dk and dv up in half precision over tiles of query rows: of 256 from 768 rows on,
# of 64 below. More than four of the latter, which would round more often, are given to it four at a time.
_ROWS_OF_FOUR_TILES = 256
_ROWS_OF_LARGE_TILES = 768


class TorchCpuFlash(BlockKernel):
    """``_scaled_dot_product_flash_attention_for_cpu``: float64, float32 and half precision, GQA natively.

    Documents are attended one by one, windows in blocks of rows under a mask; value heads of another size
    are padded with zeros.
    """

    name = "torch-cpu-flash"

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        if request.device.type != "cpu":
            return f"it needs CPU tensors, these are on {request.device.type}"
        if not request.dtype.is_floating_point:
            return f"it needs floating-point tensors, these are {request.dtype}"
        return unserved(request, (WINDOW, DOCUMENTS, SINKS, VALUE_SIZE))

    def block_refusal(self, spec: AttentionSpec) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        return None

    def forward_block(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, start: int) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        scale, value_dim = spec.scale_for(q.shape[3]), v.shape[3]
        q, k, v = _of_one_size(q, k, v)
        calls = list(_cpu_calls(q, k, spec, start, 0))
        if len(calls) == 1 and calls[0].is_everything(q, k):
            out, lse = _cpu_forward(q, k, v, 0.0, **calls[0].mask, scale=scale)
            return out[..., :value_dim], lse
        out = torch.zeros_like(q)
        lse_dtype = torch.float32 if q.dtype in HALF_PRECISION else q.dtype
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=lse_dtype)
        for call in calls:
            b, rows, keys = call.batch, call.rows, call.keys
            part, part_lse = _cpu_forward(q[b, :, rows], k[b, :, keys], v[b, :, keys], 0.0, **call.mask, scale=scale)
            _merge(out[b, :, rows], lse[b, :, rows], part, part_lse)
        return out[..., :value_dim], lse

    def backward_block(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        start: int,
        first_key: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        dout, q, k, v, out, lse = tensors
        scale, head_dim, value_dim = spec.scale_for(q.shape[3]), q.shape[3], v.shape[3]
        q, k, v, dout, out = _of_one_size(q, k, v, dout, out)
        in_tiles = q.dtype in HALF_PRECISION and _ROWS_OF_FOUR_TILES < q.shape[2] < _ROWS_OF_LARGE_TILES
        calls = list(_cpu_calls(q, k, spec, start, first_key, _ROWS_OF_FOUR_TILES if in_tiles else None))
        if len(calls) == 1 and calls[0].is_everything(q, k):
            dq, dk, dv = _cpu_backward(dout, q, k, v, out, lse, 0.0, **calls[0].mask, scale=scale)
            return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]
        # Summed over calls as finely as one call sums within a tile.
        dq, dk, dv = (torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
        for call in calls:
            b, rows, keys = call.batch, call.rows, call.keys
            dq_part, dk_part, dv_part = _cpu_backward(
                dout[b, :, rows],
                q[b, :, rows],
                k[b, :, keys],
                v[b, :, keys],
                out[b, :, rows],
                lse[b, :, rows],
                0.0,
                **call.mask,
                scale=scale,
            )
            dq[b, :, rows].add_(dq_part)
            dk[b, :, keys].add_(dk_part)
            dv[b, :, keys].add_(dv_part)
        return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


_cpu_forward = _aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class _CpuCall:
    """One call of the operator: rows and keys of the tensors at hand, and its is_causal or attn_mask."""

    batch: slice
    rows: slice
    keys: slice
    mask: dict[str, bool | Tensor]

    def is_everything(self, q: Tensor, k: Tensor) -> bool:
        """Whether the call is on whole tensors, so that its results need not be put together."""
        return (self.batch, self.rows, self.keys) == (slice(None), slice(0, q.shape[2]), slice(0, k.shape[2]))


def _cpu_calls(
    q: Tensor, k: Tensor, spec: AttentionSpec, start: int, first_key: int, block: int | None = None
) -> Iterator[_CpuCall]:
    """Calls that attend the query rows from `start` on and the keys from `first_key` on, `block` rows at a time.

    The operator's is_causal is of a square; rows that see keys before their own need a call for those. Windows
    are attended under a mask, in blocks of rows.
    """
    rows, keys = slice(start, start + q.shape[2]), slice(first_key, first_key + k.shape[2])
    block = block if spec.window is None else _WINDOW_BLOCK_ROWS
    for region in regions(spec, q.shape[0], max(rows.stop, keys.stop), block, rows):
        if spec.window is not None or not spec.causal:
            pieces = [region.keys]
        else:
            pieces = [slice(region.keys.start, region.rows.start), region.rows]
        for piece in pieces:
            seen = common(piece, keys)
            if seen is not None:
                mask = _mask_of(Region(region.batch, region.rows, seen), spec, q)
                yield _CpuCall(region.batch, shifted(region.rows, -start), shifted(seen, -first_key), mask)


def _mask_of(region: Region, spec: AttentionSpec, q: Tensor) -> dict[str, bool | Tensor]:
    """The operator's is_causal or attn_mask for a region."""
    if spec.window is None and (not spec.causal or region.is_square):
        return {"is_causal": spec.causal}
    if spec.window is None and region.keys.stop <= region.rows.start + 1:
        return {"is_causal": False}
    hidden = region.masked(spec, q.device)
    assert hidden is not None
    return {"is_causal": False, "attn_mask": q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))}


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """(out, lse), in place, with what other keys contribute."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp()[..., None]).add_(part * (part_lse - both).exp()[..., None].to(part.dtype))
    lse.copy_(both)


def _is_whole(spec: AttentionSpec) -> bool:
    """Whether neither a window nor documents are asked for."""
    return spec.window is None and spec.documents is None


def _of_one_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All heads padded with zeros to the largest size among them: scores and outputs are the same."""
    size = max(t.shape[3] for t in tensors)
    return tuple(t if t.shape[3] == size else F.pad(t, (0, size - t.shape[3])) for t in tensors)


class TorchCudaFlash(FlashForm):
    """PyTorch's build of FlashAttention 2: ``_scaled_dot_product_flash_attention``, and for windows and documents
    the ``_flash_attention_forward`` under it."""

    name = "torch-cuda-flash"
    copies_slices = True  # `contiguous()` of both, in ATen/native/transformers/cuda/attention_backward.cu

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        return flash_refusal(request) or unserved(request, (WINDOW, DOCUMENTS, SINKS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        if not _is_whole(spec):
            return super().forward(q, k, v, spec)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, spec.causal, False, scale=spec.scale_for(q.shape[3])
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        if not _is_whole(spec):
            return super().backward(dout, q, k, v, out, lse, spec)
        unused = _unused_random_state(q)
        S = q.shape[2]
        scale = spec.scale_for(q.shape[3])
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, S, S, 0.0, spec.causal, unused, unused, scale=scale
        )
        return dq, dk, dv

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, packing: Packing | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *_boundaries(q, k, packing), 0.0, spec.causal, False, **_scale_and_window(spec, q)
        )
        return out, lse

    def _gradients(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k = tensors[1:3]
        unused = _unused_random_state(q)
        dq, dk, dv = _aten._flash_attention_backward(
            *tensors, *_boundaries(q, k, packing), 0.0, spec.causal, unused, unused, **_scale_and_window(spec, q)
        )
        return dq, dk, dv


def _boundaries(q: Tensor, k: Tensor, packing: Packing | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """cum_seq_q, cum_seq_k, max_q, max_k."""
    if packing is None:
        return None, None, q.shape[1], k.shape[1]
    return packing.cu_seqlens, packing.cu_seqlens, packing.longest, packing.longest


def _scale_and_window(spec: AttentionSpec, q: Tensor) -> dict[str, float | int | None]:
    left, right = (None, None) if spec.window is None else (spec.window - 1, 0)
    return {"scale": spec.scale_for(q.shape[-1]), "window_size_left": left, "window_size_right": right}


class TorchCudnn(Kernel):
    """``_scaled_dot_product_cudnn_attention``: cuDNN's flash attention, GQA natively.

    PyTorch keeps cuDNN's graphs by the sizes and strides of q, k and v alone (``MHAParams``, in ATen/native/cudnn/
    MHA.cpp), and a graph has the strides of `out` and `dout` in it: were they others than those of the call it was
    made for, gradients would be wrong without a word. Backward gives both in the one layout that forward makes for q.
    """

    name = "torch-cudnn"
    copies_slices = True
    _lse_dims = 4

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`.

        The conditions are PyTorch's own (``can_use_cudnn_attention``, in ATen/native/transformers/cuda/sdp_utils.cpp).
        """
        reason = cuda_refusal(request) or unserved(request, (SINKS,))
        if reason is not None:
            return reason
        found, version = capability(request.device), torch.backends.cudnn.version()
        if found is not None and found[0] < 8:
            return f"it is made for GPUs of compute capability 8 and up, this is {found[0]}"
        if request.head_dim > 128:
            return f"its backward has head sizes up to 128, this is {request.head_dim}"
        if version is not None and version < _CUDNN:
            return f"it needs cuDNN {_words(_CUDNN)}, for lengths that 128 does not divide; this is {_words(version)}"
        if not torch.backends.cuda.cudnn_sdp_enabled():
            return "it is switched off (torch.backends.cuda.enable_cudnn_sdp)"
        if must_be_deterministic():
            return "its backward is not deterministic, which torch.use_deterministic_algorithms asks for"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, spec.causal, False, scale=spec.scale_for(q.shape[3])
        )
        self._lse_dims = lse.dim()  # [B, n, S, 1] or [B, n, S], by the release of PyTorch
        return out, lse.reshape(q.shape[:3])

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        unused = _unused_random_state(q)
        dout, out, lse = _laid_out_as(dout, q), _laid_out_as(out, q), lse.contiguous()
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse[..., None] if self._lse_dims == 4 else lse,
            unused,
            unused,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            spec.causal,
            scale=spec.scale_for(q.shape[3]),
        )
        return dq, dk, dv


_CUDNN = 91501
"""The first release that PyTorch puts first itself (pytorch#169849)."""


def _words(version: int) -> str:
    """A version of cuDNN as it is written: 9.15.1."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _laid_out_as(t: Tensor, q: Tensor) -> Tensor:
    """`t`, or a copy, with the strides of a new tensor like `q`, which is how the operator lays out its result."""
    wanted = torch.empty_like(q, device="meta")
    if all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), wanted.stride(), strict=True)):
        return t
    return torch.empty_strided(t.shape, wanted.stride(), dtype=t.dtype, device=t.device).copy_(t)


class TorchEfficient(Kernel):
    """``_scaled_dot_product_efficient_attention``: memory-efficient attention, float32 too. KV heads are repeated."""

    name = "torch-efficient"
    copies_slices = True

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        # Its lse is padded to a multiple of 32 rows, which sinks can't be merged into.
        return cuda_refusal(request, (*HALF_PRECISION, torch.float32)) or unserved(request, (VALUE_SIZE,))

    def lse_like(self, q: Tensor) -> Tensor:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        return q.new_empty(*q.shape[:2], -(-q.shape[2] // 32) * 32, dtype=torch.float32)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q,
            per_query_head(k, q),
            per_query_head(v, q),
            None,
            True,
            0.0,
            spec.causal,
            scale=spec.scale_for(q.shape[3]),
        )
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        unused = constant((0,), q)[0]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout,
            q,
            per_query_head(k, q),
            per_query_head(v, q),
            None,
            out,
            lse,
            unused,
            unused,
            0.0,
            [True, True, True, False],
            spec.causal,
            scale=spec.scale_for(q.shape[3]),
        )
        return dq, sum_groups(dk, k), sum_groups(dv, v)


def _unused_random_state(q: Tensor) -> Tensor:
    """The random state is read only with dropout; without it any tensor of the right type does."""
    return constant((0, 0), q)
