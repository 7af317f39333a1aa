"""docs/supported.md is what a run of this test finds: ``UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py`` writes it.

Kernels that run here are run, each feature against the independent reference; those that need a GPU say what
they accept and refuse.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.engine import relative_errors, run_sharded, spec_of
from tests.reference import make_layer, reference
from upipe_integrations import Dropout, KernelRequest
from upipe_integrations.kernels import KERNELS

PAGE = Path(__file__).parents[1] / "docs" / "supported.md"

FEATURES = {
    "causal": {},
    "full": {"causal": False},
    "custom scale": {"scale": 0.3},
    "GQA, MQA": {"kv_heads": 1},
    "sliding window": {"window": 5},
    "packed documents": {"documents": ((0, 3, 9, 16),)},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout": True},
    "value heads of another size": {"value_dim": 12},
    "float64": {"dtype": torch.float64},
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
}
HERE = ("torch-cpu-flash", "math")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 6e-2}

HEAD = """# Supported and refused, per kernel and feature

Written by `UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py`; the same test fails when this page is not true.

- **exact**: run in that test through the engine and equal to single-process attention, output and every gradient
  (float64 unless the row names another dtype, then to its precision; dropout: equal to its own one-stage run).
- **accepted**: served by the kernel, which needs a GPU; its call form is tested with stand-ins, its values by tests
  marked `gpu`.
- **refused**: a `ValueError` that names the kernel and the feature, before any exchange. `auto` takes a kernel that
  can; `math` can everything on every device.

Any function `f(q, k, v, spec)` that PyTorch can differentiate is a kernel too (`FunctionKernel`), except for sinks.

Adapters are the same with every kernel: [peft.md](peft.md).

Combinations: every pair of features that a kernel serves alone it serves together (`tests/test_features.py` runs all
pairs on 2, 3 and 4 ranks, in the contiguous and the zigzag layout, with head counts that the ranks do not divide). A
window needs causal attention.

"""


def _outcome(name: str, options: dict) -> str:
    usual = torch.float64 if name in HERE else torch.bfloat16
    options = {"dtype": usual, **options}
    dropout = Dropout(0.3, seed=1) if options.pop("dropout", False) else None
    layer = make_layer(4, options.pop("kv_heads", 2), **options)
    device = torch.device("cpu" if name == "torch-cpu-flash" else "cuda")
    dtype = layer.x.dtype
    spec = spec_of(layer, dropout)
    request = KernelRequest(device, dtype, layer.head_dim, layer.value_dim, spec, layer.sinks is not None)
    reason = KERNELS[name].refusal(request)
    if reason and "not installed" not in reason:
        return "refused"
    if name not in HERE:
        return "accepted"
    got = run_sharded(layer, 2, None, name, dropout=dropout)
    wanted = reference(_double(layer)) if dropout is None else run_sharded(layer, 4, None, name, dropout=dropout)
    assert max(relative_errors(got, wanted).values()) < TOLERANCE[dtype]
    return "exact"


def _double(layer):
    for field, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            setattr(layer, field, value.double())
    return layer


def _page() -> str:
    names = list(KERNELS)
    lines = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for feature, options in FEATURES.items():
        cells = [_outcome(name, options) for name in names]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def test_the_page_is_what_a_run_finds():
    page = _page()
    if os.environ.get("UPIPE_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py and commit docs/supported.md"
