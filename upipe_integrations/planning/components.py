"""What one GPU holds in a training step, component by component; see ``plan`` for the letters."""

from __future__ import annotations

from dataclasses import dataclass

from upipe_integrations.config import UPipeConfig
from upipe_integrations.planning.closed_forms import (
    LayerShape,
    low_rank_terms,
    received_heads,
    ring_peak,
    ulysses_peak,
    upipe_peak,
)
from upipe_integrations.planning.models import Model
from upipe_integrations.planning.setup import Setup

GIB = 2**30


RESERVE = 0.08
"""What the allocator holds beyond the tensors that are live, as a share of activations; docs/plan.md says why."""


CONTEXT_GIB = 3.0
"""The CUDA context, cuBLAS's workspace, NCCL's buffers for the groups of a step, and kernels."""


BF16 = 2


_ADAM = 12  # float32 weight and two moments


_BUCKET = 500_000_000  # elements; DeepSpeed's reduce_bucket_size and allgather_bucket_size


_LOSS_TILE = 2**30  # bytes of float32 logits in a tile of the loss, as in ALST


@dataclass(frozen=True)
class _Accounting:
    """What a host holds per element.

    Args:
        gradient: bytes of a gradient.
        logit: bytes per logit at the peak of the loss.
        mlp: tensors of the MLP's width and row tensors at the peak of its backward.
        saved_mlp: tensors of the MLP's width that autograd saves in it.
    """

    gradient: int
    logit: int
    mlp: tuple[int, int]
    saved_mlp: int


_ACCOUNTING = {
    # Gradients in bfloat16 (communication_data_type and the ZeRO partitions). Transformers' loss: logits in bfloat16
    # and float32, log-softmax and its gradient in float32, less what is freed. Its MLP saves gate, SiLU, up and their
    # product; dproduct, and both results of the product's backward, come where the product is freed.
    "deepspeed": _Accounting(gradient=2, logit=12, mlp=(6, 4), saved_mlp=4),
    # Sums of gradients in float32; the fused vocabulary-parallel loss; a fused SwiGLU saves its input and output.
    "megatron": _Accounting(gradient=4, logit=6, mlp=(5, 6), saved_mlp=3),
}


@dataclass(frozen=True)
class Method:
    """One way to run attention.

    Args:
        kind: ``"ring"``, ``"ulysses"``, ``"alst"`` (Ulysses, and all of ALST's savings switched on) or ``"upipe"``.
        memory: UPipe's memory mode.
        chunk_heads: UPipe's query heads per stage.
    """

    kind: str
    memory: str | None = None
    chunk_heads: int | None = None

    def __str__(self) -> str:
        if self.kind == "upipe":
            return f"UPipe {self.memory}, U={self.chunk_heads}"
        return {"ring": "Ring", "ulysses": "Ulysses", "alst": "ALST-like"}[self.kind]

    @property
    def config(self) -> UPipeConfig | None:
        """UPipe's settings."""
        if self.memory is None or self.chunk_heads is None:
            return None
        return UPipeConfig(self.chunk_heads, memory=self.memory)


@dataclass(frozen=True)
class Memory:
    """GiB of one GPU, by component. Of attention, MLP and loss, the largest is there at a time.

    ``host`` is GiB of host memory per GPU and is not part of the total.
    """

    parameters: float
    gradients: float
    optimizer: float
    saved: float
    attention: float
    mlp: float
    loss: float
    workspace: float
    reserve: float
    host: float

    @property
    def total(self) -> float:
        """The peak."""
        fixed = self.parameters + self.gradients + self.optimizer + self.saved + self.workspace + self.reserve
        return fixed + max(self.attention, self.mlp, self.loss)


