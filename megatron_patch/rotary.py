"""Megatron's rotary embedding as the engine's tables.

``RotaryEmbedding`` gives angles `[s, b or 1, 1, R]`, of this rank's rows or (packed sequences) of every position;
``apply_rotary_pos_emb`` takes their cosine and sine, times YaRN's factor, in the activations' precision. The same is
done here once for all layers of a forward, and the engine rotates while it packs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_patch.packing import Packing
from upipe_integrations import RotateHalf

_REMEMBERED = "_upipe_tables"


def rotary_tables(angles: Tensor, dtype: torch.dtype, factor: float, interleaved: bool, packing: Packing) -> RotateHalf:
    """The rotary of this rank's rows, with tables `[b or 1, rows, R]`.

    Args:
        angles: `[s, b or 1, 1, R]`.
        dtype: of the activations.
        factor: multiplies cosine and sine (``mscale`` in Megatron).
        interleaved: ``config.rotary_interleaved``.
        packing: which positions the rows have.
    """
    remembered: dict[object, RotateHalf] = getattr(angles, _REMEMBERED, {})
    key = (dtype, factor, interleaved, packing)
    if key not in remembered:
        indices = packing.table_indices(angles.shape[0])
        chosen = angles if indices is None else angles.index_select(0, indices.to(angles.device))
        chosen = chosen.squeeze(2).transpose(0, 1)  # [rows, b or 1, 1, R] -> [b or 1, rows, R]
        cos, sin = ((f(chosen) * factor).to(dtype) for f in (torch.cos, torch.sin))
        remembered[key] = RotateHalf(cos, sin, interleaved=interleaved)
        if not angles.requires_grad:
            setattr(angles, _REMEMBERED, remembered)
    return remembered[key]
