"""FlashAttention 2, 3 and 4 (packages ``flash-attn``, ``flash-attn-3``, ``flash-attn-4``).

Their low-level functions change call form between releases: a ``window_size`` pair or two numbers, eight
results or four, ``causal`` or ``is_causal``. Arguments are bound by the installed function's own signature and
results are told apart by their number, never by a version string. The signatures bound here were read from
flash-attn 2.3 to 2.8, flash_attn_interface (hopper) of every tag from 2.6.2 on, and flash-attn-4 4.0.0b10 to b36.

All that a package can't do is found when it is asked for, by importing it and binding the request's arguments, so that
``auto`` goes on to another kernel: a package that is broken (built for another torch, say) is refused with its own
words.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from upipe_integrations.kernels.base import (
    DOCUMENTS,
    SINKS,
    SOFTCAP,
    VALUE_SIZE,
    WINDOW,
    AttentionSpec,
    Kernel,
    KernelRequest,
    capability,
    flash_refusal,
    must_be_deterministic,
    unserved,
)
from upipe_integrations.kernels.flash_form import FlashForm, Packing


class _FlashPackage(FlashForm):
    """One FlashAttention package; subclasses say where it is and what it is called.

    Attributes:
        module: where its functions are.
        distribution: what it must be installed as, where another package has a module of that name; None is anything.
        install: how to install it.
        served: the features that it has.
        capabilities: the major numbers of the compute capabilities that it is made for.
        no_window: the number that stands for no window.
    """

    name: str
    module: str
    distribution: str | None = None
    install: str
    served: tuple[str, ...]
    capabilities: range
    no_window: Any = -1
    dense_forward: str
    packed_forward: str
    dense_backward: str
    packed_backward: str

    def refusal(self, request: KernelRequest) -> str | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        reason = flash_refusal(request) or unserved(request, self.served)
        if reason is None and not _is_there(self.module, self.distribution):
            reason = f"it is not installed ({self.install})"
        major, _ = capability(request.device) or (None, None)
        if reason is None and major is not None and major not in self.capabilities:
            reason = f"it is not made for GPUs of compute capability {major}"
        return reason or self._limit(request, major) or _import_failure(self.module) or self._unbindable(request)

    def _limit(self, request: KernelRequest, major: int | None) -> str | None:
        """A refusal of what the package asserts or was built without; `major` is the GPU's, None without one."""
        return None

    def _unbindable(self, request: KernelRequest) -> str | None:
        """A refusal where a function of the installed release can't be called as the request needs."""
        packed = request.spec.documents is not None
        names = (self.packed_forward, self.packed_backward) if packed else (self.dense_forward, self.dense_backward)
        problems = (self._problem(name, request.spec, set(_TENSORS), packed=packed) for name in names)
        problem = next((problem for problem in problems if problem is not None), None)
        if problem is None and must_be_deterministic() and "deterministic" not in self._function(names[1])[1]:
            return (
                f"the installed {self.module}'s backward can't be deterministic, which "
                "torch.use_deterministic_algorithms asks for"
            )
        return problem

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, packing: Packing | None
    ) -> tuple[Tensor, Tensor]:
        name = self.dense_forward if packing is None else self.packed_forward
        results = self._call(name, {"q": q, "k": k, "v": v}, spec, q.shape[-1], packing)
        # Up to flash-attn 2.6, and 2.7 for Hopper: out, q, k, v, padded out, lse, probabilities (, random state).
        return (results[0], results[5]) if len(results) in (7, 8) else (results[0], results[1])

    def _gradients(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = tensors
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        name = self.dense_backward if packing is None else self.packed_backward
        values = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
        self._call(name, {**values, "softmax_lse": lse, "lse": lse}, spec, q.shape[-1], packing)
        return dq, dk, dv

    def _call(
        self, name: str, tensors: dict[str, Tensor], spec: AttentionSpec, head_dim: int, packing: Packing | None
    ) -> Any:
        """Call the package's function `name` with as many of our arguments as its signature has."""
        problem = self._problem(name, spec, set(tensors), packed=packing is not None)
        if problem is not None:
            raise ValueError(f"upipe.kernel = {self.name!r}: {problem}. Use kernel 'auto', or another release of it.")
        function, wanted = self._function(name)
        left = self.no_window if spec.window is None else spec.window - 1
        right = self.no_window if spec.window is None else 0
        values: dict[str, Any] = {
            "softmax_scale": spec.scale_for(head_dim),
            "causal": spec.causal,
            "is_causal": spec.causal,
            "window_size": (left, right),
            "window_size_left": left,
            "window_size_right": right,
            "softcap": spec.softcap or 0.0,
            **_OFF,
            **self._options(),
            "deterministic": must_be_deterministic(),
            **tensors,
        }
        if packing is not None:
            values |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), packing.cu_seqlens)
            values |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), packing.longest)
        return function(**{key: values[key] for key in wanted if key in values})

    def _options(self) -> dict[str, Any]:
        """Further arguments, given where a release's function has them."""
        return {}

    def _function(self, name: str) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
        """The package's function, and its parameters, which torch.library.custom_op hides."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), name)
        return function, inspect.signature(getattr(function, "_init_fn", function)).parameters

    def _problem(self, name: str, spec: AttentionSpec, tensors: set[str], *, packed: bool) -> str | None:
        """Why the function `name` can't be called for `spec` with these tensors; None where it can."""
        try:
            _, wanted = self._function(name)
        except AttributeError:
            return f"the installed {self.module} has no {name}"
        known = {*_SETTINGS, *_OFF, *tensors, *(_PACKED if packed else ())}
        unknown = [key for key, p in wanted.items() if key not in known and p.default is p.empty]
        if unknown:
            return (
                f"the installed {self.module}'s {name} wants arguments this release does not know "
                f"({', '.join(unknown)})"
            )
        missing = [key for key in _needed(spec, packed) if key not in wanted and f"{key}_left" not in wanted]
        if missing:
            return (
                f"the installed {self.module}'s {name} has no {', '.join(missing)}, which this model needs and newer "
                "releases have"
            )
        return None