def layer_shape(model: Model, setup: Setup) -> LayerShape:
    """Attention of one tensor-parallel rank."""
    for name, heads in (("query heads", model.heads), ("KV heads", model.kv_heads)):
        if heads % setup.tp:
            raise ValueError(f"--tp {setup.tp}: must divide the {heads} {name} of {model.name}.")
    if model.layers < setup.pp:
        raise ValueError(f"--pp {setup.pp}: more than the {model.layers} layers of {model.name}.")
    heads = model.heads // setup.tp
    if heads < setup.ranks:
        raise ValueError(
            f"--ranks {setup.ranks}: more than the {heads} query heads of {model.name}"
            f"{f' on one of {setup.tp} tensor-parallel ranks' if setup.tp > 1 else ''}; every rank attends "
            f"at least one. Use at most {heads}, and --dp for more GPUs."
        )
    return LayerShape(heads, model.kv_heads // setup.tp, model.head_dim, model.hidden_size)


@dataclass(frozen=True)
class _Units:
    """Attention in units of `[S, D]` tensors: its training peak, and what autograd holds of a layer beside its input.

    ``result`` is what selective checkpointing keeps.
    """

    peak: float
    saved: float
    result: float


def attention_units(method: Method, shape: LayerShape, setup: Setup) -> _Units:
    """See ``memory`` for the peaks. Saved: q, K, V and the output; Ulysses's output in both layouts; log-sum-exp."""
    C = setup.ranks
    h, chi = shape.heads / C, shape.hidden_size / (C * shape.head_dim)
    lse = 2 * h / shape.head_dim
    if method.config is None:
        if method.kind == "ring":
            return _Units(ring_peak(shape, C).training, 2 * h + 2 * shape.kv_heads / C + lse, 0)
        return _Units(
            ulysses_peak(shape, C, kernel=setup.kernel).training, 3 * h + 2 * max(shape.kv_heads / C, 1) + lse, 0
        )
    schedule = method.config.schedule(heads=shape.heads, kv_heads=shape.kv_heads, ranks=C)
    mode = method.config.mode
    out = 0 if mode.output_in_loop else h
    more = (lse if mode.keeps_output else 0) + (received_heads(schedule) if mode.keeps_heads else 0)
    peak = upipe_peak(shape, schedule, mode, with_output=setup.plain_output, kernel=setup.kernel).training
    return _Units(peak, out + more, (out or chi) + more)


def memory_of(model: Model, setup: Setup, units: _Units, tokens: int) -> Memory:
    """The components; see the module docstring for the letters."""
    host, tp = _ACCOUNTING[setup.host], setup.tp
    L = tokens / setup.ranks
    unit = tokens * model.head_dim * BF16
    row = L * model.hidden_size * BF16 / tp  # of the residual stream
    gathered = L * model.hidden_size * BF16 if tp > 1 else 0
    wide = L * model.intermediate_size * BF16 / tp

    parameters, gradients, optimizer, on_host = _states(model, setup)

    # Saved for backward by a layer: its input; the result of attention too; or all that autograd holds: the inputs of
    # norms, attention and MLP (4 row tensors), what attention holds, the MLP's. Pipelines hold pp microbatches at once.
    result = units.result * unit if setup.checkpointing == "selective" else 0
    if setup.checkpointing == "none":
        mlp = 0 if setup.tiled_mlp else host.saved_mlp * wide
        layer = 4 * row + units.saved * unit + mlp
        recomputed = 0.0
    else:
        layer = row + result
        recomputed = 0 if result else units.saved * unit
    saved = layer * model.layers
    if "activations" in setup.offload:  # the layer in work and the next one are on the GPU
        on_host += saved
        saved = 2 * layer

    # Beside the closed form: attention's input, which is recomputed, and the gradient of the layer's output.
    attention = units.peak * unit + (gathered or row) + row
    if setup.lora_rank:
        shape = LayerShape(model.heads, model.kv_heads, model.head_dim, model.hidden_size)
        attention += low_rank_terms(shape, setup.ranks, 3 * setup.lora_rank) * unit
    # What attention saved is held until its own backward.
    if setup.tiled_mlp:
        tile = host.mlp[0] * model.intermediate_size * BF16 * min(L, model.hidden_size)
        mlp_peak = 5 * row + tile
    else:
        mlp_peak = host.mlp[0] * wide + host.mlp[1] * row + 2 * gathered
    mlp_peak += recomputed
    # The last hidden states, normed, and their gradient, beside the logits.
    logits = L * model.vocab_size / tp
    if setup.tiled_loss:
        logits = min(logits, _LOSS_TILE / 4)
    loss = 3 * row + gathered + host.logit * logits

    activations = saved + max(attention, mlp_peak, loss)
    workspace = CONTEXT_GIB * GIB + _workspace(model, setup)
    values = (parameters, gradients, optimizer, saved, attention, mlp_peak, loss, workspace, RESERVE * activations)
    return Memory(*(value / GIB for value in (*values, on_host)))


def _states(model: Model, setup: Setup) -> tuple[float, float, float, float]:
    """Bytes of parameters (bfloat16), gradients and Adam's float32 weights and moments on a GPU, and on the host.

    ZeRO splits the optimizer's state from stage 1, gradients from 2 and parameters from 3; DeepSpeed moves gradients
    from stage 2 to the host as they are reduced, where the optimizer is (arXiv 1910.02054, 2101.06840). Of a pipeline,
    a stage that has an embedding. With LoRA the adapters alone have gradients and an optimizer.
    """
    embeddings = model.embedding_parameters * (1 if model.tied or setup.pp > 1 else 2)
    layers = -(-model.layers // setup.pp)
    count = trained = (layers * model.layer_parameters + embeddings) / setup.tp
    if setup.lora_rank:
        trained = layers * model.adapter_parameters(setup.lora_rank)
        count += trained
    on_host = 0.0
    parameters = count * BF16 / (setup.shards if setup.zero == 3 else 1)
    gradients = trained * _ACCOUNTING[setup.host].gradient / (setup.shards if setup.zero >= 2 else 1)
    optimizer = trained * _ADAM / (setup.shards if setup.zero >= 1 else 1)
    if "parameters" in setup.offload:
        on_host, parameters = on_host + parameters, 0
    if "optimizer" in setup.offload:
        on_host, optimizer = on_host + optimizer, 0
        if setup.zero >= 2:
            on_host, gradients = on_host + gradients, 0
    return parameters, gradients, optimizer, on_host


def _workspace(model: Model, setup: Setup) -> float:
    """Bytes of gathered parameters and of gradients on their way.

    ZeRO-3: a layer, the next one that is fetched and the gradients of one; or the output layer and its gradient.
    ZeRO-1 and 2 in DeepSpeed: two buckets; Megatron's buffers are the gradients themselves. A frozen layer has no
    gradients, and adapters hardly any.
    """
    if setup.zero == 3:
        layers, outputs = (2, 1) if setup.lora_rank else (3, 2)
        return BF16 * max(layers * model.layer_parameters, outputs * model.embedding_parameters)
    whole = model.parameters / (setup.tp * setup.pp)
    if setup.lora_rank:
        whole = model.layers * model.adapter_parameters(setup.lora_rank)
    return 0 if setup.host == "megatron" else 2 * BF16 * min(_BUCKET, whole)
