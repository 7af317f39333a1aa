"""The ``upipe`` command: plan memory, prove a layer on this machine, say what is here."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from upipe_integrations.config import KERNEL_NAMES
from upipe_integrations.mode import ACCUMULATE, MEMORY
from upipe_integrations.models import PRESETS, find_model
from upipe_integrations.plan import CHECKPOINTING, HOSTS, OFFLOAD, ZERO, Plan, Setup
from upipe_integrations.plan_report import as_dict, plot, text, trace_table

if TYPE_CHECKING:
    from upipe_integrations.check import Case, Finding

# What needs torch is imported in the commands that need it: torch takes seconds to import.

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_LAYOUTS = ("contiguous", "zigzag", "packed-zigzag")
_HOSTS = ("deepspeed", "transformers", "accelerate", "megatron-core", "flash-attn", "flash-attn-3", "flash-attn-4")


class _Parser(argparse.ArgumentParser):
    """Wrong words are one line, as every other error is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 agreed, 1 did not, 2 wrong input."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ValueError as error:
        print(f"upipe {options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="upipe", description="Head-chunked context-parallel attention (UPipe): plan it, prove it.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_check(commands)
    info = commands.add_parser(
        "info",
        help="versions, kernels and hosts on this machine",
        description="Versions, the kernels that can run here and why others can't, and the hosts that are installed.",
    )
    info.set_defaults(run=_info)
    return parser


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="memory of one GPU by method and length, what fits, and the settings for it",
        description="Memory of one GPU in a training step under ring attention, Ulysses, ALST and UPipe: by component, "
        "what fits, the longest sequence of each, and settings to paste. Arithmetic: nothing runs, no GPU is needed.",
        epilog="example: upipe plan llama3-8b --ranks 8 --gpu-memory 80 --seq-len 1M,5M --tiled-mlp --tiled-loss "
        "--offload activations. Lengths: K is 1024 and M 1024 * 1024 tokens, so 5M is 5242880; 5000000 is taken as it "
        f"is. Presets: {', '.join(PRESETS)}.",
    )
    parser.add_argument("model", metavar="MODEL", help="a preset, a config.json or its folder, or a downloaded model")
    parser.add_argument("--seq-len", default="1M", metavar="A,B,...", help="lengths in tokens (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.add_argument("--plot", metavar="FILE.png", help="draw memory against tokens; needs matplotlib")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="measure UPipe's attention through the engine on fake tensors; needs no GPU",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument("--ranks", type=int, default=8, metavar="N", help="GPUs that share a sequence (default: 8)")
    machine.add_argument("--gpu-memory", type=float, default=80, metavar="GIB", help="of one GPU (default: 80)")
    machine.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    machine.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (default: 1)")
    machine.add_argument("--dp", type=int, default=1, metavar="N", help="data-parallel replicas (default: 1)")
    stack = parser.add_argument_group("what is switched on")
    stack.add_argument("--host", choices=HOSTS, default="deepspeed", help="whose accounting (default: %(default)s)")
    stack.add_argument("--zero", type=int, choices=ZERO, help="default: 3; of Megatron 1, its distributed optimizer")
    stack.add_argument(
        "--checkpointing",
        choices=CHECKPOINTING,
        default="full",
        help="of activations; selective keeps attention's result beside a layer's input (default: %(default)s)",
    )
    stack.add_argument("--offload", metavar="A,B", help=f"to host memory: {', '.join(OFFLOAD)}")
    stack.add_argument("--tiled-mlp", action="store_true", help="the MLP in tiles of rows")
    stack.add_argument("--tiled-loss", action="store_true", help="logits of some rows at a time")
    stack.add_argument(
        "--lora-rank", type=int, default=0, metavar="N", help="train LoRA on all linear layers, the model frozen"
    )
    upipe = parser.add_argument_group("UPipe")
    upipe.add_argument("--chunk-heads", metavar="A,B", help="query heads per stage (default: ranks, and twice them)")
    upipe.add_argument("--memory", metavar="A,B", help=f"memory modes: {', '.join(MEMORY)} (default: all)")
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    setup = Setup(
        ranks=options.ranks,
        gpu_memory=options.gpu_memory,
        host=options.host,
        zero=(1 if options.host == "megatron" else 3) if options.zero is None else options.zero,
        tp=options.tp,
        pp=options.pp,
        dp=options.dp,
        checkpointing=options.checkpointing,
        offload=_words(options.offload) if options.offload else (),
        tiled_mlp=options.tiled_mlp,
        tiled_loss=options.tiled_loss,
        lora_rank=options.lora_rank,
    )
    if options.trace and options.lora_rank:
        raise ValueError("--trace with --lora-rank: measures a layer whose weights are trained. Leave one of them out.")
    lengths = [_size("--seq-len", part) for part in options.seq_len.split(",")]
    plan = Plan(
        find_model(options.model),
        setup,
        chunk_heads=_numbers("--chunk-heads", options.chunk_heads) if options.chunk_heads else None,
        memory=_words(options.memory) if options.memory else MEMORY,
    )
    if options.json:
        print(json.dumps(as_dict(plan, lengths, plan.trace(lengths) if options.trace else ()), indent=1))
    else:
        print(text(plan, lengths), flush=True)
        if options.trace:
            print(f"\n{trace_table(plan.trace(lengths))}")
    if options.plot:
        plot(plan, lengths, options.plot)
    return 0


def _size(option: str, word: str) -> int:
    """Tokens from ``5M``, ``1.5M``, ``128K`` or ``5000000``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", word.strip())
    tokens = float(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if tokens < 1 or tokens != int(tokens):
        raise ValueError(f"{option} {word}: must be tokens such as 128K, 5M (5 * 2**20) or 5000000.")
    return int(tokens)


def _numbers(option: str, words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise ValueError(f"{option} {words}: must be numbers such as 8 or 8,16.") from None


def _words(words: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in words.split(",")))


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "check",
        help="prove one attention layer on several ranks against one process",
        description="Start the ranks here, run one attention layer forward and backward through UPipe, and compare its "
        "output and every gradient with plain attention in one process in float64. Exit status: 0 when all agree, 1 "
        "when one does not, 2 for wrong input.",
        epilog="example: upipe check --heads 6 --kv-heads 3 --head-dim 16 --seq-len 64 --ranks 4 --chunk-heads 4",
    )
    layer = parser.add_argument_group("layer")
    layer.add_argument("--heads", type=int, required=True, metavar="N", help="query heads over all ranks")
    layer.add_argument("--kv-heads", type=int, metavar="N", help="KV heads over all ranks (default: as --heads)")
    layer.add_argument("--head-dim", type=int, default=64, metavar="N", help="size of a head (default: %(default)s)")
    layer.add_argument("--value-dim", type=int, metavar="N", help="size of a value head (default: as --head-dim)")
    layer.add_argument("--seq-len", type=int, default=256, metavar="N", help="tokens (default: %(default)s)")
    layer.add_argument("--batch", type=int, default=1, metavar="N", help="batch rows (default: %(default)s)")
    layer.add_argument("--bias", action="store_true", help="q, k, v biases")
    layer.add_argument("--norm", action="store_true", help="a norm per query and key head")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks to start (default: %(default)s)")
    how.add_argument("--chunk-heads", type=int, metavar="N", help="query heads per stage (default: as --ranks)")
    how.add_argument("--kernel", choices=("auto", *KERNEL_NAMES), default="auto", help="default: %(default)s")
    how.add_argument("--dtype", choices=_DTYPES, help="default: float64 on CPUs, bfloat16 on GPUs")
    how.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where every rank finds a GPU")
    how.add_argument("--layout", choices=_LAYOUTS, default="contiguous", help="rows of a rank (default: %(default)s)")
    how.add_argument("--memory", choices=MEMORY, default="keep", help="what is kept (default: %(default)s)")
    how.add_argument("--query-blocks", type=int, default=4, metavar="N", help="of memory blocks (default: %(default)s)")
    how.add_argument("--accumulate", choices=ACCUMULATE, default="auto", help="sums (default: %(default)s)")
    how.add_argument("--overlap", action="store_true", help="send the next stage's heads during attention")
    how.add_argument("--partial", action="store_true", help="the form for heads that are projected already")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of the random tensors (default: %(default)s)")
    mask = parser.add_argument_group("masks and variants")
    mask.add_argument("--full", action="store_true", help="full instead of causal attention")
    mask.add_argument("--window", type=int, metavar="N", help="sliding window: a token sees itself and N-1 before it")
    mask.add_argument("--packed", metavar="A,B,...", help="lengths of packed documents, or one number of equal ones")
    mask.add_argument("--softcap", type=float, metavar="X", help="scores are capped at X by tanh")
    mask.add_argument("--scale", type=float, metavar="X", help="factor on scores (default: head_dim ** -0.5)")
    mask.add_argument("--sinks", action="store_true", help="one sink logit per query head")
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    from upipe_integrations.check import check
    from upipe_integrations.kernels import select_kernel

    case = _case(options)
    kernel = select_kernel(case.kernel, case.request())
    features = ", ".join(case.request().features())
    print(
        f"{case.heads} query and {case.kv_heads} KV heads of {case.head_dim}, {case.batch} x {case.seq_len} tokens, "
        f"{case.ranks} ranks, {len(case.schedule().stages)} stages of {case.chunk_heads} heads; kernel {kernel.name}, "
        f"memory {case.memory}, {options.layout} layout, {str(case.dtype).removeprefix('torch.')} on {case.device}"
        f"{f'; {features}' if features else ''}",
        flush=True,
    )
    try:
        findings = check(case)
    except RuntimeError as error:
        print(f"upipe check: {error}", file=sys.stderr)
        return 1
    print(_table(findings))
    wrong = [finding.tensor for finding in findings if not finding.agrees]
    if wrong:
        print(f"DIFFERS: {', '.join(wrong)}")
        return 1
    print(f"ok: the output and {len(findings) - 1} gradients agree with one process")
    return 0


def _case(options: argparse.Namespace) -> Case:
    """The case the options describe; raises ValueError."""
    import torch

    from upipe_integrations.check import Case
    from upipe_integrations.kernels import AttentionSpec
    from upipe_integrations.layout import Layout

    documents = _documents(options.packed, options.seq_len)
    if options.layout == "packed-zigzag" and documents is None:
        raise ValueError("--layout packed-zigzag: needs --packed, the lengths of the documents.")
    layout = {
        "contiguous": Layout.contiguous(),
        "zigzag": Layout.zigzag(),
        "packed-zigzag": Layout.packed_zigzag(documents or (0, options.seq_len)),
    }[options.layout]
    device = options.device or ("cuda" if 0 < options.ranks <= torch.cuda.device_count() else "cpu")
    return Case(
        heads=options.heads,
        kv_heads=options.heads if options.kv_heads is None else options.kv_heads,
        head_dim=options.head_dim,
        seq_len=options.seq_len,
        ranks=options.ranks,
        chunk_heads=options.ranks if options.chunk_heads is None else options.chunk_heads,
        value_dim=options.value_dim,
        batch=options.batch,
        kernel=options.kernel,
        dtype=getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float64")),
        device=device,
        spec=AttentionSpec(
            causal=not options.full,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            documents=None if documents is None else (documents,),
        ),
        layout=layout,
        sinks=options.sinks,
        bias=options.bias,
        norm=options.norm,
        partial=options.partial,
        memory=options.memory,
        query_blocks=options.query_blocks,
        accumulate=options.accumulate,
        overlap=options.overlap,
        seed=options.seed,
    )


def _documents(packed: str | None, seq_len: int) -> tuple[int, ...] | None:
    """Boundaries from ``--packed``."""
    if packed is None:
        return None
    try:
        lengths = [int(part) for part in packed.split(",")]
    except ValueError:
        raise ValueError(f"--packed {packed}: must be lengths such as 10,20,34, or one number.") from None
    if len(lengths) == 1:
        count = lengths[0]
        if count < 1 or seq_len % count:
            raise ValueError(f"--packed {packed}: the number of equal documents must divide the {seq_len} tokens.")
        lengths = [seq_len // count] * count
    if min(lengths) < 1 or sum(lengths) != seq_len:
        raise ValueError(f"--packed {packed}: lengths must be positive and add up to the {seq_len} tokens.")
    return tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))


def _table(findings: list[Finding]) -> str:
    width = max(len(finding.tensor) for finding in findings)
    lines = [f"{'tensor':{max(width, 6)}}  largest error  tolerance"]
    lines += [
        f"{f.tensor:{max(width, 6)}}  {f.error:13.1e}  {f.tolerance:9.0e}  {'ok' if f.agrees else 'DIFFERS'}"
        for f in findings
    ]
    return "\n".join(lines)


def _info(options: argparse.Namespace) -> int:
    import torch

    from upipe_integrations.kernels import KERNELS, KernelRequest, select_kernel

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows = [
        ("upipe-integrations", _version("upipe-integrations") or "not installed (running from a checkout)"),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("GPUs", ", ".join(gpus) or "none"),
        *((host, _version(host) or "not installed") for host in _HOSTS),
        ("autoload", _autoload()),
    ]
    print("\n".join(f"{name:20} {value}" for name, value in rows))
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        request = KernelRequest(torch.device(device), dtype, 128)
        print(f"\nkernels for {device}, {str(dtype).removeprefix('torch.')}, heads of 128:")
        no_gpu = "no GPU here" if device == "cuda" and not gpus else None
        for name, kernel in KERNELS.items():
            reason = kernel.refusal(request) or no_gpu
            print(f"  {name:18} {'no: ' + reason if reason else 'yes'}")
        if no_gpu is None:
            print(f"  auto takes {select_kernel('auto', request).name}")
    return 0


def _autoload() -> str:
    """Which hosts' configuration alone turns UPipe on, and why it doesn't where it doesn't."""
    points = importlib.metadata.entry_points(group="torch.backends")
    hosts = ", ".join(sorted({point.attr for point in points if point.module == "upipe_autoload"}))
    if not hosts:
        return "off: PyTorch finds no entry point of this project (not installed); import the plugin in your script"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":  # PyTorch's own rule
        return f"off for {hosts}: TORCH_DEVICE_BACKEND_AUTOLOAD is set; import the plugin in your script"
    if importlib.util.find_spec("wrapt") is None:
        return f"off for {hosts}: wrapt is not installed"
    return f"on for {hosts}: configuration is enough"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
