"""What a Megatron user can set, and which other settings it goes with. Imports nothing of Megatron.

Command-line arguments, a TransformerConfig and a YAML namespace have the same names for the same things
(:class:`Settings`), so one table of rules checks any of them: arguments before a process group exists, a config when a
layer is built.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from upipe_integrations import UPipeConfig

IMPL = "context_parallel_impl"
"""The argument and attribute that turns UPipe on: ``"native"`` or ``"upipe"``."""
PREFIX = "upipe_"
AUTO = "auto"


class Settings:
    """Megatron's settings by name, whatever release and whatever object they are from.

    Args:
        source: parsed arguments, a TransformerConfig, or a YAML namespace, of which sections are looked into as well.
    """

    def __init__(self, source: Any) -> None:
        sections = (getattr(source, name, None) for name in ("model_parallel", "language_model"))
        self._namespaces = (source, *(section for section in sections if section is not None))

    def get(self, name: str, default: Any = None) -> Any:
        """The setting called `name`; `default` where this source has none of that name."""
        for namespace in self._namespaces:
            if hasattr(namespace, name):
                return getattr(namespace, name)
        return default

    def ranks(self, name: str) -> int:
        """A number of ranks; 1 where it is absent or None."""
        value = self.get(name)
        return 1 if value is None else int(value)


@dataclass(frozen=True)
class UPipeOptions:
    """UPipe in one model.

    Args:
        config: the engine's settings.
        documents_cut: how context parallelism deals out packed sequences: ``"each"`` document for itself (Megatron's
            default for packed sequences), or the sequence as a ``"whole"`` (``--dataloader-inter-document-masking``).
    """

    config: UPipeConfig
    documents_cut: str = "each"

    def __post_init__(self) -> None:
        if self.documents_cut not in ("each", "whole"):
            raise ValueError(f"documents_cut = {self.documents_cut!r}: must be 'each' or 'whole'.")


def options_from(source: Any) -> UPipeOptions | None:
    """The options in parsed arguments (or a YAML namespace, where they may be under ``model_parallel``).

    None where ``--context-parallel-impl`` is absent or native.

    Raises:
        ValueError: an option is out of its range, or is set without the switch.
    """
    settings = Settings(source)
    impl = settings.get(IMPL)
    engine = _engine_settings(settings)
    if impl in (None, "native"):
        if engine:
            name = flag(PREFIX + next(iter(engine)))
            raise ValueError(
                f"{name} without {flag(IMPL)} upipe: it would be ignored. Add {flag(IMPL)} upipe, or leave {name} out."
            )
        return None
    if impl != "upipe":
        raise ValueError(f"{flag(IMPL)} = {impl!r}: must be 'native' or 'upipe'.")
    # As pretrain_gpt.py chooses between the two when it deals a batch out.
    whole = settings.get("dataloader_inter_document_masking", False) and not settings.get("sft", False)
    return dataclasses.replace(resolve(source, engine), documents_cut="whole" if whole else "each")


def resolve(source: Any, engine: dict[str, Any]) -> UPipeOptions:
    """The options of the `engine`, completed by defaults that depend on `source`.

    Args:
        source: arguments, or a TransformerConfig.
        engine: settings by their names in ``UPipeConfig``.

    Raises:
        ValueError: an unknown option, or one out of its range.
    """
    settings, engine = Settings(source), dict(engine)
    if engine.get("chunk_heads", AUTO) == AUTO:
        engine["chunk_heads"] = settings.ranks("context_parallel_size")
    if "memory" not in engine and _recomputes_attention(settings):
        engine["memory"] = "recompute"
    try:
        return UPipeOptions(UPipeConfig.from_mapping(engine))
    except ValueError as error:
        raise ValueError(_in_flags(str(error))) from None


def _in_flags(message: str) -> str:
    """The engine's message about ``upipe.chunk_heads`` as one about ``--upipe-chunk-heads``."""
    return re.sub(r"\bupipe\.(\w+)", lambda found: flag(PREFIX + found[1]), message)


