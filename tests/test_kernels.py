"""Kernels against each other, the choice among them, and flash-attn's call forms against stand-ins."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import re
import sys
import types
import warnings

import pytest
import torch

from upipe_integrations import (
    AttentionProjections,
    KernelRequest,
    Mode,
    Projection,
    Schedule,
    Staging,
    Weights,
    kernels,
    select_kernel,
    upipe_attention,
)
from upipe_integrations.kernels import (
    KERNELS,
    AttentionSpec,
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    MathKernel,
    order_of_preference,
    torch_flash,
)
from upipe_integrations.proof.kernels import FEATURES, SIZES, TOLERANCE, kernel_cases, kernel_errors

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _chosen_anew():
    """Tests here differ in what is installed."""
    kernels._select.cache_clear()
    yield
    kernels._select.cache_clear()


def _inputs(n=4, v=2, S=37, D=16, batch=2, dtype=torch.float64, device="cpu"):
    g = torch.Generator().manual_seed(0)

    def rand(heads):  # as the engine gives them: views of [S, B, heads, D]
        return torch.randn(S, batch, heads, D, generator=g, dtype=torch.float64).to(device, dtype).permute(1, 2, 0, 3)

    return rand(n), rand(v), rand(v), rand(n)


def _written_out(q, k, v, dout, spec):
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    out = torch.stack(
        [
            torch.softmax(_mask(q[:, i] @ k[:, i // groups].mT * spec.scale_for(q.shape[3]), spec), -1)
            @ v[:, i // groups]
            for i in range(q.shape[1])
        ],
        1,
    )
    out.backward(dout)
    return out.detach(), q.grad, k.grad, v.grad


def _mask(scores, spec):
    S = scores.shape[-1]
    return scores.masked_fill(
        torch.ones(S, S, dtype=torch.bool, device=scores.device).triu(1) & spec.causal, -torch.inf
    )


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(causal=False), AttentionSpec(scale=0.7)])
@pytest.mark.parametrize("name", ["math", "torch-cpu-flash"])
def test_out_and_gradients(name, spec):
    q, k, v, dout = _inputs()
    kernel = KERNELS[name]
    out, lse = kernel.forward(q, k, v, spec)
    got = (out, *kernel.backward(dout, q, k, v, out, lse, spec))
    for ours, right in zip(got, _written_out(q, k, v, dout, spec), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)
    scores = q.double() @ k.repeat_interleave(2, 1).mT * spec.scale_for(16)
    torch.testing.assert_close(lse, torch.logsumexp(_mask(scores, spec), -1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(causal=False)])
def test_sums_over_tiles_are_as_fine_at_every_length(spec):
    """In bfloat16 PyTorch's operator adds dk and dv up over tiles of 64 query rows below 768 rows, of 256 beyond."""
    errors = {}
    for S in (256, 512, 1024):
        q, k, v, dout = _inputs(2, 2, S, D=64, batch=1, dtype=torch.bfloat16)
        out, lse = KERNELS["torch-cpu-flash"].forward(q, k, v, spec)
        got = KERNELS["torch-cpu-flash"].backward(dout, q, k, v, out, lse, spec)
        right = _written_out(*(t.double() for t in (q, k, v, dout)), spec)[1:]
        errors[S] = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, right, strict=True)]
    for of_256, of_512, of_1024 in zip(*errors.values(), strict=True):
        assert of_512 < 1.2 * max(of_256, of_1024)  # by one call over all rows 1.27


def test_math_works_through_blocks_of_rows(monkeypatch):
    from upipe_integrations.kernels import math

    q, k, v, dout = _inputs()
    for spec in (AttentionSpec(), AttentionSpec(causal=False)):
        monkeypatch.setattr(math, "_BLOCK_ROWS", 8)
        out, lse = MathKernel().forward(q, k, v, spec)
        got = (out, *MathKernel().backward(dout, q, k, v, out, lse, spec))
        for ours, right in zip(got, _written_out(q, k, v, dout, spec), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (KernelRequest(CPU, torch.float32, 64), "torch-cpu-flash"),
        (KernelRequest(CPU, torch.float64, 64), "torch-cpu-flash"),
        (KernelRequest(CUDA, torch.bfloat16, 128), "torch-cuda-flash"),
        (KernelRequest(CUDA, torch.float32, 128), "torch-efficient"),
        (KernelRequest(CUDA, torch.float64, 128), "math"),
        (KernelRequest(CUDA, torch.bfloat16, 128, spec=AttentionSpec(window=8)), "torch-cuda-flash"),
        (KernelRequest(CUDA, torch.bfloat16, 128, spec=AttentionSpec(softcap=8.0)), "math"),
        (KernelRequest(CUDA, torch.bfloat16, 128, 64), "torch-efficient"),
        (KernelRequest(CUDA, torch.bfloat16, 100), "math"),
    ],
)
def test_auto_picks_by_device_dtype_and_head_size(request_, expected, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select_kernel("auto", request_).name == expected


def test_kernels_are_asked_once_for_a_request(monkeypatch):
    """Not in every layer of every forward: they look for packages on disk."""
    looked = []
    monkeypatch.setattr("importlib.util.find_spec", looked.append)

    def not_found(name):
        looked.append(name)
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", not_found)
    for head_dim in (128, 128, 64, 128):
        select_kernel("auto", KernelRequest(CUDA, torch.bfloat16, head_dim))
    once = len(looked) // 2
    assert looked == looked[:once] * 2 and len(set(looked)) == once > 0


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        (
            "torch-cuda-flash",
            KernelRequest(CPU, torch.bfloat16, 64),
            r"needs CUDA tensors.*Use 'auto' or one of: torch-c",
        ),
        ("torch-cuda-flash", KernelRequest(CUDA, torch.float32, 64), r"float16 or bfloat16, these are torch.float32"),
        ("torch-cuda-flash", KernelRequest(CUDA, torch.bfloat16, 36), r"multiple of 8 up to 256, this is 36"),
        ("torch-cpu-flash", KernelRequest(CUDA, torch.bfloat16, 64), r"needs CPU tensors, these are on cuda"),
        ("flash-attn-2", KernelRequest(CUDA, torch.bfloat16, 64), r"not installed \(pip install"),
    ],
)
def test_a_named_kernel_that_cannot_serve_says_why(name, request_, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"upipe.kernel = '{name}'.*{message}"):
        select_kernel(name, request_)


