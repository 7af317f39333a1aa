"""Memory of one GPU in a training step, before there is a run: arithmetic alone.

What a step holds at its peak is what is there all the time (parameters, gradients, the optimizer's state, saved
activations, workspace) and the largest of three moments, one of which is there at a time: the backward of a layer's
attention, of its MLP, and of the loss.

In the formulas S is the whole sequence, C the sequence-parallel ranks, E, F and V the sizes of layer, MLP and
vocabulary, T tensor-parallel ranks; activations are bfloat16, a microbatch is one sequence, and an `[S / C, E]`
tensor is called a row tensor. With tensor parallelism the residual stream is split over its ranks
(``--sequence-parallel``) and gathered where attention and MLP read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from upipe_integrations.config import UPipeConfig, closest
from upipe_integrations.memory import (
    LayerShape,
    low_rank_terms,
    received_heads,
    ring_peak,
    ulysses_peak,
    upipe_peak,
    weight_gradients,
)
from upipe_integrations.mode import MEMORY
from upipe_integrations.models import Model
from upipe_integrations.schedule import Schedule

GIB = 2**30
CHECKPOINTING = ("none", "full", "selective")
OFFLOAD = ("optimizer", "activations", "parameters")
HOSTS = ("deepspeed", "megatron")
ZERO = (0, 1, 2, 3)
RESERVE = 0.08
"""What the allocator holds beyond the tensors that are live, as a share of activations; docs/plan.md says why."""
CONTEXT_GIB = 3.0
"""The CUDA context, cuBLAS's workspace, NCCL's buffers for the groups of a step, and kernels."""
_BF16 = 2
_ADAM = 12  # float32 weight and two moments
_BUCKET = 500_000_000  # elements; DeepSpeed's reduce_bucket_size and allgather_bucket_size
_LOSS_TILE = 2**30  # bytes of float32 logits in a tile of the loss, as in ALST
_LONGEST = 2**32


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
class Setup:
    """The machine and what is switched on.

    Args:
        ranks: GPUs that share a sequence.
        gpu_memory: GiB of one GPU.
        host: whose accounting: ``"deepspeed"`` or ``"megatron"``.
        zero: the ZeRO stage; 1 is Megatron's distributed optimizer. States are split over ``ranks * dp`` GPUs.
        tp, pp, dp: ranks of tensor, pipeline and data parallelism.
        checkpointing: ``"none"``, ``"full"`` (every layer keeps its input), or ``"selective"`` (and the result of
            UPipe's attention, so that it is not run once more).
        offload: what is in host memory, of ``OFFLOAD``.
        tiled_mlp: the MLP runs in tiles of E rows that are checkpointed (ALST's TiledMLP).
        tiled_loss: logits are formed for some rows at a time (``deepspeed_plugin.tiled_sequence_parallel_loss``).
        lora_rank: the rank of LoRA on all linear layers of the decoder, which alone is trained; 0 trains the model.

    Raises:
        ValueError: a value out of range, or one the host does not have; the message names option, rule and remedy.
    """

    ranks: int
    gpu_memory: float
    host: str = "deepspeed"
    zero: int = 3
    tp: int = 1
    pp: int = 1
    dp: int = 1
    checkpointing: str = "full"
    offload: tuple[str, ...] = ()
    tiled_mlp: bool = False
    tiled_loss: bool = False
    lora_rank: int = 0

    def __post_init__(self) -> None:
        for field in ("ranks", "tp", "pp", "dp"):
            if getattr(self, field) < 1:
                raise ValueError(f"--{field} {getattr(self, field)}: must be positive.")
        if self.lora_rank < 0:
            raise ValueError(f"--lora-rank {self.lora_rank}: must be positive, or 0 for training the whole model.")
        if not 0 < self.gpu_memory < float("inf"):
            raise ValueError(f"--gpu-memory {self.gpu_memory:g}: must be a positive number of GiB.")
        for option, values, known in (
            ("--host", (self.host,), HOSTS),
            ("--zero", (self.zero,), ZERO),
            ("--checkpointing", (self.checkpointing,), CHECKPOINTING),
            ("--offload", self.offload, OFFLOAD),
        ):
            for value in values:
                if value not in known:
                    hint = closest(str(value), map(str, known))
                    raise ValueError(f"{option} {value}: no such word{hint}. Known: {', '.join(map(str, known))}.")
        if self.host == "megatron":
            self._check_megatron()
        elif max(self.tp, self.pp) > 1:
            raise ValueError(f"--tp {self.tp} --pp {self.pp}: DeepSpeed with UPipe has neither. Add --host megatron.")
        if "parameters" in self.offload and self.zero != 3:
            raise ValueError(f"--offload parameters with --zero {self.zero}: only ZeRO-3 moves them. Use --zero 3.")
        if "optimizer" in self.offload and self.zero == 0:
            raise ValueError("--offload optimizer with --zero 0: needs a stage of ZeRO. Use --zero 1 or more.")
        if "activations" in self.offload and self.checkpointing == "none":
            raise ValueError(
                "--offload activations with --checkpointing none: what is moved is the inputs of checkpointed layers. "
                "Use --checkpointing full."
            )

    def _check_megatron(self) -> None:
        for wrong, what in (
            (self.zero > 1, f"--zero {self.zero}: UPipe serves Megatron's distributed optimizer alone. Use --zero 1."),
            (self.lora_rank, f"--lora-rank {self.lora_rank}: UPipe serves PEFT's LoRA under DeepSpeed. Leave it out."),
            (self.tiled_mlp, "--tiled-mlp: Megatron has no such MLP. Split it with --tp."),
            (
                self.checkpointing == "selective",
                "--checkpointing selective: Megatron keeps a layer's input alone. Use --checkpointing full.",
            ),
            (
                "activations" in self.offload,
                "--offload activations: Megatron leaves the inputs of recomputed layers on the GPU. Leave it out.",
            ),
            ("parameters" in self.offload, "--offload parameters: they stay on the GPU. Split them with --tp or --pp."),
        ):
            if wrong:
                raise ValueError(f"--host megatron with {what}")

    @property
    def plain_output(self) -> bool:
        """Whether the output projection is a plain layer, which memory modes that may take it then do."""
        return not self.lora_rank

    @property
    def shards(self) -> int:
        """GPUs over which ZeRO splits."""
        return self.ranks * self.dp

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.shards * self.tp * self.pp


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


@dataclass(frozen=True)
class Row:
    """A method at one length."""

    method: Method
    tokens: int
    memory: Memory
    fits: bool


@dataclass(frozen=True)
class Traced:
    """GiB of one layer's attention at its training peak, gradients of its weights included: computed and measured."""

    method: Method
    tokens: int
    closed_form: float
    measured: float

    @property
    def difference(self) -> float:
        """Of the closed form from what was measured, relative."""
        return self.closed_form / self.measured - 1


class Plan:
    """Everything a plan of one model says.

    Args:
        model: the model.
        setup: the machine and what is switched on.
        chunk_heads: UPipe's query heads per stage to plan for; None for the ranks, and twice as many.
        memory: UPipe's memory modes to plan for.

    Raises:
        ValueError: the model's heads do not fit the ranks, or ``chunk_heads`` does not fit either.
    """

    def __init__(
        self,
        model: Model,
        setup: Setup,
        *,
        chunk_heads: tuple[int, ...] | None = None,
        memory: tuple[str, ...] = MEMORY,
    ) -> None:
        self.model = model
        self.setup = setup
        self.shape = _shape(model, setup)
        if chunk_heads is None:
            chunk_heads = (setup.ranks, *([2 * setup.ranks] if 2 * setup.ranks <= self.shape.heads else []))
        kinds = ["ring", "ulysses", *(["alst"] if setup.host == "deepspeed" else [])]
        self.methods = [Method(kind) for kind in kinds]
        self.methods += [Method("upipe", mode, U) for U in chunk_heads for mode in memory]
        self._units = {method: _units(method, self.shape, setup) for method in self.methods}

    def memory(self, method: Method, tokens: int) -> Memory:
        """What `method` takes on one GPU for sequences of `tokens`."""
        setup = _with_everything(self.setup) if method.kind == "alst" else self.setup
        return _memory(self.model, setup, self._units[method], tokens)

    def rows(self, tokens: int) -> list[Row]:
        """Every method at one length.

        Raises:
            ValueError: the ranks do not divide the length.
        """
        step = self.step
        if tokens % step:
            raise ValueError(
                f"--seq-len {tokens}: the {step} ranks that share a sequence must divide it; "
                f"{-(-tokens // step) * step} is the next that they do."
            )
        found = [(method, self.memory(method, tokens)) for method in self.methods]
        return [Row(method, tokens, memory, memory.total <= self.setup.gpu_memory) for method, memory in found]

    def longest(self, method: Method) -> int:
        """The longest sequence that fits, in whole steps of 1024 tokens a rank; 0 when none does."""
        step = self.step * 1024
        low, high = 0, _LONGEST // step
        while high - low > 1:
            middle = (low + high) // 2
            if self.memory(method, middle * step).total <= self.setup.gpu_memory:
                low = middle
            else:
                high = middle
        return low * step

    @property
    def step(self) -> int:
        """GPUs that share the rows of a sequence."""
        return self.setup.ranks * self.setup.tp

    def trace(self, lengths: Iterable[int]) -> Iterator[Traced]:
        """UPipe's attention at each length, measured on fake tensors through the engine beside its closed form.

        Needs torch, and a process without a process group; at millions of tokens ``"blocks"`` takes seconds a row.
        """
        from upipe_integrations.measure import fake_ranks, measured_upipe_peak

        with fake_ranks(self.setup.ranks):
            for tokens in lengths:
                gib = tokens * self.shape.head_dim * _BF16 / GIB
                for method in self.methods:
                    if method.config is None:
                        continue
                    schedule, mode = self._schedule(method.config), method.config.mode
                    weights = weight_gradients(self.shape, tokens, schedule, mode)
                    given = {"given_output": self.setup.plain_output}
                    form = upipe_peak(self.shape, schedule, mode, **given).training + weights
                    measured = measured_upipe_peak(self.shape, schedule, mode, tokens, **given).training
                    yield Traced(method, tokens, form * gib, measured * gib)

    def _schedule(self, config: UPipeConfig) -> Schedule:
        return config.schedule(heads=self.shape.heads, kv_heads=self.shape.kv_heads, ranks=self.setup.ranks)

    def recommended(self, tokens: int) -> Method | None:
        """The UPipe method with least work that fits, or None; more heads a stage are faster."""
        fitting = [row.method for row in self.rows(tokens) if row.fits and row.method.config is not None]
        return min(fitting, key=_work, default=None)

    def farthest(self) -> Method:
        """The UPipe method that goes farthest; of equal ones that with least work."""
        ours = [method for method in self.methods if method.config is not None]
        return min(ours, key=lambda method: (-self.longest(method), *_work(method)))

    def advice(self, tokens: int) -> Plan | None:
        """A plan that fits `tokens` with the least switched on besides, or None when no setting is enough."""
        modes = tuple(dict.fromkeys(m.memory for m in self.methods if m.memory is not None))
        heads = tuple(dict.fromkeys(m.chunk_heads for m in self.methods if m.chunk_heads is not None))

        def fitting(setup: Setup) -> Plan | None:
            plan = Plan(self.model, setup, chunk_heads=heads, memory=modes)
            return plan if plan.recommended(tokens) else None

        steps = list(_steps(self.setup))
        if fitting(_applied(self.setup, steps)) is None:
            return None
        # What is not needed is left out, the dearest first.
        for step in reversed(list(steps)):
            without = [other for other in steps if other is not step]
            if fitting(_applied(self.setup, without)) is not None:
                steps = without
        return fitting(_applied(self.setup, steps))


def _work(method: Method) -> tuple[int, int]:
    return MEMORY.index(method.memory or "keep"), -(method.chunk_heads or 0)


def _steps(setup: Setup) -> Iterator[dict[str, object]]:
    """What may be switched on besides, from what costs least time."""
    if not setup.tiled_loss:
        yield {"tiled_loss": True}
    if setup.checkpointing != "full":
        yield {"checkpointing": "full"}
    if setup.host == "megatron":
        if setup.zero < 1:
            yield {"zero": 1}
        if "optimizer" not in setup.offload:
            yield {"offload": "optimizer"}
        return
    if not setup.tiled_mlp:
        yield {"tiled_mlp": True}
    if setup.zero < 3:
        yield {"zero": 3}
    for what in ("activations", "optimizer"):
        if what not in setup.offload:
            yield {"offload": what}


def _applied(setup: Setup, steps: list[dict[str, object]]) -> Setup:
    offload = (*setup.offload, *(step["offload"] for step in steps if "offload" in step))
    changes = {key: value for step in steps for key, value in step.items() if key != "offload"}
    if "activations" in offload and changes.get("checkpointing", setup.checkpointing) == "none":
        offload = tuple(what for what in offload if what != "activations")
    if "optimizer" in offload and changes.get("zero", setup.zero) == 0:
        offload = tuple(what for what in offload if what != "optimizer")
    return dataclasses.replace(setup, offload=offload, **changes)  # type: ignore[arg-type]


def _with_everything(setup: Setup) -> Setup:
    """ALST's recipe: ZeRO-3, checkpointed layers whose inputs are offloaded as the optimizer is, tiled MLP and loss."""
    offload = tuple(dict.fromkeys((*setup.offload, "optimizer", "activations")))
    return dataclasses.replace(setup, zero=3, checkpointing="full", offload=offload, tiled_mlp=True, tiled_loss=True)


def _shape(model: Model, setup: Setup) -> LayerShape:
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


def _units(method: Method, shape: LayerShape, setup: Setup) -> _Units:
    """See ``memory`` for the peaks. Saved: q, K, V and the output; Ulysses's output in both layouts; log-sum-exp."""
    C = setup.ranks
    h, chi = shape.heads / C, shape.hidden_size / (C * shape.head_dim)
    lse = 2 * h / shape.head_dim
    if method.config is None:
        if method.kind == "ring":
            return _Units(ring_peak(shape, C).training, 2 * h + 2 * shape.kv_heads / C + lse, 0)
        return _Units(ulysses_peak(shape, C).training, 3 * h + 2 * max(shape.kv_heads / C, 1) + lse, 0)
    schedule = method.config.schedule(heads=shape.heads, kv_heads=shape.kv_heads, ranks=C)
    mode = method.config.mode
    out = 0 if mode.fuses_output else h
    more = (lse if mode.keeps_output else 0) + (received_heads(schedule) if mode.keeps_heads else 0)
    peak = upipe_peak(shape, schedule, mode, given_output=setup.plain_output).training
    return _Units(peak, out + more, (out or chi) + more)


def _memory(model: Model, setup: Setup, units: _Units, tokens: int) -> Memory:
    """The components; see the module docstring for the letters."""
    host, tp = _ACCOUNTING[setup.host], setup.tp
    L = tokens / setup.ranks
    unit = tokens * model.head_dim * _BF16
    row = L * model.hidden_size * _BF16 / tp  # of the residual stream
    gathered = L * model.hidden_size * _BF16 if tp > 1 else 0
    wide = L * model.intermediate_size * _BF16 / tp

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
        tile = host.mlp[0] * model.intermediate_size * _BF16 * min(L, model.hidden_size)
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
    parameters = count * _BF16 / (setup.shards if setup.zero == 3 else 1)
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
        of_layer, of_output = (2, 1) if setup.lora_rank else (3, 2)
        return _BF16 * max(of_layer * model.layer_parameters, of_output * model.embedding_parameters)
    whole = model.parameters / (setup.tp * setup.pp)
    if setup.lora_rank:
        whole = model.layers * model.adapter_parameters(setup.lora_rank)
    return 0 if setup.host == "megatron" else 2 * _BF16 * min(_BUCKET, whole)
