"""docs/supported.md is what a run of this test finds: ``UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py`` writes it.

Kernels that run here are run, each feature against the independent reference; those that need a GPU say what
they accept and refuse. The table of DeepSpeed's stack names the test that shows each row, which must be there.
"""

from __future__ import annotations

import os
import re
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

HEAD = """# Supported and refused: kernels, features, and the rest of DeepSpeed's stack

Written by `UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py`; the same test fails when this page is not true.

- **exact**: run in that test through the engine and equal to single-process attention, output and every gradient
  (float64 unless the row names another dtype, then to its precision; dropout: equal to its own one-stage run).
- **accepted**: served by the kernel, which needs a GPU; its call form is tested with stand-ins, its values by tests
  marked `gpu`.
- **refused**: a `ValueError` that names the kernel and the feature, before any exchange. `auto` takes a kernel that
  can; `math` can everything on every device.

Any function `f(q, k, v, spec)` that PyTorch can differentiate is a kernel too (`FunctionKernel`), except for sinks.

Combinations: every pair of features that a kernel serves alone it serves together (`tests/test_features.py` runs all
pairs on 2, 3 and 4 ranks, in the contiguous and the zigzag layout, with head counts that the ranks do not divide). A
window needs causal attention.

"""

STACK_HEAD = """
## With the rest of DeepSpeed's stack

- **as plain Ulysses**: losses, gradient norms and weights of three steps are those of plain Ulysses without the setting
  (float32; where DeepSpeed computes in bfloat16 or 8 bits, no farther from float32 than plain Ulysses is with it).
- **as one process**: loss and every gradient are those of the whole sequence in one process.
- **refused**: a `ValueError` that names the setting and the remedy, before the model is touched.

Tests are in `tests/test_stack.py`, or in the file named.

"""
STACK: tuple[tuple[str, str, str], ...] = (
    (
        "ZeRO 0 to 3, gradient checkpointing of both kinds",
        "as one process",
        "`test_deepspeed.py`: `test_equals_ulysses_and_one_process_at_every_zero_stage`",
    ),
    (
        "`zero.Init` before the engine",
        "as one process",
        "`test_deepspeed.py`: `test_a_model_partitioned_from_the_start`",
    ),
    (
        "`offload_param`, `offload_optimizer` to the CPU (NVMe was not run)",
        "as plain Ulysses",
        "`test_trains_as_plain_ulysses_does`",
    ),
    ("`overlap_comm`, leaf modules around a layer", "as plain Ulysses", "`test_trains_as_plain_ulysses_does`"),
    (
        "ZeRO++: hpZ, qgZ (with a stand-in for DeepSpeed's quantizer, which needs a GPU)",
        "as plain Ulysses",
        "`test_trains_as_plain_ulysses_does`",
    ),
    (
        "`bf16_master_weights_and_grads`, `bf16_optimizer_states`, `torch_autocast`; ZeRO++ qwZ (the same stand-in)",
        "as plain Ulysses",
        "`test_low_precision_errs_as_ulysses_does`",
    ),
    ("TiledMLP, `sequence_tiled_compute`", "as plain Ulysses", "`test_trains_as_plain_ulysses_does`"),
    ("`engine.compile()`", "as plain Ulysses", "`test_trains_as_plain_ulysses_does`"),
    (
        "`torch.compile` of the model or its layers",
        "as without",
        "`test_compile.py`: `test_models_break_once_at_their_door_and_their_layers_not_at_all`",
    ),
    (
        (
            "saved activations in host memory: `save_on_cpu`, DeepSpeed's "
            "`CheckpointHiddenStatesOffload`, its `cpu_checkpointing`"
        ),
        "as one process, in every memory mode and form of checkpointing",
        "`test_saved_activations_may_be_kept_on_the_host`, `test_offloaded_activations_leave_the_device`",
    ),
    (
        "frozen parameters: any of q, k, v, o, embeddings",
        "as one process, without buffers for their gradients",
        (
            "`test_frozen_parameters_leave_the_other_gradients_as_they_are`, "
            "`test_frozen_projections_have_no_gradient_buffers`"
        ),
    ),
    (
        "lengths and batch sizes that change from step to step",
        "as one process; a length that the ranks do not divide is refused on every rank",
        "`test_lengths_and_batch_sizes_change_from_step_to_step`",
    ),
    (
        "`no_grad`, `inference_mode`, `eval()` on shards",
        "as one process",
        "`test_forwards_without_gradients_and_generate`",
    ),
    (
        "`disable_in_eval`: evaluation and `generate()` on whole sequences",
        "the unpatched model",
        "`test_deepspeed.py`: `test_evaluation_with_disable_in_eval_is_the_unpatched_model`",
    ),
    (
        "`generate()` with sharded attention",
        "refused, without waiting for other ranks",
        "`test_forwards_without_gradients_and_generate`",
    ),
    (
        "several models in a process; an engine with the key and one without",
        "as one process each",
        (
            "`test_deepspeed.py`: `test_two_models_with_different_heads`; "
            "`test_an_engine_with_the_key_beside_one_without`"
        ),
    ),
    (
        "checkpoints saved with the key and loaded without, and the reverse",
        "equal weights, the same steps after",
        "`test_checkpoints_know_nothing_of_upipe`",
    ),
    (
        "universal checkpoints, between UPipe, plain Ulysses (which loads them at ZeRO-3 alone) and one rank",
        "equal weights, the same steps after",
        "`test_universal_checkpoints`",
    ),
    (
        (
            "AutoSP, AutoTP, DeepCompile, ZenFlow, ZeRO++'s frozen weights in 8 bits, the hybrid engine, AutoEP, "
            "random layer-token dropping, `partition_activations` with ALST's mpu"
        ),
        "refused",
        "`test_is_refused_before_the_model_is_touched`",
    ),
    (
        "`PipelineModule`, FPDT's modules, DeepSpeed's MoE layer with ALST's mpu",
        "refused",
        "`test_is_refused_before_the_model_is_touched`",
    ),
    ("MiCS, compression, progressive layer dropping, legacy curriculum learning", "no longer in DeepSpeed 0.19", ""),
)


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
    rows = [
        "| | | shown by |",
        "|---" * 3 + "|",
        *(f"| {what} | {outcome} | {tests} |" for what, outcome, tests in STACK),
    ]
    return HEAD + "\n".join(lines) + "\n" + STACK_HEAD + "\n".join(rows) + "\n"


def test_the_page_is_what_a_run_finds():
    page = _page()
    if os.environ.get("UPIPE_WRITE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "run UPIPE_WRITE_DOCS=1 pytest tests/test_docs.py and commit docs/supported.md"


def test_the_tests_that_the_stack_names_are_there():
    default = "test_stack.py"
    for what, outcome, tests in STACK:
        named = re.findall(r"(?:`(test_\w+\.py)`: )?`(test_\w+)`", tests)
        assert named or "no longer in DeepSpeed" in outcome, what
        for file, test in named:
            assert f"\ndef {test}(" in (Path(__file__).parent / (file or default)).read_text(), test