# Stand-ins with the signatures of the released packages (order, names and defaults of their arguments as
# published; annotations and the many options that stay at their defaults are left out). Each computes with the
# math kernel, and records what it was asked.
class _Recorder:
    def __init__(self):
        self.calls = []

    def attend(self, q, k, v, *, scale, causal, window, softcap, cu=None):
        self.calls.append({"window": window, "softcap": softcap, "cu": None if cu is None else cu.tolist()})
        spec, q, k, v = self._prepare(q, k, v, scale, causal, window, softcap, cu)
        out, lse = MathKernel().forward(q, k, v, spec)
        out = out.transpose(1, 2)
        return (out, lse) if cu is None else (out[0], lse[0])

    def gradients(self, dout, q, k, v, out, lse, dq, dk, dv, *, scale, causal, window, softcap, cu=None):
        self.calls.append({"window": window, "softcap": softcap, "cu": None if cu is None else cu.tolist()})
        targets = (dq, dk, dv)
        assert all(t.is_contiguous() for t in targets)
        if cu is not None:
            dout, out, lse = dout[None], out[None], lse[None]
            targets = tuple(t[None] for t in targets)
        spec, q, k, v = self._prepare(q, k, v, scale, causal, window, softcap, cu)
        grads = MathKernel().backward(dout.transpose(1, 2), q, k, v, out.transpose(1, 2), lse, spec)
        for target, grad in zip(targets, grads, strict=True):
            target.copy_(grad.transpose(1, 2))

    @staticmethod
    def _prepare(q, k, v, scale, causal, window, softcap, cu):
        left, right = window
        off = (None, -1)
        assert right in off if left in off else right == 0
        documents = None
        if cu is not None:
            assert cu.dtype == torch.int32 and q.dim() == 3
            documents = (tuple(cu.tolist()),)
            q, k, v = q[None], k[None], v[None]
        spec = AttentionSpec(causal, scale, None if left in off else left + 1, softcap or None, None, documents)
        return spec, *(t.transpose(1, 2) for t in (q, k, v))


def _fa2_26(r):
    """flash-attn 2.6: a window pair, eight results."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
    ):
        assert dropout_p == 0.0 and alibi_slopes is None and return_softmax is False
        out, lse = r.attend(q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap)
        return out, q, k, v, out, lse, None, torch.empty(2)

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, return_softmax, block_table, leftpad_k=None,
    ):  # fmt: skip
        assert block_table is None
        out, lse = r.attend(
            q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, cu=cu_seqlens_q
        )
        return out, q, k, v, out, lse, None, torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert deterministic is False
        r.gradients(
            dout, q, k, v, out, softmax_lse, dq, dk, dv,
            scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        )  # fmt: skip
        return dq, dk, dv, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        r.gradients(
            dout, q, k, v, out, softmax_lse, dq, dk, dv,
            scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, cu=cu_seqlens_q,
        )  # fmt: skip
        return dq, dk, dv, None

    functions = (_flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward)
    return {f.__name__: f for f in functions}


def _fa2_28(r):
    """flash-attn 2.7 and 2.8: two window numbers, four results."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        window = (window_size_left, window_size_right)
        out, lse = r.attend(q, k, v, scale=softmax_scale, causal=causal, window=window, softcap=softcap)
        return out, lse, torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        window = (window_size_left, window_size_right)
        out, lse = r.attend(
            q, k, v, scale=softmax_scale, causal=causal, window=window, softcap=softcap, cu=cu_seqlens_q
        )
        return out, lse, torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        window = (window_size_left, window_size_right)
        r.gradients(
            dout, q, k, v, out, softmax_lse, dq, dk, dv,
            scale=softmax_scale, causal=causal, window=window, softcap=softcap,
        )  # fmt: skip
        return torch.empty(0)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        window = (window_size_left, window_size_right)
        r.gradients(
            dout, q, k, v, out, softmax_lse, dq, dk, dv,
            scale=softmax_scale, causal=causal, window=window, softcap=softcap, cu=cu_seqlens_q,
        )  # fmt: skip
        return torch.empty(0)

    functions = (_flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward)
    return {f.__name__: f for f in functions}