_TENSORS = ("q", "k", "v", "dout", "out", "dq", "dk", "dv", "softmax_lse", "lse")
_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_SETTINGS = ("softmax_scale", "causal", "is_causal", "window_size", "window_size_left", "window_size_right", "softcap")

# Options at the value that switches them off, where a release has no default for them.
_OFF: dict[str, Any] = {
    "dropout_p": 0.0,
    "alibi_slopes": None,
    "return_softmax": False,
    "return_lse": True,
    "deterministic": False,
    "rng_state": None,
    **dict.fromkeys(
        (*_PACKED, "seqused_q", "seqused_k", "sequed_q", "sequed_k", "block_table", "leftpad_k")
        # hopper from 2.7.3 to 2.8.3: a cache that is written to, rotary embeddings, scales of float8
        + ("k_new", "v_new", "qv", "out", "cu_seqlens_k_new", "page_table", "kv_batch_idx", "rotary_cos", "rotary_sin")
        + ("seqlens_rotary", "q_descale", "k_descale", "v_descale")
    ),
}


def _needed(spec: AttentionSpec, packed: bool) -> list[str]:
    """Arguments without which the request would silently be another one."""
    needed = ["window_size"] if spec.window is not None else []
    needed += ["softcap"] if spec.softcap is not None else []
    return needed + (["cu_seqlens_q"] if packed else [])


def _is_there(module: str, distribution: str | None) -> bool:
    """Whether a module's package is installed, without importing it."""
    package = module.split(".")[0]
    if distribution is not None:
        try:
            importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            return False
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def _import_failure(module: str) -> str | None:
    """Why a module that is installed can't be imported, in its own words; None where it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a broken package raises
        words = " ".join(str(error).split())
        return (
            f"it is installed and can't be imported ({type(error).__name__}: {words}); a package that was built for "
            "another torch must be built again"
        )
    return None


class FlashAttention2(_FlashPackage):
    """``flash_attn.flash_attn_interface``, of 2.7 and newer; an older one is refused what it has not."""

    name = "flash-attn-2"
    module = "flash_attn.flash_attn_interface"
    install = "pip install 'upipe-integrations[flash]'"
    served = (WINDOW, SOFTCAP, DOCUMENTS, SINKS)
    capabilities = range(8, 100)
    dense_forward, packed_forward = "_flash_attn_forward", "_flash_attn_varlen_forward"
    dense_backward, packed_backward = "_flash_attn_backward", "_flash_attn_varlen_backward"


class FlashAttention3(_FlashPackage):
    """``flash_attn_interface``, for Hopper, of tags from 2.7.0 on; value heads may have a size of their own.

    Args:
        sm_margin: multiprocessors that it leaves free. It fills all others from its start to its end (a persistent
            kernel), so that an exchange that is sent beside it would wait for it.
    """

    name = "flash-attn-3"
    module = "flash_attn_interface"
    install = "build it from the folder hopper of github.com/Dao-AILab/flash-attention; the package index has none"
    served = (WINDOW, SOFTCAP, DOCUMENTS, SINKS, VALUE_SIZE)
    capabilities = range(9, 10)
    dense_forward = packed_forward = "_flash_attn_forward"
    dense_backward = packed_backward = "_flash_attn_backward"

    def __init__(self, sm_margin: int = 0) -> None:
        self._sm_margin = sm_margin

    def beside_exchanges(self) -> Kernel:
        """See :class:`~upipe_integrations.kernels.base.Kernel`."""
        return FlashAttention3(_SMS_OF_AN_EXCHANGE)

    def _options(self) -> dict[str, Any]:
        return {"sm_margin": self._sm_margin}

    def longest(self, head_dim: int) -> int | None:
        """See :class:`~upipe_integrations.kernels.base.Kernel`: rows times head size are an int in its kernels."""
        return (2**31 - 1) // head_dim

    def _limit(self, request: KernelRequest, major: int | None) -> str | None:
        """Value sizes of hopper/flash_api.cpp, with backward's, and what a build leaves out."""
        D, Dv = request.head_dim, request.value_dim or request.head_dim
        if Dv != D and not (128 < D <= 192 and 96 < Dv <= 128) and not (D <= 64 and Dv <= 256):
            return (
                "it does value heads of another size for key heads of up to 64, and for 136 to 192 with value heads of "
                f"104 to 128; these are {D} and {Dv}"
            )
        if D > 192 and must_be_deterministic():
            return "its backward is not deterministic for heads of more than 192"
        return next(
            (f"its build has no {what} (FLASHATTENTION_DISABLE_{flag})" for flag, what in _left_out(request)), None
        )


