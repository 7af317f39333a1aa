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


_MAKE_MPU = (
    "pass deepspeed.initialize(..., mpu=...) what UlyssesSPAttentionHF.register_with_transformers(...) returns, or "
    "deepspeed.runtime.sequence_parallel.parallel_state_sp after its initialize_sequence_parallel(ranks)"
)


def find_group(ds_config: Mapping[str, Any], mpu: Any, mesh_device: Any, zero_stage: int) -> SequenceGroup:
    """The group of an engine about to be built.

    Args:
        ds_config: its configuration.
        mpu: the model-parallel unit passed to ``deepspeed.initialize`` (ALST's ``register_with_transformers``
            returns one), or None.
        mesh_device: the device mesh DeepSpeed made from ``mesh_param`` or from ``sequence_parallel_size`` and
            ``data_parallel_size``, or None.
        zero_stage: the engine's ZeRO stage.

    Raises:
        ValueError: there is no sequence-parallel group, its size is not ``sequence_parallel_size``, or
            DeepSpeed would not reduce gradients over it.
    """
    size = ds_config.get("sequence_parallel_size")
    if mpu is not None and hasattr(mpu, "get_sequence_parallel_group"):
        group = SequenceGroup(mpu.get_sequence_parallel_group())
    elif mesh_device is not None:
        group = SequenceGroup(mesh_device.get_group(mesh_dim="sequence_parallel"))
        if group.ranks > 1 and zero_stage < 3:
            # _get_sequence_data_parallel_group falls back to the mesh's data-parallel dimension alone.
            raise ValueError(
                f"zero_optimization.stage = {zero_stage}: with a device mesh (mesh_param, or 'data_parallel_size' in "
                "the ds_config) and no mpu DeepSpeed does not reduce gradients over the sequence-parallel ranks below "
                f"ZeRO-3, so they would silently drift apart. Use stage 3, or {_MAKE_MPU}."
            )
    elif size == 1:
        group = SequenceGroup(None)
    else:
        raise ValueError(
            f"upipe: no sequence-parallel group. To make one, {_MAKE_MPU}; at ZeRO-3 the ds_config keys "
            "'sequence_parallel_size' and 'data_parallel_size' together do too. 'sequence_parallel_size': 1 uses "
            "UPipe on single ranks."
        )
    if size is not None and size != group.ranks:
        raise ValueError(
            f"sequence_parallel_size = {size}: the sequence-parallel group that was set up has {group.ranks} ranks. "
            "Set both to the same number."
        )
    return group
