"""The sequence-parallel group DeepSpeed trains with, from wherever the user set it up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upipe_integrations.all_to_all import Group, group_rank, group_ranks


class SequenceGroup:
    """A sequence-parallel process group that survives ``copy.deepcopy`` of a model (process groups do not).

    Args:
        process_group: the group, or None for a group of one rank.
    """

    def __init__(self, process_group: Group) -> None:
        self.process_group = process_group

    def __deepcopy__(self, memo: Any) -> SequenceGroup:
        return self

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return group_ranks(self.process_group)

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return group_rank(self.process_group)


def find_group(ds_config: Mapping[str, Any], mpu: Any, mesh_device: Any) -> SequenceGroup:
    """The group of an engine about to be built.

    Args:
        ds_config: its configuration.
        mpu: the model-parallel unit passed to ``deepspeed.initialize`` (ALST's ``register_with_transformers``
            returns one), or None.
        mesh_device: the device mesh DeepSpeed made from ``mesh_param`` or from ``sequence_parallel_size`` and
            ``data_parallel_size``, or None.

    Raises:
        ValueError: there is no sequence-parallel group, or its size is not ``sequence_parallel_size``.
    """
    size = ds_config.get("sequence_parallel_size")
    if mpu is not None and hasattr(mpu, "get_sequence_parallel_group"):
        group = SequenceGroup(mpu.get_sequence_parallel_group())
    elif mesh_device is not None:
        group = SequenceGroup(mesh_device.get_group(mesh_dim="sequence_parallel"))
    elif size == 1:
        group = SequenceGroup(None)
    else:
        raise ValueError(
            "upipe: no sequence-parallel group. Pass deepspeed.initialize(..., mpu=...) what "
            "UlyssesSPAttentionHF.register_with_transformers(...) returns, or set both 'sequence_parallel_size' "
            "and 'data_parallel_size' in the ds_config; 'sequence_parallel_size': 1 uses UPipe on single ranks."
        )
    if size is not None and size != group.ranks:
        raise ValueError(
            f"sequence_parallel_size = {size}: the sequence-parallel group that was set up has {group.ranks} ranks. "
            "Set both to the same number."
        )
    return group
