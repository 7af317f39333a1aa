"""``upipe plan``: memory of one GPU by method and length, what fits, and the settings for it. No torch is imported."""

from __future__ import annotations

import argparse
import json
from typing import Any

from upipe_integrations.commands.parsing import add_model, add_number, numbers, tokens, words
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.closed_forms import USUAL_KERNEL
from upipe_integrations.planning.models import PRESETS, find_model
from upipe_integrations.planning.plan import Plan
from upipe_integrations.planning.report import as_dict, plot, text, trace_table
from upipe_integrations.planning.setup import CHECKPOINTING, HOSTS, OFFLOAD, PLANNED_KERNELS, ZERO, Setup


def add(commands: argparse._SubParsersAction[Any]) -> None:
    """The subcommand's words."""
    parser = commands.add_parser(
        "plan",
        help="memory of one GPU by method and length, what fits, and the settings for it",
        description="Memory of one GPU in a training step under ring attention, Ulysses, ALST and UPipe: by component, "
        "what fits, the longest sequence of each, and settings to paste. Arithmetic: nothing runs, no GPU is needed.",
        epilog="example: upipe plan llama3-8b --ranks 8 --gpu-memory 80 --seq-len 1M,5M --tiled-mlp --tiled-loss "
        "--offload activations. Lengths: K is 1024 and M 1024 * 1024 tokens, so 5M is 5242880; 5000000 is taken as it "
        f"is. Presets: {', '.join(PRESETS)}.",
    )
    add_model(parser)
    parser.add_argument("--seq-len", default="1M", metavar="A,B,...", help="lengths in tokens (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")
    parser.add_argument("--plot", metavar="FILE.png", help="draw memory against tokens; needs matplotlib")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="measure UPipe's attention through the engine on fake tensors; needs no GPU",
    )
    machine = parser.add_argument_group("machine")
    add_number(machine, "--ranks", "GPUs that share a sequence (default: 8)", default=8)
    machine.add_argument("--gpu-memory", type=float, default=80, metavar="GIB", help="of one GPU (default: 80)")
    add_number(machine, "--tp", "tensor-parallel ranks (default: 1)", default=1)
    add_number(machine, "--pp", "pipeline stages (default: 1)", default=1)
    add_number(machine, "--dp", "data-parallel replicas (default: 1)", default=1)
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
        "--kernel",
        choices=PLANNED_KERNELS,
        default=USUAL_KERNEL,
        metavar="NAME",
        help=f"local attention, whose buffers count (default: %(default)s): {', '.join(PLANNED_KERNELS)}; upipe info "
        "says which one a GPU gets",
    )
    add_number(stack, "--lora-rank", "train LoRA on all linear layers, the model frozen", default=0)
    upipe = parser.add_argument_group("UPipe")
    upipe.add_argument("--chunk-heads", metavar="A,B", help="query heads per stage (default: ranks, and twice them)")
    upipe.add_argument("--memory", metavar="A,B", help=f"memory modes: {', '.join(MEMORY)} (default: all)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    setup = _setup(options)
    if options.trace and options.lora_rank:
        raise ValueError("--trace with --lora-rank: measures a layer whose weights are trained. Leave one of them out.")
    lengths = [tokens("--seq-len", part) for part in options.seq_len.split(",")]
    plan = Plan(
        find_model(options.model),
        setup,
        chunk_heads=numbers("--chunk-heads", options.chunk_heads) if options.chunk_heads else None,
        memory=words(options.memory) if options.memory else MEMORY,
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


def _setup(options: argparse.Namespace) -> Setup:
    return Setup(
        ranks=options.ranks,
        gpu_memory=options.gpu_memory,
        host=options.host,
        zero=(1 if options.host == "megatron" else 3) if options.zero is None else options.zero,
        tp=options.tp,
        pp=options.pp,
        dp=options.dp,
        checkpointing=options.checkpointing,
        offload=words(options.offload) if options.offload else (),
        tiled_mlp=options.tiled_mlp,
        tiled_loss=options.tiled_loss,
        lora_rank=options.lora_rank,
        kernel=options.kernel,
    )
