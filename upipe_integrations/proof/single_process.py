"""The layer of a case in one process: plain attention under autograd in float64, sharing no code with the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from upipe_integrations.proof.case import Case, angles, layer_tensors


def single_process(case: Case) -> dict[str, Tensor]:
    """The output and every gradient, in float64 from the rounded inputs."""
    leaves = {name: t.double().requires_grad_() for name, t in layer_tensors(case).items()}
    dout = leaves.pop("dout").detach()
    hidden = ~_visible(case)
    value_dim = case.value_dim or case.head_dim
    wo = leaves["wo"].detach() if "wo" in leaves else None
    outs = []
    for i in range(case.heads):
        columns = slice(i * value_dim, (i + 1) * value_dim)
        out = _one_head(case, leaves, hidden, i)
        out.backward(dout[..., columns] if wo is None else dout @ wo[:, columns])
        outs.append(out.detach())
    grads = {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}
    whole = torch.cat(outs, -1)
    if wo is None:
        return {"out": whole, **grads}
    grads["dwo"] = dout.flatten(0, 1).T @ whole.flatten(0, 1)
    y = whole @ wo.T
    if "bo" in leaves:
        y = y + leaves["bo"].detach()
        grads["dbo"] = dout.sum((0, 1))
    return {"out": y, **grads}


def _one_head(case: Case, leaves: dict[str, Tensor], hidden: Tensor, i: int) -> Tensor:
    """Query head i's output `[B, S, Dv]`, with its KV head ``i // (heads / kv_heads)``."""
    j = i // (case.heads // case.kv_heads)
    heads = {}
    for name, number in (("q", i), ("k", j), ("v", j)):
        width = (case.value_dim or case.head_dim) if name == "v" else case.head_dim
        rows = slice(number * width, (number + 1) * width)
        head = leaves["x"] @ leaves[f"w{name}"][rows].T
        if f"b{name}" in leaves:
            head = head + leaves[f"b{name}"][rows]
        if f"{name}_norm" in leaves:
            head = head / (head.square().mean(-1, keepdim=True) + 1e-6).sqrt() * leaves[f"{name}_norm"]
        if name != "v":
            half = case.head_dim // 2
            turn = torch.polar(torch.ones(()).double(), angles(case))
            turned = torch.complex(head[..., :half], head[..., half:]) * turn
            head = torch.cat([turned.real, turned.imag], -1)
        heads[name] = head
    scores = heads["q"] @ heads["k"].mT * (case.spec.scale or case.head_dim**-0.5)
    if case.spec.softcap is not None:
        scores = case.spec.softcap * (scores / case.spec.softcap).tanh()
    scores = scores.masked_fill(hidden, float("-inf"))
    if "sinks" in leaves:
        sink = leaves["sinks"][i].expand(*scores.shape[:2], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ heads["v"]
    return scores.softmax(-1) @ heads["v"]


def _visible(case: Case) -> Tensor:
    """`[B, S, S]`: whether a query sees a key."""
    S = case.seq_len
    rows, keys = torch.arange(S)[:, None], torch.arange(S)[None]
    seen = keys <= rows if case.spec.causal else torch.ones(S, S, dtype=torch.bool)
    if case.spec.window is not None:
        seen = seen & (rows - keys < case.spec.window)
    seen = seen.expand(case.batch, S, S).clone()
    for b in range(case.batch):
        if case.spec.documents is not None:
            bounds = case.spec.documents[b % len(case.spec.documents)]
            document = torch.bucketize(torch.arange(S), torch.tensor(bounds[1:]), right=True)
            seen[b] &= document[:, None] == document[None]
    return seen