def _engine_settings(settings: Settings) -> dict[str, Any]:
    """The engine's settings that the user made, by their names in ``UPipeConfig``."""
    names = [field.name for field in dataclasses.fields(UPipeConfig)]
    values = {name: settings.get(PREFIX + name) for name in names}
    # A switch that is off is one that was not set.
    return {name: value for name, value in values.items() if value is not None and value is not False}


# Where Megatron's argument is not called as the attribute that it sets.
_FLAGS = {"fp8": "--fp8-format", "fp4": "--fp4-format", "cpu_offloading": "--cpu-offloading-num-layers"}


def flag(name: str) -> str:
    """The command-line form of an argument's name."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def _recomputes_attention(settings: Settings) -> bool:
    """Whether Megatron's selective recomputation covers core attention."""
    modules = settings.get("recompute_modules") or ["core_attn"]
    return settings.get("recompute_granularity") == "selective" and "core_attn" in modules


# ---------------------------------------------------------------- what UPipe goes with


@dataclass(frozen=True)
class Rule:
    """A setting that UPipe refuses.

    Args:
        names: the names it has, of which a release has one.
        refused: ``refused(value)``, whether a value is refused; None is where the setting is absent.
        reason: why, as the end of a sentence.
        remedy: what to do, as a sentence.
    """

    names: tuple[str, ...]
    refused: Callable[[Any], bool]
    reason: str
    remedy: str


def _is_set(value: Any) -> bool:
    return bool(value)


def _hierarchical(value: Any) -> bool:
    kinds = value if isinstance(value, (list, tuple)) else [value]
    return "a2a+p2p" in kinds


def _some_graph(value: Any) -> bool:
    return value not in (None, False, "none")


def _inside_attention(value: Any) -> bool:
    return bool({"qkv_linear", "core_attn", "attn_proj"} & set(value or ()))


_DROP = "Leave it out, or use {impl} native."

RULES = (
    Rule(
        ("multi_latent_attention",),
        _is_set,
        "its latent projections are not the heads' rows of one weight that UPipe's stages project",
        _DROP,
    ),
    Rule(
        ("experimental_attention_variant",),
        _is_set,
        "such layers are not softmax attention over heads",
        _DROP,
    ),
    Rule(("fp8", "fp4"), _is_set, "UPipe projects in the parameters' own precision", _DROP),
    Rule(
        ("attention_dropout",),
        lambda value: bool(value) and float(value) > 0,
        "FlashAttention's dropout can't be the same for every number of stages, so that results would differ",
        "Set {flag} 0 (Megatron's default is 0.1).",
    ),
    Rule(
        ("hierarchical_context_parallel_sizes",),
        _is_set,
        "UPipe's group is all context-parallel ranks",
        "Leave it out.",
    ),
    Rule(
        ("cp_comm_type",),
        _hierarchical,
        "UPipe's all-to-all spans all context-parallel ranks",
        "Leave it out.",
    ),
    Rule(
        ("hybrid_context_parallel", "dynamic_context_parallel"),
        _is_set,
        "its groups change from microbatch to microbatch, and UPipe's stages are planned for one",
        _DROP,
    ),
    Rule(
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        _some_graph,
        "UPipe's stages are not captured in CUDA graphs",
        "Set --cuda-graph-impl none.",
    ),
    Rule(
        ("qk_clip", "log_max_attention_logit"),
        _is_set,
        "FlashAttention's kernels, which UPipe calls stage by stage, do not give the largest logit",
        "Leave it out.",
    ),
    Rule(
        ("tp_comm_overlap",),
        _is_set,
        "UPipe gathers the layer's input once, not in the GEMM of the projection",
        "Leave it out.",
    ),
    Rule(
        ("delay_wgrad_compute",),
        _is_set,
        "UPipe computes a stage's weight gradient while its heads are there",
        "Leave it out.",
    ),
    Rule(
        ("cpu_offloading",),
        _is_set,
        "what UPipe keeps for backward is not marked for it",
        "Use recomputation, or --optimizer-cpu-offload, instead.",
    ),
    Rule(
        ("offload_modules",),
        _inside_attention,
        "UPipe replaces the modules qkv_linear, core_attn and attn_proj that would be offloaded",
        "Take those out of --offload-modules.",
    ),
    Rule(
        ("fused_single_qkv_rope",),
        _is_set,
        "UPipe rotates a stage's heads while it packs them",
        "Leave it out: it has no use here.",
    ),
    Rule(("use_kitchen_attention", "batch_invariant_mode"), _is_set, "it chooses another attention kernel", _DROP),
    Rule(
        ("reset_attention_mask",),
        _is_set,
        "UPipe does not look at attention masks",
        "Use --dataloader-inter-document-masking, or packed sequences, to keep documents apart.",
    ),
    Rule(
        ("use_megatron_fsdp", "use_torch_fsdp2", "use_custom_fsdp"),
        _is_set,
        "UPipe reads attention's weights outside of the modules that FSDP gathers them for",
        "Use --use-distributed-optimizer.",
    ),
    Rule(
        ("attention_backend",),
        lambda value: getattr(value, "name", value) not in (None, "auto", "flash"),
        "UPipe chooses its kernel itself",
        "Leave it out, and choose with --upipe-kernel.",
    ),
)


