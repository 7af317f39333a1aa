"""The machine that a plan is for, and what is switched on."""

from __future__ import annotations

from dataclasses import dataclass

from upipe_integrations.config import closest
from upipe_integrations.planning.closed_forms import BUFFERS, USUAL_KERNEL

CHECKPOINTING = ("none", "full", "selective")


OFFLOAD = ("optimizer", "activations", "parameters")


HOSTS = ("deepspeed", "megatron")


ZERO = (0, 1, 2, 3)


PLANNED_KERNELS = tuple(BUFFERS)


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
        kernel: local attention, whose buffers are counted, of ``PLANNED_KERNELS``.
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
    kernel: str = USUAL_KERNEL

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
            ("--kernel", (self.kernel,), PLANNED_KERNELS),
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
