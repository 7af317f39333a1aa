"""Peak memory of Megatron's attention layer with UPipe at paper scale, on fake tensors, against the closed forms."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_in_process
from upipe_integrations import UPipeConfig
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import LayerShape, upipe_peak
from upipe_integrations.planning.measure import FlashWorkspace, LiveMemory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

RANKS = 8
TOKENS = 1 << 20
LAYERS = {
    "Llama3-8B": LayerShape(heads=32, kv_heads=8, head_dim=128, hidden_size=4096),
    "Qwen3-32B": LayerShape(heads=64, kv_heads=8, head_dim=128, hidden_size=5120),
}

# Every layer in every mode, and either with both numbers of tensor-parallel ranks: of all three, every pair.
CASES = [
    (name, mode, 1 + (number + which) % 2) for number, mode in enumerate(MEMORY) for which, name in enumerate(LAYERS)
]


def _peaks(tensor_ranks: int) -> dict[tuple[str, str], tuple[float, float]]:
    """(forward, training) peak of each case's layer and mode in units of one `[S, D]` tensor."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.megatron_cpu import use_cpu

    dist.init_process_group("fake", rank=0, world_size=RANKS * tensor_ranks, store=FakeStore())
    use_cpu()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch import attention, upipe_spec

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_ranks, context_parallel_size=RANKS, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    attention.select_kernel = lambda *_: FlashWorkspace()
    torch.cuda.is_available = lambda: False  # asked for every operation, of a library that is opened each time
    found = {}
    for name, mode, its_tensor_ranks in CASES:
        if its_tensor_ranks != tensor_ranks:
            continue
        layer = LAYERS[name]
        config = TransformerConfig(
            num_layers=1,
            hidden_size=layer.hidden_size,
            num_attention_heads=layer.heads,
            num_query_groups=layer.kv_heads,
            kv_channels=layer.head_dim,
            attention_dropout=0.0,
            add_bias_linear=False,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=torch.bfloat16,
            bf16=True,
            tensor_model_parallel_size=tensor_ranks,
            sequence_parallel=tensor_ranks > 1,
            context_parallel_size=RANKS,
        )
        spec = upipe_spec(get_gpt_layer_local_spec(), UPipeConfig(chunk_heads=RANKS, memory=mode))
        with FakeTensorMode(allow_non_fake_inputs=True):
            found[name, mode] = _peak(
                build_module(spec.submodules.self_attention, config=config, layer_number=1), layer, tensor_ranks
            )
    return found


def _peak(module, layer: LayerShape, tensor_ranks: int) -> tuple[float, float]:
    rows, unit = TOKENS // RANKS, TOKENS * layer.head_dim * 2
    with LiveMemory() as live:
        x = torch.empty(rows // tensor_ranks, 1, layer.hidden_size, dtype=torch.bfloat16).requires_grad_()
        angles = torch.empty(rows, 1, 1, layer.head_dim)
        with torch.no_grad():
            module(x, None, rotary_pos_emb=angles)  # makes the rotary tables, which all layers share
        _ = [p.detach() for p in (x, *module.parameters())]  # counted from here on
        before = live.current
        with torch.no_grad():
            live.reset_peak()
            module(x, None, rotary_pos_emb=angles)
            forward = live.peak - before
        out, _ = module(x, None, rotary_pos_emb=angles)
        grad = torch.empty_like(out)
        edge = torch.autograd.graph.get_gradient_edge(out)
        del out
        live.reset_peak()
        torch.autograd.backward(edge, grad)
        training = live.peak - before
    return forward / unit, training / unit


@pytest.fixture(scope="module")
def peaks() -> dict[tuple[str, str, int], tuple[float, float]]:
    return {(*case, ranks): peak for ranks in (1, 2) for case, peak in run_in_process(_peaks, ranks).items()}


@pytest.mark.parametrize(("name", "mode", "tensor_ranks"), CASES)
def test_peaks_are_the_closed_forms(peaks, name, mode, tensor_ranks):
    """Of the whole layer: with its output projection, and its input gathered over tensor-parallel ranks."""
    forward, training = peaks[name, mode, tensor_ranks]
    whole = LAYERS[name]
    layer = dataclasses.replace(whole, heads=whole.heads // tensor_ranks, kv_heads=whole.kv_heads // tensor_ranks)
    config = UPipeConfig(chunk_heads=RANKS, memory=mode)
    form = upipe_peak(layer, config.schedule(heads=layer.heads, kv_heads=layer.kv_heads, ranks=RANKS), config.mode)
    h, chi = layer.heads / RANKS, layer.hidden_size / (RANKS * layer.head_dim)
    # Megatron's output projection, where UPipe leaves it to Megatron, makes y beside the attention output.
    form_forward = form.forward if config.mode.memory != "recompute" else max(form.forward, h + chi)
    gathered = 0.0 if tensor_ranks == 1 else chi  # x with all of this rank's rows
    given = 0.0 if tensor_ranks == 1 else chi / tensor_ranks  # the part of dy that came in
    weights = 2 * layer.hidden_size * (2 * h + 2 * layer.kv_heads / RANKS) * RANKS * layer.head_dim
    in_units = weights / (2 * TOKENS * layer.head_dim)
    assert form_forward <= forward <= form_forward + gathered + h / 32, forward  # lse besides
    assert form.training <= training <= form.training + gathered + given + 2 * in_units, training
