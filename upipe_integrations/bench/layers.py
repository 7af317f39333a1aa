"""One attention layer to measure, made of plain tensors, and the engine run on it.

Shapes: B batch, L rows of the sequence on this rank, S of all ranks, E hidden size, H query and K KV heads of size D.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from upipe_integrations.all_to_all import Group
from upipe_integrations.attention import upipe_attention
from upipe_integrations.engine.call import Staging
from upipe_integrations.kernels import AttentionSpec, Kernel
from upipe_integrations.mode import Mode
from upipe_integrations.planning.closed_forms import LayerShape
from upipe_integrations.projections.output import OutputProjection
from upipe_integrations.projections.projection import AttentionProjections, Projection, Weights
from upipe_integrations.projections.rotary import RotateHalf
from upipe_integrations.schedule import Schedule

SPEC = AttentionSpec()
"""Causal attention."""


@dataclass(frozen=True)
class Layer:
    """The layer's input, its weights in checkpoint order, and rotary tables of the same rows.

    Args:
        x: `[B, L, E]`.
        wq, wk, wv: `[H * D, E]`, `[K * D, E]`, `[K * D, E]`.
        wo: `[E, H * D]`.
        cos, sin: `[1, L, D]`.
        head_dim: D.
    """

    x: Tensor
    wq: Tensor
    wk: Tensor
    wv: Tensor
    wo: Tensor
    cos: Tensor
    sin: Tensor
    head_dim: int

    def leaves(self) -> dict[str, Tensor]:
        """What gets gradients."""
        return {name: getattr(self, name) for name in ("x", "wq", "wk", "wv", "wo")}

    def map(self, function: Callable[[Tensor], Tensor]) -> Layer:
        """The layer of other tensors."""
        tensors = {f.name: function(getattr(self, f.name)) for f in fields(self) if f.name != "head_dim"}
        return Layer(**tensors, head_dim=self.head_dim)

    def as_leaves(self) -> Layer:
        """The same layer for a run of its own: copies that require gradients."""
        mine = self.map(lambda t: t.detach().clone())
        for leaf in mine.leaves().values():
            leaf.requires_grad_()
        return mine

    def shard(self, rank: int, ranks: int) -> Layer:
        """The layer with a rank's rows."""
        L = self.x.shape[1] // ranks
        rows = slice(rank * L, (rank + 1) * L)
        # Not contiguous(): of a batch of one it keeps the stride of the whole, which no layer of a model is given.
        x, cos, sin = (t[:, rows].flatten().view(1, L, -1) for t in (self.x, self.cos, self.sin))
        return Layer(x, self.wq, self.wk, self.wv, self.wo, cos, sin, self.head_dim)


Run = Callable[[Layer], Tensor]
"""A layer's forward: its y `[B, L, E]`."""


def random_layer(
    shape: LayerShape, tokens: int, dtype: torch.dtype, seed: int = 0, device: torch.device | None = None
) -> Layer:
    """A layer whose heads, scores and outputs have the size they have in a model: x normal, weights 1/sqrt(fan-in).

    It is made on `device`, whose random numbers are others than the host's; None is the host.
    """
    H, K, D, E = shape.heads, shape.kv_heads, shape.head_dim, shape.hidden_size
    generator = torch.Generator(device or "cpu").manual_seed(seed)

    def normal(*size: int, fan_in: int = 1) -> Tensor:
        scaled: Tensor = torch.randn(*size, generator=generator, device=device) * fan_in**-0.5
        return scaled.to(dtype)

    frequency = 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), frequency).repeat(1, 2)[None]
    x, (wq, wk, wv) = normal(1, tokens, E), (normal(n * D, E, fan_in=E) for n in (H, K, K))
    wo = normal(E, H * D, fan_in=H * D)
    return Layer(x, wq, wk, wv, wo, angles.cos().to(dtype), angles.sin().to(dtype), D)


def upipe_layer(
    layer: Layer, schedule: Schedule, mode: Mode, group: Group, kernel: Kernel, *, sinks: Tensor | None = None
) -> Tensor:
    """y `[B, L, E]` by the engine."""
    rotary = RotateHalf(layer.cos, layer.sin)
    projections = AttentionProjections(
        Projection(Weights(layer.wq), layer.head_dim, rotary=rotary),
        Projection(Weights(layer.wk), layer.head_dim, rotary=rotary),
        Projection(Weights(layer.wv), layer.head_dim),
    )
    staging = Staging(schedule, group, kernel, mode=mode)
    return upipe_attention(layer.x, projections, staging, SPEC, sinks=sinks, output=OutputProjection(layer.wo))
