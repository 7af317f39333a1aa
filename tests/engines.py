"""DeepSpeed engines of tiny models under ALST's registration: built, stepped, and compared with one process."""

from __future__ import annotations

import torch

from tests.models import shard, single_process, worst

UPIPE = {"upipe": {"chunk_heads": 4}}


def ds_config(stage: int, **more) -> dict:
    zero = {"stage": stage}
    if stage == 3:  # partition everything, gather nothing ahead of its use
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        **more,
    }


def register_ulysses(model, ranks: int, **options):
    """ALST's registration, as its documentation has it."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo")
    forget_ulysses()
    return UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", ranks, micro_batch_size=1, **options)


def forget_ulysses() -> None:
    """Undo what ALST registered for the whole process."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as state
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    state._release_sequence_parallel_groups()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward


def make_engine(model, config: dict, mpu=None):
    import deepspeed

    import deepspeed_plugin

    deepspeed_plugin.register()
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    return engine


def forward(engine, batch, group=None, positions=None):
    from deepspeed_plugin import sequence_parallel_loss

    if positions is None:
        positions = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    logits = engine(
        input_ids=shard(batch["input_ids"], group), position_ids=shard(positions, group), use_cache=False
    ).logits
    return logits, sequence_parallel_loss(engine, logits, shard(batch["labels"], group))


def gradients(engine) -> dict[str, torch.Tensor]:
    """Full reduced gradients by name, between backward and step."""
    from deepspeed.utils import safe_get_full_grad

    named = {name.removeprefix("module."): p for name, p in engine.module.named_parameters()}
    if engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled():
        return {name: p.grad.clone() for name, p in named.items()}
    grads = {name: safe_get_full_grad(p) for name, p in named.items()}
    return {name: grad.clone() for name, grad in grads.items() if grad is not None}


def train_step(engine, batch, group=None) -> dict[str, torch.Tensor]:
    """Loss and every gradient of one step, as ``single_process`` gives them, and the logged gradient norm."""
    from deepspeed_plugin import group_mean_loss

    _, loss = forward(engine, batch, group)
    engine.backward(loss)
    grads = gradients(engine)
    mean = group_mean_loss(engine, loss)
    engine.step()
    norm = engine.get_global_grad_norm()
    return {"loss": mean, **grads, "norm": torch.zeros(()) if norm is None else torch.as_tensor(float(norm))}


def expected_of(model, batch) -> dict[str, torch.Tensor]:
    """The single process's loss, gradients and gradient norm."""
    forget_ulysses()
    wanted = single_process(model, batch)
    del wanted["logits"]
    grads = [t for name, t in wanted.items() if name != "loss"]
    wanted["norm"] = torch.stack([t.norm() for t in grads]).norm()
    return wanted


def compare(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    if float(got["norm"]) == 0.0:  # DeepSpeed logs none at stage 0
        got, wanted = ({k: v for k, v in d.items() if k != "norm"} for d in (got, wanted))
    return max(worst(got, wanted).values())