def _fa3(r):
    """flash_attn_interface (hopper): one function for dense and packed, is_causal in backward."""

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1,
        window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None,
        num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        window = (window_size_left, window_size_right)
        out, lse = r.attend(
            q, k, v, scale=softmax_scale, causal=causal, window=window, softcap=softcap, cu=cu_seqlens_q
        )
        return out, lse, torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        window = (window_size_left, window_size_right)
        r.gradients(
            dout, q, k, v, out, softmax_lse, dq, dk, dv,
            scale=softmax_scale, causal=is_causal, window=window, softcap=softcap, cu=cu_seqlens_q,
        )  # fmt: skip
        return torch.empty(0)

    return {f.__name__: f for f in (_flash_attn_forward, _flash_attn_backward)}


def _fa3_early(r):
    """The first releases of flash_attn_interface: a window pair and causal in backward."""
    functions = _fa3(r)
    newer = functions["_flash_attn_backward"]

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
        max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False,
        sm_margin=0,
    ):  # fmt: skip
        return newer(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, None, None, max_seqlen_q, max_seqlen_k,
            dq, dk, dv, softmax_scale, causal, *window_size, softcap,
        )  # fmt: skip

    return {**functions, "_flash_attn_backward": _flash_attn_backward}


def _fa3_28(r):
    """flash_attn_interface of tags 2.7.3 to 2.8.3: arguments of caches and float8 without defaults."""

    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        off = (k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, page_table, rotary_cos, q_descale)
        assert all(value is None for value in off)
        attended, lse = r.attend(
            q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, cu=cu_seqlens_q
        )
        return attended, lse, torch.empty(0), torch.empty(0)

    return {**_fa3_early(r), "_flash_attn_forward": _flash_attn_forward}


def _fa3_27(r):
    """flash_attn_interface of tags 2.7.0 to 2.7.2: dense, without a softcap, and seven results."""

    def _flash_attn_forward(
        q, k, v, softmax_scale, causal, window_size, descale_q=None, descale_k=None, descale_v=None, gqa_parallel=False
    ):
        out, lse = r.attend(q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=0.0)
        return out, q, k, v, out, lse, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size, deterministic=False
    ):
        scores = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": 0.0}
        r.gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, **scores)
        return dq, dk, dv, None

    return {f.__name__: f for f in (_flash_attn_forward, _flash_attn_backward)}


def _fa4(r):
    """flash-attn-4 4.0.0b10 to b36: None switches off, lse on request."""

    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
        intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None,
        mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None,
    ):  # fmt: skip
        assert return_lse and out is None and lse is None
        window = (window_size_left, window_size_right)
        result = r.attend(q, k, v, scale=softmax_scale, causal=causal, window=window, softcap=softcap, cu=cu_seqlens_q)
        return (*result, None, None, None)

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
        num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2,
        AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
        seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
        score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, block_sparse_tensors=None, dlse=None,
    ):  # fmt: skip
        window = (window_size_left, window_size_right)
        r.gradients(
            dout, q, k, v, out, lse, dq, dk, dv,
            scale=softmax_scale, causal=causal, window=window, softcap=softcap, cu=cu_seqlens_q,
        )  # fmt: skip
        return dq, dk, dv

    return {f.__name__: f for f in (_flash_attn_fwd, _flash_attn_bwd)}


class _AsCustomOp:
    """torch.library.custom_op hides the signature behind ``__call__(*args, **kwargs)``, as in 2.7 and later."""

    def __init__(self, function):
        self._init_fn = function

    def __call__(self, *args, **kwargs):
        return self._init_fn(*args, **kwargs)


RELEASES = {
    "2.6": (FlashAttention2(), _fa2_26),
    "2.8": (FlashAttention2(), _fa2_28),
    "3": (FlashAttention3(), _fa3),
    "3 early": (FlashAttention3(), _fa3_early),
    "3 of 2.8": (FlashAttention3(), _fa3_28),
    "3 of 2.7": (FlashAttention3(), _fa3_27),
    "4": (FlashAttention4(), _fa4),
}
SPECS = {
    "causal": AttentionSpec(),
    "full, scaled": AttentionSpec(causal=False, scale=0.3),
    "window": AttentionSpec(window=5),
    "softcap": AttentionSpec(softcap=1.5),
    "documents": AttentionSpec(documents=((0, 5, 30, 37),)),
    "documents by row, window, softcap": AttentionSpec(documents=((0, 37), (0, 8, 37)), window=4, softcap=2.0),
}


def _install(monkeypatch, kernel, functions, version="4.0.0b30"):
    """Put functions where a package has them, and nothing where others are."""
    if kernel.distribution is not None:
        metadata = {"distribution": lambda name: object(), "version": lambda name: version}
        for name, function in metadata.items():
            monkeypatch.setattr(f"importlib.metadata.{name}", function)
    parts = kernel.module.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    vars(sys.modules[kernel.module]).update(functions)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("custom_op", [False, True])
