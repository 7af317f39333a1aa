"""Whole training steps by Megatron's own schedules, data parallelism, gradient reduction and optimizer."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron_models import (
    Case,
    batch_of,
    build,
    causal_mask,
    global_name,
    largest_error,
    on_this_rank,
    start,
    token_loss,
    whole_over_tensor_ranks,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

MICROBATCHES = 2


@dataclasses.dataclass(frozen=True)
class Step:
    """How a step is run.

    Args:
        per_token: gradients are those of the sum over all tokens, divided by their number; else of the mean over
            microbatches and ranks of their means.
        fused_gradients: the layers' backward adds weight gradients to ``main_grad``.
        overlap: gradients are reduced, and parameters gathered, while others are computed.
        steps: of the optimizer, with sharded states; 0 compares gradients instead of weights.
    """

    per_token: bool = True
    fused_gradients: bool = False
    overlap: bool = False
    steps: int = 0


def train(case: Case, step: Step, upipe: bool) -> dict[str, torch.Tensor]:
    """The loss, and this rank's gradients or (after optimizer steps) weights, whole over tensor-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    start(case)
    case = dataclasses.replace(case, config={**case.config, "calculate_per_token_loss": step.per_token})
    chunks = build(case, upipe)
    if step.fused_gradients:
        _fuse_gradients(chunks)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=step.steps > 0,
        overlap_grad_reduce=step.overlap,
        overlap_param_gather=step.overlap and step.steps > 0,
        bucket_size=5000,
    )
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    optimizer = _optimizer(wrapped, config, step) if step.steps else None
    total = 0.0
    for number in range(max(step.steps, 1)):
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step(case, step, upipe),
            data_iterator=[iter(_microbatches(case, number)) for _ in wrapped],
            model=wrapped,
            num_microbatches=MICROBATCHES,
            seq_length=case.length,
            micro_batch_size=case.batch,
            forward_only=False,
        )
        if optimizer is not None:
            optimizer.step()
        total += sum(losses)
    results = {}
    loss = torch.tensor(float(total), dtype=torch.float64)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(loss, group=group)
        if not step.per_token:
            loss /= parallel_state.get_data_parallel_world_size()
        results["loss"] = loss
    if optimizer is not None and step.overlap:
        for chunk in wrapped:
            chunk.disable_forward_pre_hook()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            value = parameter.detach() if step.steps else parameter.main_grad
            results[global_name(chunk, name)] = whole_over_tensor_ranks(name, parameter, value)
    return results


def _fuse_gradients(chunks: list[Any]) -> None:
    """What Megatron does where its CUDA extension is built; without UPipe the layers could not run it here."""
    from megatron_patch import UPipeSelfAttention

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, UPipeSelfAttention):
                module.linear_qkv.gradient_accumulation_fusion = True
                if module.upipe.config.memory != "recompute" and not module._gated:
                    module.linear_proj.gradient_accumulation_fusion = True


def _optimizer(wrapped: list[Any], config: Any, step: Step) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    # The distributed optimizer knows Adam only, which makes whole steps of the rounding errors in a gradient that is
    # nearly zero: with this epsilon it makes steps in proportion.
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1.0,
        adam_eps=1.0,
        use_distributed_optimizer=True,
        overlap_param_gather=step.overlap,
        params_dtype=torch.float32,
    )
    return get_megatron_optimizer(settings, wrapped)