class FlashAttention4(_FlashPackage):
    """``flash_attn.cute.interface``, for Hopper and Blackwell, of 4.0.0b10 and newer."""

    name = "flash-attn-4"
    module = "flash_attn.cute.interface"
    distribution = "flash-attn-4"  # flash-attn has a folder of that name too
    install = "pip install --pre flash-attn-4"
    served = (WINDOW, SOFTCAP, DOCUMENTS, SINKS)
    capabilities = range(9, 100)
    no_window = None
    copies_slices = True  # dout, with documents
    dense_forward = packed_forward = "_flash_attn_fwd"
    dense_backward = packed_backward = "_flash_attn_bwd"

    def _limit(self, request: KernelRequest, major: int | None) -> str | None:
        """What Blackwell's kernels have, and what early releases assert away."""
        D, spec = request.head_dim, request.spec
        if major == 12 and must_be_deterministic():
            return "its backward is not deterministic on GPUs of compute capability 12"
        if major is not None and major >= 10:
            if D > 128 and D != 256:
                return f"on GPUs of compute capability {major} it does head sizes up to 128, and 256; these are {D}"
            if D == 256 and spec.softcap is not None:
                return f"on GPUs of compute capability {major} it has no softcap for heads of 256"
        if spec.softcap is not None and spec.documents is not None and _beta(self.distribution) < _BETA_OF_BOTH:
            return f"it does documents with a softcap from 4.0.0b{_BETA_OF_BOTH} on"
        return None

    def _gradients(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        spec: AttentionSpec,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, *others = tensors
        if packing is not None:
            # Row strides that add up to 2^31 elements give wrong gradients (flash-attention#2611).
            dout = dout.contiguous()
        q, k, v, out, lse = others
        return super()._gradients((dout, q, k, v, out, lse), spec, packing)


_SMS_OF_AN_EXCHANGE = 16
"""As many as Megatron's recipes leave to NCCL beside Transformer Engine's kernels (NVTE_FWD_LAYERNORM_SM_MARGIN)."""

_BETA_OF_BOTH = 24


def _beta(distribution: str) -> float:
    """The number of a 4.0.0 beta; infinity for what is none."""
    found = re.match(r"4\.0\.0\.?b(?:eta)?(\d+)", importlib.metadata.version(distribution))
    return int(found[1]) if found else float("inf")


def _left_out(request: KernelRequest) -> Iterator[tuple[str, str]]:
    """What of the request a slim build of FlashAttention 3 leaves out: flags of its ``flash_attn_config``, in words."""
    try:
        flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except Exception:  # releases without it have everything
        return
    spec, D, Dv = request.spec, request.head_dim, request.value_dim or request.head_dim
    size = next(size for size in (64, 96, 128, 192, 256) if size >= D)
    needed = {
        "BACKWARD": ("backward", True),
        "LOCAL": ("windows", spec.window is not None),
        "SOFTCAP": ("softcap", spec.softcap is not None),
        "VARLEN": ("packed documents", spec.documents is not None),
        "FP16": ("float16", request.dtype == torch.float16),
        f"HDIM{size}": (f"heads of {size}", True),
        "HDIMDIFF64": ("larger value heads", D <= 64 and Dv != D),
        "HDIMDIFF192": ("smaller value heads", D > 128 and Dv != D),
    }
    for flag, (what, is_needed) in needed.items():
        if is_needed and flags.get(f"FLASHATTENTION_DISABLE_{flag}"):
            yield flag, what