@pytest.mark.parametrize("release", RELEASES)
def test_flash_attention_is_called_in_the_form_of_its_release(release, custom_op, spec, monkeypatch):
    """Public fault 29."""
    kernel, make = RELEASES[release]
    recorder = _Recorder()
    wrap = _AsCustomOp if custom_op else lambda function: function
    _install(monkeypatch, kernel, {name: wrap(function) for name, function in make(recorder).items()})
    spec = SPECS[spec]
    q, k, v, dout = _inputs()
    if release == "3 of 2.7" and (spec.softcap or spec.documents):
        with pytest.raises(ValueError, match=r"has no (softcap|cu_seqlens_q).*, which this model needs"):
            kernel.forward(q, k, v, spec)
        return
    out, lse = kernel.forward(q, k, v, spec)
    got = (out, *kernel.backward(dout, q, k, v, out, lse, spec))
    right_out, right_lse = MathKernel().forward(q, k, v, spec)
    right = (right_out, *MathKernel().backward(dout, q, k, v, right_out, right_lse, spec))
    for ours, theirs in zip((*got, lse), (*right, right_lse), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    rows = 1 if spec.documents is None else 2
    assert len(recorder.calls) == 2 * rows
    assert {call["softcap"] or None for call in recorder.calls} == {spec.softcap}
    assert all((call["cu"] is None) == (spec.documents is None) for call in recorder.calls)


@pytest.mark.parametrize(
    ("arguments", "spec", "message"),
    [
        (
            "q, k, v, softmax_scale, causal, something_new",
            AttentionSpec(),
            r"wants arguments .*something_new.*Use kernel 'auto'",
        ),
        ("q, k, v, softmax_scale, causal", AttentionSpec(window=4), r"has no window_size, which this model needs"),
        ("q, k, v, softmax_scale, causal, window_size", AttentionSpec(softcap=1.0), r"has no softcap, which this"),
    ],
)
def test_a_release_without_what_is_needed_is_refused(arguments, spec, message, monkeypatch):
    """An old release must not silently attend without the window or the cap."""
    scope: dict = {}
    exec(f"def _flash_attn_forward({arguments}): raise AssertionError('called')", scope)
    _install(monkeypatch, FlashAttention2(), {"_flash_attn_forward": scope["_flash_attn_forward"]})
    q, k, v, _ = _inputs()
    with pytest.raises(ValueError, match=message):
        FlashAttention2().forward(q, k, v, spec)


# ---------------------------------------------------------------- what is installed, and what it can do


BF16 = KernelRequest(CUDA, torch.bfloat16, 128)


def _nothing_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name.startswith("flash") else find(name))


def test_auto_takes_flash_attn_where_it_is_installed(monkeypatch):
    _nothing_installed(monkeypatch)
    _install(monkeypatch, FlashAttention2(), _fa2_28(_Recorder()))
    assert select_kernel("auto", BF16).name == "flash-attn-2"
    assert select_kernel("auto", dataclasses.replace(BF16, device=CPU)).name == "torch-cpu-flash"
    kernels._select.cache_clear()
    _install(monkeypatch, FlashAttention3(), _fa3_28(_Recorder()))
    assert select_kernel("auto", BF16).name == "flash-attn-3"


@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol: _ZN3c10\n4"), OSError("libcudart.so.12"), RuntimeError("x")]
)
def test_a_package_that_is_broken_leaves_the_others(error, monkeypatch):
    """The usual state of flash-attn after another torch was installed."""
    _nothing_installed(monkeypatch)
    _install(monkeypatch, FlashAttention2(), _fa2_28(_Recorder()))
    load = importlib.import_module

    def broken(name, *package):
        if name == FlashAttention2.module:
            raise error
        return load(name, *package)

    monkeypatch.setattr("importlib.import_module", broken)
    assert select_kernel("auto", BF16).name == "torch-cuda-flash"
    said = re.escape(f"can't be imported ({type(error).__name__}: {' '.join(str(error).split())})")
    with pytest.raises(ValueError, match=rf"upipe\.kernel = 'flash-attn-2': .*{said}.*built again.*one of: torch-cuda"):
        select_kernel("flash-attn-2", BF16)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (AttentionSpec(window=8), "flash-attn-3"),
        (AttentionSpec(softcap=5.0), "math"),
        (AttentionSpec(documents=((0, 5, 16),)), "torch-cuda-flash"),
    ],
)
def test_auto_moves_on_from_a_release_that_can_not(spec, expected, monkeypatch):
    """Found when it is asked for, not at the first forward."""
    _nothing_installed(monkeypatch)
    _install(monkeypatch, FlashAttention3(), _fa3_27(_Recorder()))
    assert select_kernel("auto", dataclasses.replace(BF16, spec=spec)).name == expected


