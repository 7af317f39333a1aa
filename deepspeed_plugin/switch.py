"""The switch: a ds_config with an ``upipe`` key turns UPipe on, whoever builds the engine.

``DeepSpeedEngine.__init__`` is the one place every route passes (``deepspeed.initialize`` with any form of
config, Accelerate, the Trainer) where model, config and groups are known and ZeRO has not yet touched the
model. It is wrapped when DeepSpeed's engine module is imported; DeepSpeed itself is never imported here.
ALST's registration is wrapped the same way (:mod:`deepspeed_plugin.alst`): it comes before the key is known.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import wrapt

from deepspeed_plugin import alst
from deepspeed_plugin.attach import Attachment, attach, attach_distributed
from deepspeed_plugin.distributed import find_distributed_attention
from deepspeed_plugin.group import find_group
from deepspeed_plugin.settings import read_settings
from deepspeed_plugin.stack import check_stack, correct_checkpoints
from upipe_integrations import UPipeConfig

_ENGINE_MODULE = "deepspeed.runtime.engine"
_ALST_MODULE = "deepspeed.runtime.sequence_parallel.ulysses_sp"


class _Switch:
    """Whether engines built from now on look for the key; one per process, as is the class it wraps."""

    def __init__(self) -> None:
        self.on = False
        self._installed = False

    def register(self) -> None:
        self.on = True
        if not self._installed:
            self._installed = True
            wrapt.register_post_import_hook(self._wrap_engine, _ENGINE_MODULE)
            wrapt.register_post_import_hook(self._wrap_alst, _ALST_MODULE)

    def _wrap_engine(self, module: Any) -> None:
        module.DeepSpeedEngine.upipe = None
        self._wrap(module.DeepSpeedEngine, "__init__", _engine_init)

    def _wrap_alst(self, module: Any) -> None:
        self._wrap(module.UlyssesSPAttentionHF, "__init__", alst.init_deferring_refusal)
        self._wrap(module.UlyssesSPAttentionHF, "register_with_transformers", alst.register_deferring_refusal)
        self._wrap(module.UlyssesSPDataLoaderAdapter, "__next__", alst.mark_shards)

    def _wrap(self, owner: type, name: str, wrapper: Callable[..., Any]) -> None:
        # From vars, or a class method would be bound already.
        setattr(owner, name, wrapt.decorator(enabled=lambda: self.on)(wrapper)(vars(owner)[name]))


_SWITCH = _Switch()


def register() -> None:
    """Let DeepSpeed engines built from now on look for the ``upipe`` key. Without the key nothing changes.

    May be called before or after DeepSpeed is imported, and again: it does nothing then.
    """
    _SWITCH.register()


def unregister() -> None:
    """Stop looking for the key; engines built before keep what they have (``engine.upipe.undo()`` removes it)."""
    _SWITCH.on = False


def _engine_init(wrapped: Callable[..., None], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """DeepSpeedEngine.__init__, after putting UPipe into the model when the config has the key."""
    attachment = _attach_to_engine(inspect.signature(wrapped).bind(*args, **kwargs).arguments)
    if attachment is None:
        alst.raise_deferred_refusal()
        wrapped(*args, **kwargs)
        return
    try:
        wrapped(*args, **kwargs)
    except BaseException:
        attachment.undo()
        raise
    correct_checkpoints(engine)
    engine.upipe = attachment
    alst.drop_deferred_refusals()


def _attach_to_engine(arguments: dict[str, Any]) -> Attachment | None:
    """UPipe put into the model of an engine that is built with `arguments`, and logged; None without the key."""
    import torch.distributed as dist

    ds_config = arguments.get("config") or {}
    settings = read_settings(ds_config)
    if settings is None:
        return None
    attachment = _attach(arguments, settings, ds_config)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _logger().info(attachment.summary)
    return attachment


def _attach(arguments: dict[str, Any], settings: UPipeConfig, ds_config: dict[str, Any]) -> Attachment:
    from deepspeed.accelerator import get_accelerator

    model, mpu = arguments["model"], arguments.get("mpu")
    check_stack(model, ds_config, mpu)
    distributed = find_distributed_attention(model)
    if distributed:
        return attach_distributed(distributed, settings)
    zero_stage = (ds_config.get("zero_optimization") or {}).get("stage", 0)
    group = find_group(ds_config, mpu, arguments.get("mesh_device"), zero_stage)
    return attach(
        model,
        settings,
        group,
        device=torch.device(get_accelerator().current_device_name()),
        dtype=_compute_dtype(ds_config, model),
        zero_stage=zero_stage,
    )


def _logger() -> logging.Logger:
    """A logger that is heard: DeepSpeed's own is silent below WARNING by default."""
    logger = logging.getLogger("deepspeed_plugin")
    if not logger.handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger


def _compute_dtype(ds_config: dict[str, Any], model: torch.nn.Module) -> torch.dtype:
    """What DeepSpeed will compute in: its own mixed precision if the config asks for it, else the model's."""
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if (ds_config.get(key) or {}).get("enabled") is True:
            return dtype
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
