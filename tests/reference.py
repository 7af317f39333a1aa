"""Single-process attention, written independently of the package under test and sharing no code with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class Layer:
    """One attention layer's tensors, full sequence, and how to run it."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    x: torch.Tensor
    wq: torch.Tensor
    wk: torch.Tensor
    wv: torch.Tensor
    dout: torch.Tensor
    bq: torch.Tensor | None = None
    bk: torch.Tensor | None = None
    bv: torch.Tensor | None = None
    q_gain: torch.Tensor | None = None
    k_gain: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    wo: torch.Tensor | None = None
    bo: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    causal: bool = True
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    kept: torch.Tensor | None = None
    """`[heads, B, S, S]`, dropout as a factor on probabilities."""

    LEAVES = ("x", "wq", "wk", "wv", "bq", "bk", "bv", "q_gain", "k_gain", "sinks", "wo", "bo")

    def leaves(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in self.LEAVES if getattr(self, name) is not None}


def make_layer(
    heads: int,
    kv_heads: int,
    *,
    head_dim: int = 8,
    value_dim: int | None = None,
    size: int = 24,
    batch: int = 1,
    seq: int = 16,
    bias: bool = False,
    norm: bool = False,
    sinks: bool = False,
    output: bool = False,
    rotary: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **attention,
) -> Layer:
    """Random tensors; every head, row and batch entry differs, so that a misrouted one cannot go unseen."""
    g = torch.Generator().manual_seed(seed)
    value_dim = value_dim or head_dim

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    cos = sin = None
    if rotary:
        frequency = 1.0 / 100.0 ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.arange(seq, dtype=torch.float64)[:, None] * frequency[None]
        angle = torch.cat([angle, angle], -1)[None]
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    w = 1.0 / math.sqrt(size)
    out_size = size + 4 if output else heads * value_dim
    return Layer(
        heads,
        kv_heads,
        head_dim,
        value_dim,
        x=rand(batch, seq, size),
        wq=rand(heads * head_dim, size, scale=2 * w),
        wk=rand(kv_heads * head_dim, size, scale=2 * w),
        wv=rand(kv_heads * value_dim, size, scale=w),
        dout=rand(batch, seq, out_size),
        bq=rand(heads * head_dim, scale=0.3) if bias else None,
        bk=rand(kv_heads * head_dim, scale=0.3) if bias else None,
        bv=rand(kv_heads * value_dim, scale=0.3) if bias else None,
        q_gain=1 + rand(head_dim, scale=0.3) if norm else None,
        k_gain=1 + rand(head_dim, scale=0.3) if norm else None,
        sinks=rand(heads) if sinks else None,
        wo=rand(out_size, heads * value_dim, scale=1 / math.sqrt(heads * value_dim)) if output else None,
        bo=rand(out_size, scale=0.3) if output and bias else None,
        cos=cos,
        sin=sin,
        **attention,
    )


def visible(layer: Layer) -> torch.Tensor:
    """`[B, S, S]`: whether a query (row) sees a key (column), pair by pair."""
    B, S = layer.x.shape[:2]
    row, column = torch.arange(S)[:, None], torch.arange(S)[None, :]
    seen = torch.ones(B, S, S, dtype=torch.bool)
    if layer.causal:
        seen &= column <= row
    if layer.window is not None:
        seen &= row - column < layer.window
    for b in range(B):
        if layer.documents is not None:
            bounds = layer.documents[b if len(layer.documents) > 1 else 0]
            document = sum((torch.arange(S) >= edge).long() for edge in bounds)
            seen[b] &= document[:, None] == document[None, :]
    return seen


def attend(layer: Layer, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[B, S, H * Dv]`, or after the output projection.

    Head by head: nothing is batched over heads, so no layout can hide a mispairing.
    """
    D, Dv = layer.head_dim, layer.value_dim
    hidden = ~visible(layer)
    outs = []
    for i in range(layer.heads):
        j = i // (layer.heads // layer.kv_heads)
        q = leaves["x"] @ leaves["wq"][i * D : (i + 1) * D].T
        k = leaves["x"] @ leaves["wk"][j * D : (j + 1) * D].T
        v = leaves["x"] @ leaves["wv"][j * Dv : (j + 1) * Dv].T
        if "bq" in leaves:
            q = q + leaves["bq"][i * D : (i + 1) * D]
            k = k + leaves["bk"][j * D : (j + 1) * D]
            v = v + leaves["bv"][j * Dv : (j + 1) * Dv]
        if "q_gain" in leaves:
            q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * leaves["q_gain"]
            k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * leaves["k_gain"]
        if layer.cos is not None:
            q, k = turn(q, layer.cos, layer.sin), turn(k, layer.cos, layer.sin)
        scores = torch.einsum("bsd,btd->bst", q, k) * (layer.scale or 1 / math.sqrt(D))
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        weights = torch.exp(scores.masked_fill(hidden, float("-inf")))
        total = weights.sum(-1, keepdim=True)
        if "sinks" in leaves:
            total = total + torch.exp(leaves["sinks"][i])
        weights = weights / total
        if layer.kept is not None:
            weights = weights * layer.kept[i]
        outs.append(torch.einsum("bst,btd->bsd", weights, v))
    out = torch.cat(outs, -1)
    if "wo" in leaves:
        out = out @ leaves["wo"].T
    return out + leaves["bo"] if "bo" in leaves else out


def turn(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotation by complex numbers: pair (d, d + D/2) turns by the angle whose cos and sin are given."""
    half = t.shape[-1] // 2
    z = torch.complex(t[..., :half], t[..., half:]) * torch.complex(cos[..., :half], sin[..., :half])
    return torch.cat([z.real, z.imag], -1)


def reference(layer: Layer) -> dict[str, torch.Tensor]:
    """The output and the gradient of every leaf."""
    leaves = {name: t.clone().requires_grad_() for name, t in layer.leaves().items()}
    out = attend(layer, leaves)
    out.backward(layer.dout)
    return {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items()}}