def test_flash_attn_4_is_told_by_its_distribution(monkeypatch):
    """Flash-attn 2 has a folder ``flash_attn/cute`` too."""
    _nothing_installed(monkeypatch)
    _install(monkeypatch, FlashAttention4(), _fa4(_Recorder()))
    assert FlashAttention4().refusal(BF16) is None

    def not_found(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", not_found)
    assert "not installed (pip install --pre flash-attn-4)" in FlashAttention4().refusal(BF16)


@pytest.mark.parametrize(
    ("D", "Dv", "serves"),
    [(64, 64, True), (64, 128, True), (64, 256, True), (64, 512, False), (192, 128, True), (160, 104, True)]
    + [(96, 64, False), (128, 64, False), (256, 128, False), (192, 96, False), (256, 256, True)],
)
def test_value_sizes_of_flash_attention_3(D, Dv, serves, monkeypatch):
    _install(monkeypatch, FlashAttention3(), _fa3(_Recorder()))
    refusal = FlashAttention3().refusal(KernelRequest(CUDA, torch.bfloat16, D, Dv))
    assert (refusal is None) == serves
    assert serves or f"these are {D} and {Dv}" in refusal


@pytest.mark.parametrize(
    ("flag", "request_", "what"),
    [
        ("BACKWARD", BF16, "backward"),
        ("LOCAL", dataclasses.replace(BF16, spec=AttentionSpec(window=4)), "windows"),
        ("SOFTCAP", dataclasses.replace(BF16, spec=AttentionSpec(softcap=4.0)), "softcap"),
        ("VARLEN", dataclasses.replace(BF16, spec=AttentionSpec(documents=((0, 4, 8),))), "packed documents"),
        ("FP16", dataclasses.replace(BF16, dtype=torch.float16), "float16"),
        ("HDIM96", dataclasses.replace(BF16, head_dim=80), "heads of 96"),
    ],
)
def test_what_a_slim_build_leaves_out(flag, request_, what, monkeypatch):
    _install(monkeypatch, FlashAttention3(), _fa3(_Recorder()))
    config = types.ModuleType("flash_attn_config")
    config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": True}}
    monkeypatch.setitem(sys.modules, "flash_attn_config", config)
    refusal = FlashAttention3().refusal(request_)
    assert refusal == f"its build has no {what} (FLASHATTENTION_DISABLE_{flag})"
    config.CONFIG = {"build_flags": {f"FLASHATTENTION_DISABLE_{flag}": False}}
    assert FlashAttention3().refusal(request_) is None


@pytest.mark.parametrize(
    ("capability", "request_", "message"),
    [
        (10, dataclasses.replace(BF16, head_dim=192), "head sizes up to 128, and 256; these are 192"),
        (10, dataclasses.replace(BF16, head_dim=256, spec=AttentionSpec(softcap=2.0)), "no softcap for heads of 256"),
        (10, dataclasses.replace(BF16, head_dim=256), None),
        (9, dataclasses.replace(BF16, head_dim=192), None),
        (8, BF16, "not made for GPUs of compute capability 8"),
    ],
)
def test_head_sizes_of_flash_attention_4(capability, request_, message, monkeypatch):
    _install(monkeypatch, FlashAttention4(), _fa4(_Recorder()))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (capability, 0))
    refusal = FlashAttention4().refusal(request_)
    assert refusal is None if message is None else message in refusal


def test_early_betas_of_flash_attention_4_have_no_softcap_of_documents(monkeypatch):
    both = dataclasses.replace(BF16, spec=AttentionSpec(softcap=2.0, documents=((0, 4, 8),)))
    for version, serves in (("4.0.0b21", False), ("4.0.0b24", True), ("4.0.0", True), ("4.1.0", True)):
        _install(monkeypatch, FlashAttention4(), _fa4(_Recorder()), version)
        assert (FlashAttention4().refusal(both) is None) == serves, version


def test_flash_attention_4_is_given_a_contiguous_gradient_with_documents(monkeypatch):
    """flash-attention#2611: row strides that add up to 2^31 elements."""
    recorder, strides = _Recorder(), []
    functions = _fa4(recorder)
    backward = functions["_flash_attn_bwd"]

    def noted(q, k, v, out, dout, *rest, **more):
        strides.append(dout.is_contiguous())
        return backward(q, k, v, out, dout, *rest, **more)

    noted.__wrapped__ = backward
    _install(monkeypatch, FlashAttention4(), {**functions, "_flash_attn_bwd": noted})
    q, k, v, dout = _inputs()
    spec = SPECS["documents"]
    out, lse = FlashAttention4().forward(q, k, v, spec)
    FlashAttention4().backward(dout.transpose(1, 2).contiguous().transpose(1, 2)[..., :], q, k, v, out, lse, spec)
    wide = torch.cat([dout, dout], -1)[..., : dout.shape[-1]]
    FlashAttention4().backward(wide, q, k, v, out, lse, spec)
    assert strides and all(strides)


# ---------------------------------------------------------------- the choice, by GPU


def _gpu(monkeypatch, major, minor=0, cudnn=92000):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (major, minor))
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: cudnn)


@pytest.mark.parametrize("major", [None, 7, 8, 9, 10, 11, 12])
def test_every_kernel_has_a_place_in_every_order(major, monkeypatch):
    if major is not None:
        _gpu(monkeypatch, major)
    order = [kernel.name for kernel in order_of_preference(CUDA)]
    assert sorted(order) == sorted(KERNELS) and order[-1] == "math"