def check_rules(source: Any) -> None:
    """Raise ValueError where `source` (arguments or a TransformerConfig) has a setting that UPipe refuses."""
    settings = Settings(source)
    for rule in RULES:
        for name in rule.names:
            value = settings.get(name)
            if rule.refused(value):
                shown = getattr(value, "name", value)
                remedy = rule.remedy.format(flag=flag(name), impl=flag(IMPL))
                raise ValueError(f"{flag(name)} = {shown!r} with {flag(IMPL)} upipe: {rule.reason}. {remedy}")


def check_heads(options: UPipeOptions, *, heads: int, groups: int, ranks: int, tensor_ranks: int) -> None:
    """Raise ValueError unless `chunk_heads` fits a layer.

    Args:
        options: the user's.
        heads: query heads of the layer, over all tensor-parallel ranks.
        groups: its query groups (KV heads), over all tensor-parallel ranks.
        ranks: context-parallel ranks.
        tensor_ranks: tensor-parallel ranks.
    """
    if groups < tensor_ranks or heads % tensor_ranks or groups % tensor_ranks:
        raise ValueError(
            f"--num-query-groups = {groups} with {flag(IMPL)} upipe and {tensor_ranks} tensor-parallel ranks: every "
            f"one of them must hold whole query groups. Use a --tensor-model-parallel-size that divides {groups}, and "
            f"more --context-parallel-size instead."
        )
    try:
        options.config.schedule(heads=heads // tensor_ranks, kv_heads=groups // tensor_ranks, ranks=ranks)
    except ValueError as error:
        message = _in_flags(str(error)).replace("sequence-parallel ranks", "context-parallel ranks")
        if tensor_ranks > 1:
            message = message.replace("the model's", f"a tensor-parallel rank's (of {tensor_ranks})")
        raise ValueError(message) from None


def check_arguments(args: Any, options: UPipeOptions) -> list[str]:
    """Check parsed and validated arguments; before any process group is built, on every rank alike.

    Returns:
        Notes for the user: settings that are served, but perhaps not what was meant.

    Raises:
        ValueError: a setting that UPipe refuses.
    """
    check_rules(args)
    settings = Settings(args)
    ranks = settings.ranks("context_parallel_size")
    heads = settings.get("num_attention_heads")
    if heads is not None:
        groups = settings.get("num_query_groups")
        if groups is None or not settings.get("group_query_attention", True):
            groups = heads
        tensor_ranks = settings.ranks("tensor_model_parallel_size")
        check_heads(options, heads=heads, groups=groups, ranks=ranks, tensor_ranks=tensor_ranks)
    if ranks > 1:
        return []
    return [
        f"{flag(IMPL)} upipe with {flag('context_parallel_size')} 1: attention runs in stages of "
        f"{options.config.chunk_heads} heads on each rank by itself, which saves memory but shares no sequence."
    ]
