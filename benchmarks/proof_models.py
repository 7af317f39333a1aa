"""Models of Transformers' under DeepSpeed, for the steps of ``proof.py`` that train: what each rank does."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist

from upipe_integrations import UPipeConfig
from upipe_integrations.planning.measure import LiveMemory

SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
LLAMA3_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def window_model_peaks(lengths: tuple[int, ...], device: torch.device) -> list[int]:
    """Bytes beyond the weights at the peak of a training step of a Mistral with a window, in one process with UPipe."""
    from transformers import MistralConfig, MistralForCausalLM

    from deepspeed_plugin.attach import attach
    from deepspeed_plugin.group import SequenceGroup

    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    sizes = SMALL | ({"num_attention_heads": 16, "hidden_size": 1024, "head_dim": 64} if on_gpu else {})
    config = MistralConfig(**sizes, sliding_window=lengths[0] // 4, attn_implementation="sdpa")
    model = MistralForCausalLM(config).to(device, torch.bfloat16)
    attach(model, UPipeConfig(chunk_heads=4), SequenceGroup(None), device=device, dtype=torch.bfloat16)
    peaks = []
    for length in (lengths[0], *lengths):  # the first makes what stays
        model.zero_grad(set_to_none=True)
        gc.collect()
        ids = torch.randint(0, 256, (1, length), device=device)
        positions = torch.arange(length, device=device)[None]
        before = 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with LiveMemory() as live:
            hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            hidden.square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before if on_gpu else live.peak)
    return peaks[1:]


def train(small: bool, upipe: bool, steps: int) -> dict[str, list[float]]:
    """Losses, gradient norms and seconds of `steps` under ZeRO-3 with prefetch and overlap, by ALST or with UPipe."""
    import deepspeed_plugin

    sizes = SMALL if small else LLAMA3_8B | {"num_hidden_layers": 4, "vocab_size": 32000}
    length = 64 if small else 65536
    engine = _engine(sizes, length, small, {"upipe": {"chunk_heads": dist.get_world_size()}} if upipe else {})
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * length // ranks, (rank + 1) * length // ranks)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "seconds": []}
    for _ in range(steps):
        begin = time.perf_counter()
        tokens = torch.randint(0, 64, (1, length + 1), generator=generator).to(engine.device)
        positions = torch.arange(length, device=engine.device)[None]
        logits = engine(input_ids=tokens[:, :-1][:, rows], position_ids=positions[:, rows], use_cache=False).logits
        loss = deepspeed_plugin.sequence_parallel_loss(engine, logits, tokens[:, 1:][:, rows])
        engine.backward(loss)
        engine.step()
        found["loss"].append(float(deepspeed_plugin.group_mean_loss(engine, loss.detach())))
        found["grad_norm"].append(float(engine.get_global_grad_norm()))
        found["seconds"].append(time.perf_counter() - begin)
    return found


def one_long_step(small: bool) -> dict[str, float]:
    """A step of Llama3-8B at 1M tokens, with checkpointed layers, a tiled loss and the optimizer offloaded: its peak in
    bytes, which is 0 without a GPU."""
    import deepspeed_plugin

    length = 256 if small else 1 << 20
    upipe = {"upipe": {"chunk_heads": dist.get_world_size(), "memory": "fused"}}
    engine = _engine(SMALL if small else LLAMA3_8B, length, small, upipe, offload=not small)
    deepspeed_plugin.enable_checkpointing(engine.module, keep_attention=False)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = slice(rank * length // ranks, (rank + 1) * length // ranks)
    tokens = torch.randint(0, 64, (1, length + 1), generator=torch.Generator().manual_seed(0)).to(engine.device)
    positions = torch.arange(length, device=engine.device)[None]
    if not small:
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    inputs = {"input_ids": tokens[:, :-1][:, rows], "position_ids": positions[:, rows], "use_cache": False}
    loss = deepspeed_plugin.tiled_sequence_parallel_loss(engine, inputs, tokens[:, 1:][:, rows])
    engine.backward(loss)
    engine.step()
    peak = 0 if small else torch.cuda.max_memory_allocated()
    return {"loss": float(loss.detach()), "peak": float(peak), "seconds": time.perf_counter() - begin}


def _engine(sizes: dict[str, int], length: int, small: bool, more: dict[str, Any], *, offload: bool = False) -> Any:
    """A DeepSpeed engine of a Llama at ZeRO-3, with ALST's registration."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaConfig, LlamaForCausalLM

    import deepspeed_plugin

    deepspeed_plugin.register()
    deepspeed.init_distributed(dist.get_backend())
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    if small:
        zero |= {"stage3_param_persistence_threshold": 0}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": dist.get_world_size(),
        "zero_optimization": zero,
        "bf16": {"enabled": not small},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": not offload}},
        "gradient_clipping": 1.0,
        **more,
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=not small):
        model = LlamaForCausalLM(
            LlamaConfig(**sizes, max_position_embeddings=length, use_cache=False, attn_implementation="sdpa")
        )
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=dist.get_world_size(), micro_batch_size=1
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    return engine