_ALL = {"flash-attn-2", "flash-attn-3", "flash-attn-4"}
WINDOWED = dataclasses.replace(BF16, spec=AttentionSpec(window=8))
PACKED = dataclasses.replace(BF16, spec=AttentionSpec(documents=((0, 5, 16),)))
WITH_SINKS = dataclasses.replace(BF16, sinks=True)
IN_BLOCKS = dataclasses.replace(BF16, blocks=True)


@pytest.mark.parametrize(
    ("capability", "installed", "request_", "expected"),
    [
        ((9, 0), _ALL, BF16, "flash-attn-3"),
        ((9, 0), {"flash-attn-2"}, BF16, "torch-cudnn"),
        ((9, 0), set(), BF16, "torch-cudnn"),
        ((9, 0), set(), WITH_SINKS, "torch-cudnn"),
        ((9, 0), set(), WINDOWED, "torch-cuda-flash"),
        ((9, 0), {"flash-attn-2"}, WINDOWED, "flash-attn-2"),
        ((9, 0), {"flash-attn-2"}, IN_BLOCKS, "flash-attn-2"),
        ((9, 0), set(), IN_BLOCKS, "torch-cuda-flash"),
        ((9, 0), set(), dataclasses.replace(BF16, head_dim=256), "torch-cuda-flash"),
        ((10, 0), _ALL, BF16, "torch-cudnn"),
        ((10, 0), _ALL, PACKED, "flash-attn-4"),
        ((10, 3), {"flash-attn-2"}, PACKED, "flash-attn-2"),
        ((8, 0), _ALL, BF16, "flash-attn-2"),
        ((8, 0), set(), BF16, "torch-cuda-flash"),
        ((8, 9), set(), dataclasses.replace(BF16, head_dim=208), "torch-efficient"),
        ((8, 0), set(), dataclasses.replace(BF16, head_dim=208), "torch-cuda-flash"),
        ((12, 0), set(), dataclasses.replace(BF16, head_dim=256), "torch-cuda-flash"),
        ((7, 5), _ALL, dataclasses.replace(BF16, dtype=torch.float16), "torch-efficient"),
        ((7, 0), set(), BF16, "math"),
    ],
)
def test_auto_by_capability(capability, installed, request_, expected, monkeypatch):
    _nothing_installed(monkeypatch)
    for kernel, functions in (
        (FlashAttention2(), _fa2_28),
        (FlashAttention3(), _fa3_28),
        (FlashAttention4(), _fa4),
    ):
        if kernel.name in installed:
            _install(monkeypatch, kernel, functions(_Recorder()))
    _gpu(monkeypatch, *capability)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert select_kernel("auto", request_).name == expected
    assert len(warned) == (expected == "math")


@pytest.mark.parametrize(("version", "kernel"), [(91500, "torch-cuda-flash"), (91501, "torch-cudnn")])
def test_cudnn_before_its_mended_lengths_is_left(version, kernel, monkeypatch):
    _nothing_installed(monkeypatch)
    _gpu(monkeypatch, 9, cudnn=version)
    assert select_kernel("auto", BF16).name == kernel
    if version == 91500:
        with pytest.raises(ValueError, match=r"needs cuDNN 9\.15\.1, for lengths that 128 .* this is 9\.15\.0"):
            select_kernel("torch-cudnn", BF16)


