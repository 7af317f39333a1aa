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

from upipe_integrations.config import UPipeConfig
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import (
    upipe_peak,
    weight_gradients,
)
from upipe_integrations.planning.components import BF16, GIB, Memory, Method, attention_units, layer_shape, memory_of
from upipe_integrations.planning.models import Model
from upipe_integrations.planning.setup import Setup
from upipe_integrations.schedule import Schedule

_LONGEST = 2**32


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
        self.shape = layer_shape(model, setup)
        if chunk_heads is None:
            chunk_heads = (setup.ranks, *([2 * setup.ranks] if 2 * setup.ranks <= self.shape.heads else []))
        kinds = ["ring", "ulysses", *(["alst"] if setup.host == "deepspeed" else [])]
        self.methods = [Method(kind) for kind in kinds]
        self.methods += [Method("upipe", mode, U) for U in chunk_heads for mode in memory]
        self._units = {method: attention_units(method, self.shape, setup) for method in self.methods}

    def memory(self, method: Method, tokens: int) -> Memory:
        """What `method` takes on one GPU for sequences of `tokens`."""
        setup = _with_everything(self.setup) if method.kind == "alst" else self.setup
        return memory_of(self.model, setup, self._units[method], tokens)

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
        from upipe_integrations.planning.measure import fake_ranks, measured_upipe_peak

        with fake_ranks(self.setup.ranks):
            for tokens in lengths:
                gib = tokens * self.shape.head_dim * BF16 / GIB
                for method in self.methods:
                    if method.config is None:
                        continue
                    schedule, mode = self._schedule(method.config), method.config.mode
                    weights = weight_gradients(self.shape, tokens, schedule, mode)
                    output, kernel = self.setup.plain_output, self.setup.kernel
                    form = upipe_peak(self.shape, schedule, mode, with_output=output, kernel=kernel)
                    measured = measured_upipe_peak(
                        self.shape, schedule, mode, tokens, with_output=output, kernel=kernel
                    )
                    yield Traced(method, tokens, (form.training + weights) * gib, measured.training * gib)

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