def _microbatches(case: Case, step: int) -> list[dict[str, torch.Tensor]]:
    """Of a data-parallel rank; with one rank, those of all."""
    from megatron.core import parallel_state

    whole = [batch_of(case, seed=10 * step + number) for number in range(MICROBATCHES)]
    if case.config.get("mtp_num_layers"):
        for batch in whole:
            batch["loss_mask"] = (batch["position_ids"] % (case.length // 4) != 0).double()
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return [{name: t.chunk(ranks)[rank] if case.batch > 1 else t for name, t in batch.items()} for batch in whole]


def _forward_step(case: Case, step: Step, upipe: bool) -> Any:
    def loss_of(batch: dict[str, torch.Tensor], output: torch.Tensor) -> Any:
        loss = (output * batch["loss_mask"]).sum() if case.config.get("mtp_num_layers") else token_loss(output, batch)
        if step.per_token:
            return loss, torch.tensor(batch["tokens"].numel()), float(loss.detach())
        loss = loss / (batch["tokens"].numel() * case.cp)
        return loss, float(loss.detach()) / MICROBATCHES

    def forward(iterator: Any, model: Any) -> Any:
        batch = on_this_rank(next(iterator))
        mask = None if upipe else causal_mask(case.length)
        labels = {}
        if case.config.get("mtp_num_layers"):
            labels = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
        output = model(batch["tokens"], batch["position_ids"], mask, **labels)
        return output, lambda output: loss_of(batch, output)

    return forward


def _results(cases: list[tuple[Case, Step]], upipe: bool) -> list[dict[str, torch.Tensor]]:
    from tests.megatron_cpu import use_cpu

    use_cpu()
    return [train(case, step, upipe) for case, step in cases]


def errors(ranks: int, cases: dict[str, tuple[Case, Step]]) -> dict[str, tuple[float, str]]:
    """The largest error of each case on `ranks` ranks against the stock model on one."""
    alone = {
        name: (
            dataclasses.replace(case.alone(), upipe={}, chunk_heads=None),
            dataclasses.replace(step, fused_gradients=False, overlap=False),
        )
        for name, (case, step) in cases.items()
    }
    different = list({repr(pair): pair for pair in alone.values()}.values())
    references = dict(zip(map(repr, different), run_ranks(1, _results, different, False)[0], strict=True))
    by_rank = run_ranks(ranks, _results, list(cases.values()), True)
    found = {}
    for number, name in enumerate(cases):
        wanted = references[repr(alone[name])]
        assert set().union(*(results[number] for results in by_rank)) == set(wanted), "every parameter is somewhere"
        of_ranks = [
            largest_error(results[number], {key: wanted[key] for key in results[number]}) for results in by_rank
        ]
        found[name] = max(of_ranks)
    return found


def assert_equal(ranks: int, cases: dict[str, tuple[Case, Step]], tolerance: float) -> None:
    found = errors(ranks, cases)
    assert {name: error for name, error in found.items() if not error[0] <= tolerance} == {}


FUSED = {"memory": "fused"}
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather", "add_bias_linear": False}


def test_data_context_and_pipeline_parallel():
    """Public faults 7, 8 and 10: means over ranks and sums over tokens, both as on one rank."""
    deep = {"num_layers": 4, "qk_layernorm": True}
    cases = {}
    for per_token in (True, False):
        step = Step(per_token=per_token)
        cases |= {
            f"dp 2 x cp 2, {per_token}": (Case(cp=2, upipe=FUSED), step),
            f"cp 4, {per_token}": (Case(cp=4), step),
            f"tp 2 sp x cp 2, {per_token}": (Case(tp=2, cp=2, sp=True, config={"qk_layernorm": True}), step),
            f"pp 2 x cp 2, {per_token}": (Case(pp=2, cp=2, config=deep), step),
            f"pp 2 vpp 2 x cp 2, {per_token}": (Case(pp=2, cp=2, vpp=2, config=deep, upipe=FUSED), step),
        }
    assert_equal(4, cases, 1e-10)


def test_experts():
    """The router works in float32, and counts tokens of a rank: its auxiliary loss is off here."""
    cases = {
        "ep 2 x cp 2": (Case(ep=2, cp=2, config=MOE, upipe=FUSED), Step()),
        "ep 2 x cp 2 in dp": (Case(ep=2, cp=2, config=MOE), Step(per_token=False)),
        "ep 2 x tp 2": (Case(ep=2, tp=2, sp=True, config=MOE), Step()),
    }
    assert_equal(4, cases, 1e-6)


def test_multi_token_prediction():
    """Its loss is computed in float32, and divided by the tokens that a rank has left after shifting: as many on each
    rank here, as Megatron's gradient would depend on the ranks otherwise."""
    mtp = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
    cases = {
        "cp 2": (Case(cp=2, config=mtp, upipe=FUSED), Step()),
        "tp 2 x cp 2": (Case(tp=2, cp=2, sp=True, config=mtp), Step()),
    }
    assert_equal(4, cases, 1e-5)


def test_gradients_accumulated_in_main_grad():
    cases = {}
    for memory in ("keep", "recompute", "fused", "blocks"):
        upipe = {"memory": memory, "query_blocks": 2}
        cases[memory] = (Case(tp=2, cp=2, sp=True, upipe=upipe), Step(fused_gradients=True))
    cases["while others are computed"] = (Case(cp=2, upipe=FUSED), Step(fused_gradients=True, overlap=True))
    assert_equal(4, cases, 1e-10)


def test_optimizer_steps_with_sharded_states():
    """Parameters are gathered while layers before them run: the hooks that wait for them must run."""
    cases = {}
    for overlap in (False, True):
        step = Step(steps=3, overlap=overlap)
        for memory in ("keep", "fused"):
            norm = {"qk_layernorm": True}
            cases[f"dp 2 x cp 2, {memory}, {overlap}"] = (
                Case(cp=2, upipe={"memory": memory}, config=norm, dtype=torch.float32),
                step,
            )
    assert_equal(4, cases, 1e-5)