def test_cudnn_that_is_switched_off_is_left(monkeypatch):
    _nothing_installed(monkeypatch)
    _gpu(monkeypatch, 9)
    assert select_kernel("auto", BF16).name == "torch-cudnn"
    monkeypatch.setattr("torch.backends.cuda.cudnn_sdp_enabled", lambda: False)
    assert select_kernel("auto", BF16).name == "torch-cuda-flash"


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_are_honoured(monkeypatch, deterministic):
    """By those that can: the others are left, and refuse to be named."""
    _nothing_installed(monkeypatch)
    _gpu(monkeypatch, 9)
    assert select_kernel("auto", BF16).name == "torch-cuda-flash"
    with pytest.raises(ValueError, match="its backward is not deterministic, which torch"):
        select_kernel("torch-cudnn", BF16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert select_kernel("auto", BF16).name == "torch-cudnn"
    torch.use_deterministic_algorithms(True)
    _install(monkeypatch, FlashAttention3(), _fa3_28(_Recorder()))
    assert FlashAttention3().refusal(BF16) is None
    assert "not deterministic for heads of more than 192" in FlashAttention3().refusal(
        dataclasses.replace(BF16, head_dim=256)
    )
    _gpu(monkeypatch, 12)
    _install(monkeypatch, FlashAttention4(), _fa4(_Recorder()))
    assert "not deterministic on GPUs of compute capability 12" in FlashAttention4().refusal(BF16)


@pytest.mark.parametrize("asked", [False, True])
def test_flash_packages_are_told_to_be_deterministic(asked, monkeypatch):
    functions, told = _fa2_28(_Recorder()), []
    backward = functions["_flash_attn_backward"]
    signature = inspect.signature(backward)

    @functools.wraps(backward)
    def noted(*args, **kwargs):
        told.append(signature.bind(*args, **kwargs).arguments["deterministic"])
        return backward(*args, **kwargs)

    _install(monkeypatch, FlashAttention2(), {**functions, "_flash_attn_backward": noted})
    q, k, v, dout = _inputs()
    torch.use_deterministic_algorithms(asked)
    try:
        out, lse = FlashAttention2().forward(q, k, v, AttentionSpec())
        FlashAttention2().backward(dout, q, k, v, out, lse, AttentionSpec())
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [asked]


def test_flash_attention_3_leaves_room_for_an_exchange_beside_it(monkeypatch):
    """Its kernel stays on every multiprocessor that it is given until it ends."""
    functions, margins = _fa3_28(_Recorder()), {}

    def noted(name):
        function = functions[name]
        signature = inspect.signature(function)
        if "sm_margin" not in signature.parameters:
            return function

        @functools.wraps(function)
        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            margins.setdefault(name, []).append(bound.arguments["sm_margin"])
            return function(*args, **kwargs)

        return call

    _install(monkeypatch, FlashAttention3(), {name: noted(name) for name in functions})
    monkeypatch.setattr(FlashAttention3, "refusal", lambda self, request: None)
    schedule = Schedule.build(heads=4, kv_heads=2, ranks=1, chunk_heads=2)
    for overlap in (False, True):
        x = torch.randn(1, 24, 16, requires_grad=True)
        projections = AttentionProjections(*(Projection(Weights(torch.randn(n * 8, 16)), 8) for n in (4, 2, 2)))
        staging = Staging(schedule, None, FlashAttention3(), mode=Mode(overlap=overlap))
        upipe_attention(x, projections, staging).sum().backward()
    assert margins == {"_flash_attn_forward": [0, 0, 16, 16], "_flash_attn_backward": [0, 0, 16, 16]}
    assert KERNELS["torch-cuda-flash"].beside_exchanges() is KERNELS["torch-cuda-flash"]


def test_a_backward_that_can_not_be_deterministic_is_left(monkeypatch, deterministic):
    """flash-attn before 2.4.1 has no such argument."""
    _nothing_installed(monkeypatch)
    functions = _fa2_28(_Recorder())
    _install(monkeypatch, FlashAttention2(), {**functions, "_flash_attn_backward": lambda dout, q, k, v, out, dq: None})
    assert "can't be deterministic" in FlashAttention2().refusal(BF16)


def test_plain_attention_on_a_gpu_is_not_taken_in_silence(monkeypatch):
    """Nor for a length at which it would take minutes a layer."""
    _nothing_installed(monkeypatch)
    softcap = dataclasses.replace(BF16, spec=AttentionSpec(softcap=30.0))
    with pytest.warns(
        UserWarning, match=r"slow, as no other .* flash-attn-2: it is not installed \(pip install 'upipe"
    ):
        kernel = select_kernel("auto", softcap)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_kernel("auto", softcap) is kernel  # said once
        assert select_kernel("math", softcap).longest(128) is None
        assert select_kernel("auto", dataclasses.replace(softcap, device=CPU)).longest(128) is None
    assert kernel.name == "math" and kernel.longest(128) == 32768


def test_a_sequence_beyond_what_a_kernel_attends_is_refused():
    x = torch.zeros(1, 24, 16)
    projections = AttentionProjections(*(Projection(Weights(torch.zeros(n * 8, 16)), 8) for n in (4, 2, 2)))
    schedule = Schedule.build(heads=4, kv_heads=2, ranks=1, chunk_heads=2)
    with pytest.raises(ValueError, match="kernel 'math' with a sequence of 24 tokens: it is taken for at most 16"):
        upipe_attention(x, projections, Staging(schedule, None, MathKernel(16)))
    upipe_attention(x, projections, Staging(schedule, None, select_kernel("math", BF16)))  # as the message says
    assert FlashAttention3().longest(128) == 2**24 - 1


def test_blocks_that_no_fast_kernel_does_are_refused_and_not_run_by_plain_attention(monkeypatch):
    _nothing_installed(monkeypatch)
    kernel = select_kernel("auto", dataclasses.replace(IN_BLOCKS, spec=AttentionSpec(window=8)))
    assert kernel.name == "torch-cuda-flash" and kernel.block_refusal(AttentionSpec(window=8)) is not None


# ---------------------------------------------------------------- PyTorch's operators


def test_cudnn_is_given_one_layout_whatever_buffers_heads_lie_in(monkeypatch):
    """PyTorch keeps its graphs by the strides of q, k and v alone, while those of out and dout are in them."""
    given = []

    def operator(dout, q, k, v, out, lse, *rest, **more):
        given.append((q.stride(), dout.stride(), out.stride(), tuple(lse.shape), lse.is_contiguous()))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    monkeypatch.setattr(torch_flash._aten, "_scaled_dot_product_cudnn_attention_backward", operator)
    kernel = KERNELS["torch-cudnn"]
    S, n, D = 6, 2, 8
    for B in (1, 2):
        alone = [torch.randn(S, B, n, D).permute(1, 2, 0, 3) for _ in range(3)]
        together = [t.permute(1, 2, 0, 3) for t in torch.randn(S, B, 3 * n, D).split(n, 2)]
        kv = torch.randn(S, B, 1, D).permute(1, 2, 0, 3)
        for q in (alone[0], together[0]):
            given.clear()
            for dout, out in (alone[1:], together[1:]):
                kernel.backward(dout, q, kv, kv, out, torch.zeros(B, S, n).transpose(1, 2), AttentionSpec())
            assert given[0] == given[1], "one graph would serve both"
            assert given[0][3:] == ((B, n, S, 1), True)


def test_cudnn_copies_nothing_that_arrives_alone():
    kernel, (S, n, D) = KERNELS["torch-cudnn"], (6, 2, 8)
    for B in (1, 2):
        alone = [torch.randn(S, B, n, D).permute(1, 2, 0, 3) for _ in range(2)]
        together = torch.randn(S, B, 3 * n, D)[:, :, :n].permute(1, 2, 0, 3)
        for q in (alone[0], together):
            assert torch_flash._laid_out_as(alone[1], q) is alone[1]
        assert torch_flash._laid_out_as(together, alone[0]) is not together
        assert torch.equal(torch_flash._laid_out_as(together, alone[0]), together)
    assert kernel.copies_slices


@pytest.mark.parametrize("name", ["torch-cuda-flash", "torch-cudnn", "torch-efficient"])
@pytest.mark.parametrize("spec", ["causal", "window", "documents"])
def test_torch_operators_take_our_arguments(name, spec):
    """Shapes of results on fake CUDA-like tensors: the operators' own schemas and meta kernels check the call."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kernel, spec = KERNELS[name], SPECS[spec]
    if kernel.refusal(KernelRequest(CUDA, torch.bfloat16, 64, spec=spec)):
        pytest.skip(f"{name} does not do it")
    with FakeTensorMode():
        q, k, v, dout = (torch.empty(64, 1, n, 64, dtype=torch.bfloat16).permute(1, 2, 0, 3) for n in (4, 2, 2, 4))
        if spec.documents is not None:
            spec = AttentionSpec(documents=((0, 5, 64),))
        out, lse = kernel.forward(q, k, v, spec)
        dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, spec)
        assert out.shape == q.shape == dq.shape
        assert dk.shape == k.shape and dv.shape == v.shape
        assert lse.shape == q.shape[:3] or name == "torch-efficient"


# ---------------------------------------------------------------- every kernel against attention written out


@pytest.mark.parametrize("name", ["torch-cpu-flash", "math"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cpu_kernels_in_the_cases_of_the_proof(name, dtype):
    kernel, served = KERNELS[name], 0
    sizes = ((64, 64), (80, 80), (192, 128)) if dtype == torch.float64 else ((64, 64), (192, 128))
    for case in kernel_cases(dtype, sizes=sizes):
        if case.refusal(kernel, CPU) is None:
            errors = kernel_errors(kernel, case, CPU)
            assert max(errors.values()) < TOLERANCE[dtype], f"{case}: {errors}"
            served += 1
    assert served >= 2 * len(sizes) * (len(FEATURES) - 1) - 2


def test_the_cases_have_every_size_feature_and_layout_with_each_other():
    cases = kernel_cases()
    met = {
        ((c.head_dim, c.value_dim), c.feature, what)
        for c in cases
        for what in (f"batch of {c.batch}", f"groups of {c.heads // c.kv_heads}", f"together {c.together}")
    }
    for pair in itertools.product(SIZES, FEATURES):
        assert any((*pair, what) in met for what in ("batch of 1", "batch of 2")), pair
    for feature, what in itertools.product(
        FEATURES,
        ("batch of 1", "batch of 2", "groups of 1", "groups of 4", "groups of 3", "together True", "together False"),
    ):
        assert any((size, feature, what) in met for size in SIZES), (feature, what)
    assert {257, 509, 1} <= {case.length for case in cases}


def test_an_error_in_a_kernel_would_be_seen():
    class Wrong(MathKernel):
        def backward(self, dout, q, k, v, out, lse, spec):
            dq, dk, dv = super().backward(dout, q, k, v, out, lse, spec)
            return dq, dk, dv.roll(1, 2)

    errors = kernel_errors(Wrong(), kernel_cases(torch.float64)[0], CPU)
    assert errors["dv"] > 0.1 and max(errors["out"], errors["dq"], errors["dk"]) < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in KERNELS if n != "torch-cpu-flash"])
def test_cuda_kernels(name):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kernel = KERNELS[name]
    reasons = {str(case): case.refusal(kernel, CUDA) for case in kernel_cases()}
    if all(reasons.values()):
        pytest.skip(f"{name}: {'; '.join(sorted(set(reasons.values())))}")
    errors = {str(c): kernel_errors(kernel, c, CUDA) for c in kernel_cases() if reasons[str(c)] is None}
    assert {case: e for case, e in errors.items() if not max(e.values()) < TOLERANCE[torch.bfloat16]} == {}
