"""The ``upipe`` block of a ds_config, in whatever form the config is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from upipe_integrations import UPipeConfig


def read_settings(ds_config: Any) -> UPipeConfig | None:
    """The settings in `ds_config`, or None when it has no ``upipe`` key.

    Args:
        ds_config: a dict, a path to a JSON file, the base64 form DeepSpeed's launcher passes, or an object
            with a ``config`` dict such as Transformers' ``HfDeepSpeedConfig``.

    Raises:
        ValueError: the block is not valid, or a key of the ds_config is a misspelt ``upipe`` (DeepSpeed
            ignores keys it does not know, so a typo would silently be plain Ulysses).
    """
    return UPipeConfig.from_ds_config(as_mapping(ds_config))


def as_mapping(ds_config: Any) -> Mapping[str, Any]:
    """`ds_config` as a mapping; see :func:`read_settings` for the forms."""
    if isinstance(ds_config, Mapping):
        return ds_config
    if isinstance(ds_config, os.PathLike):
        ds_config = os.fspath(ds_config)
    if isinstance(ds_config, str):
        from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

        loaded: Mapping[str, Any] = load_ds_config(ds_config)
        return loaded
    inner = getattr(ds_config, "config", None)
    if isinstance(inner, Mapping):
        return inner
    raise ValueError(
        f"ds_config of type {type(ds_config).__name__}: must be a dict, a path to a JSON file, DeepSpeed's base64 "
        "form, or an object with a config dict such as HfDeepSpeedConfig."
    )
