"""What of DeepSpeed's stack does not go together with UPipe: refused by name, before the model is touched.

Two kinds: features that replace or rearrange what UPipe reads (weights, layers, rows of the sequence), and features
that take the sequence-parallel ranks of ALST's mpu for tensor-parallel ranks, which hold the same rows. Everything
else works on parameters and gradients, and does with UPipe what it does with plain Ulysses: docs/supported.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class _Refusal:
    """A setting of the ds_config that is refused.

    Args:
        setting: its keys, joined by dots.
        refused: whether a value is; it is asked about None where the setting is absent.
        why: the reason, as a clause.
        remedy: what to do, as a sentence.
    """

    setting: str
    refused: Callable[[Any], bool]
    why: str
    remedy: str


def _includes_parallelism(passes: Any) -> bool:
    return not {"autosp", "autotp"}.isdisjoint(passes or ())


_REFUSED = (
    _Refusal(
        "tensor_parallel.autotp_size",
        lambda size: isinstance(size, int) and size > 1,
        "AutoTP splits the projections over ranks, so that no rank has the weights of all heads",
        "Remove 'tensor_parallel', and give its ranks to sequence_parallel_size.",
    ),
    _Refusal(
        "compile.passes",
        _includes_parallelism,
        "AutoSP and AutoTP split the sequence or the heads that UPipe splits already",
        "Remove 'autosp' and 'autotp' from compile.passes; engine.compile() is served.",
    ),
    _Refusal(
        "compile.deepcompile",
        bool,
        "DeepCompile's passes gather weights inside the compiled graph, which no test covers with UPipe",
        "Set compile.deepcompile to false; engine.compile() is served.",
    ),
    _Refusal(
        "zero_optimization.zenflow",
        lambda block: block is not None,
        "ZenFlow keeps weights transposed in memory and selects columns of gradients by that, so that a run with UPipe "
        "is not the run with plain Ulysses",
        "Remove zenflow; zero_optimization.offload_optimizer is served.",
    ),
    _Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights",
        bool,
        "frozen weights are kept as int8, not as the matrices that UPipe reads",
        "Set it to false; zero_quantized_weights, which quantises what is sent, is served.",
    ),
    _Refusal(
        "hybrid_engine.enabled",
        bool,
        "the hybrid engine generates through inference layers of its own in the place of the model's",
        "Set hybrid_engine.enabled to false. To generate, register Ulysses with disable_in_eval=True, and call "
        "engine.eval() and engine.module.generate().",
    ),
    _Refusal(
        "expert_parallel.enabled",
        bool,
        "AutoEP takes sequence-parallel ranks for tensor-parallel ranks",
        "Remove 'expert_parallel': the experts of Transformers' models are served as they are.",
    ),
    _Refusal(
        "data_efficiency.data_routing.random_ltd.enabled",
        bool,
        "random layer-token dropping takes rows out of a shard, so that they no longer are where their positions say",
        "Set random_ltd.enabled to false.",
    ),
)
_REFUSED_WITH_ALST = _Refusal(
    "activation_checkpointing.partition_activations",
    bool,
    "it splits activations over tensor-parallel ranks that hold the same rows, for which DeepSpeed takes the "
    "sequence-parallel ranks of ALST's mpu",
    "Set partition_activations to false; cpu_checkpointing is served.",
)


def check_stack(model: nn.Module, ds_config: Mapping[str, Any], mpu: Any) -> None:
    """Raise ValueError if the run uses a feature of DeepSpeed that UPipe does not go together with.

    Args:
        model: what the engine is built for.
        ds_config: its configuration.
        mpu: the model-parallel unit passed to ``deepspeed.initialize``, or None.
    """
    from deepspeed.moe.layer import MoE
    from deepspeed.runtime.pipe.module import PipelineModule

    alst = _is_alst(mpu)
    for refusal in (*_REFUSED, *([_REFUSED_WITH_ALST] if alst else ())):
        value = _value(ds_config, refusal.setting)
        if refusal.refused(value):
            raise ValueError(
                f"{refusal.setting} = {value!r} with the 'upipe' key: {refusal.why}. {refusal.remedy} To keep it, "
                "remove the 'upipe' key."
            )
    if isinstance(model, PipelineModule):
        raise ValueError(
            f"upipe: {type(model).__name__} is a PipelineModule: its ranks have no sequence-parallel group, and its "
            "engine averages the loss itself. Give deepspeed.initialize the model without pipeline stages, or remove "
            "the 'upipe' key."
        )
    for name, module in model.named_modules():
        if any(c.__module__ == "deepspeed.sequence.fpdt_layer" for c in type(module).__mro__):
            raise ValueError(
                f"upipe: {name} is a {type(module).__name__}: FPDT is a sequence parallelism of its own, in chunks of "
                "the sequence. Build the model with DistributedAttention or Transformers' attention, or remove the "
                "'upipe' key."
            )
        if alst and isinstance(module, MoE):
            raise ValueError(
                f"upipe: {name} is DeepSpeed's MoE layer, which takes the sequence-parallel ranks of ALST's mpu for "
                "tensor-parallel ranks that hold the same tokens, and drops all but a part of them. Use the experts of "
                "Transformers' models, or train without sequence parallelism (remove the 'upipe' key and the mpu)."
            )


def correct_checkpoints(engine: Any) -> None:
    """Let `engine` save and load universal checkpoints as one tensor-parallel rank, which is what it is.

    With ALST's mpu DeepSpeed saves the number of sequence-parallel ranks as that of tensor-parallel ones, so that
    ``ds_to_universal`` misses the files of all but one, and asks the mpu for the latter when it loads, which it can't
    say.
    """
    if not _is_alst(engine.mpu):
        return
    save: Callable[..., dict[str, Any]] | None = getattr(engine, "_common_checkpoint_state", None)
    if save is not None:
        engine._common_checkpoint_state = _saving_one_tensor_rank(save)
    optimizer = engine.optimizer
    load: Callable[..., None] | None = getattr(optimizer, "load_hp_checkpoint_state_from_checkpoint_dir", None)
    if load is not None and hasattr(optimizer, "mpu"):
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir = _loading_without_mpu(load, optimizer)


def _saving_one_tensor_rank(save: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`save`, whose checkpoint says that it is of one tensor-parallel rank."""

    def saved(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state = save(*args, **kwargs)
        dimensions = state.get("checkpoint_parallel_dimensions")
        if dimensions is not None:
            state["checkpoint_parallel_dimensions"] = {**dimensions, "tp_degree": 1}
        return state

    return saved


def _loading_without_mpu(load: Callable[..., None], optimizer: Any) -> Callable[..., None]:
    """`load`, while which `optimizer` has no mpu to ask for tensor-parallel ranks."""

    def loaded(*args: Any, **kwargs: Any) -> None:
        mpu, optimizer.mpu = optimizer.mpu, None
        try:
            load(*args, **kwargs)
        finally:
            optimizer.mpu = mpu

    return loaded


def _is_alst(mpu: Any) -> bool:
    """Whether `mpu` is ALST's, as DeepSpeed itself tells: it gives its sequence-parallel group as model-parallel."""
    return hasattr(mpu, "initialize_sequence_parallel") and mpu.get_sequence_parallel_world_size() > 1


def _value(ds_config: Mapping[str, Any], setting: str) -> Any:
    """The value of `setting`, None where it is absent."""
    value: Any = ds_config
    for key in setting.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
