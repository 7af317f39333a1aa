"""Kernels against each other, the choice among them, and flash-attn's call forms against stand-ins."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from upipe_integrations import KernelRequest, select_kernel
from upipe_integrations.kernels import KERNELS, AttentionSpec, FlashAttention2, MathKernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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
        (KernelRequest(CUDA, torch.float32, 128), "math"),
        (KernelRequest(CUDA, torch.bfloat16, 100), "math"),
    ],
)
def test_auto_picks_by_device_dtype_and_head_size(request_, expected, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select_kernel("auto", request_).name == expected


def test_auto_prefers_flash_attn_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert select_kernel("auto", KernelRequest(CUDA, torch.bfloat16, 128)).name == "flash-attn-2"
    assert select_kernel("auto", KernelRequest(CPU, torch.bfloat16, 128)).name == "torch-cpu-flash"


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


# Stand-ins with the signatures of the released packages; each computes with the math kernel.
def _fa2_26():
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
    ):
        assert window_size == (-1, -1) and softcap == 0.0 and alibi_slopes is None and dropout_p == 0.0
        out, lse = _compute(q, k, v, softmax_scale, causal)
        return out, q, k, v, out, lse, None, torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert deterministic is False and window_size == (-1, -1)
        _compute_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
        return dq, dk, dv, None

    return _flash_attn_forward, _flash_attn_backward


def _fa2_28():
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (window_size_left, window_size_right) == (-1, -1)
        return *_compute(q, k, v, softmax_scale, causal), torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        _compute_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
        return torch.empty(0)

    return _flash_attn_forward, _flash_attn_backward


def _compute(q, k, v, scale, causal):
    spec = AttentionSpec(causal=causal, scale=scale)
    out, lse = MathKernel().forward(*(t.transpose(1, 2) for t in (q, k, v)), spec)
    return out.transpose(1, 2), lse


def _compute_backward(dout, q, k, v, out, lse, dq, dk, dv, scale, causal):
    spec = AttentionSpec(causal=causal, scale=scale)
    dout, q, k, v, out = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    for target, grad in zip((dq, dk, dv), MathKernel().backward(dout, q, k, v, out, lse, spec), strict=True):
        assert target.is_contiguous()
        target.copy_(grad.transpose(1, 2))


class _AsCustomOp:
    """torch.library.custom_op hides the signature behind ``__call__(*args, **kwargs)``, as in 2.7 and later."""

    def __init__(self, function):
        self._init_fn = function

    def __call__(self, *args, **kwargs):
        return self._init_fn(*args, **kwargs)


@pytest.mark.parametrize("release", [_fa2_26, _fa2_28])
@pytest.mark.parametrize("custom_op", [False, True])
def test_flash_attn_is_called_in_the_form_of_its_release(release, custom_op, monkeypatch):
    """Public fault 29."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    wrap = _AsCustomOp if custom_op else lambda function: function
    interface._flash_attn_forward, interface._flash_attn_backward = map(wrap, release())
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    q, k, v, dout = _inputs()
    for spec in (AttentionSpec(), AttentionSpec(causal=False, scale=0.3)):
        out, lse = FlashAttention2().forward(q, k, v, spec)
        got = (out, *FlashAttention2().backward(dout, q, k, v, out, lse, spec))
        for ours, right in zip(got, _written_out(q, k, v, dout, spec), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)


def test_an_unknown_flash_attn_release_is_refused(monkeypatch):
    def _flash_attn_forward(q, k, v, softmax_scale, causal, something_new):
        raise AssertionError("called")

    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    q, k, v, _ = _inputs()
    with pytest.raises(ValueError, match=r"wants arguments .*something_new.*Use kernel 'torch-cuda-flash'"):
        FlashAttention2().forward(q, k, v, AttentionSpec())


@pytest.mark.gpu
@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(causal=False)])
@pytest.mark.parametrize("name", ["torch-cuda-flash", "flash-attn-2"])
@pytest.mark.parametrize(("n", "v"), [(1, 1), (4, 1), (8, 2)])
def test_cuda_kernels(name, spec, n, v):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    reason = KERNELS[name].refusal(KernelRequest(CUDA, torch.bfloat16, 64))
    if reason:
        pytest.skip(reason)
    q, k, v_, dout = _inputs(n=n, v=v, S=512, D=64, dtype=torch.bfloat16, device="cuda")
    kernel = KERNELS[name]
    out, lse = kernel.forward(q, k, v_, spec)
    got = (out, *kernel.backward(dout, q, k, v_, out, lse, spec))
    for ours, right in zip(got, _written_out(*(t.double() for t in (q, k, v_, dout)), spec), strict=True):
        # bf16 scores and probabilities: 2^-8 each, a few of them in a row.
        assert (ours.double() - right).norm() / right.norm() < 2**-6
