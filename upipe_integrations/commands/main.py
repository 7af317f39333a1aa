"""The ``upipe`` command: plan memory, prove a layer on this machine, say what is here."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from upipe_integrations.commands import bench as bench_cli
from upipe_integrations.commands import check as check_cli
from upipe_integrations.commands import info as info_cli
from upipe_integrations.commands.parsing import numbers, tokens, words
from upipe_integrations.mode import MEMORY
from upipe_integrations.planning.models import PRESETS, find_model
from upipe_integrations.planning.plan import Plan
from upipe_integrations.planning.report import as_dict, plot, text, trace_table
from upipe_integrations.planning.setup import CHECKPOINTING, HOSTS, OFFLOAD, ZERO, Setup


class _Parser(argparse.ArgumentParser):
    """Wrong words are one line, as every other error is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 agreed, 1 did not, 2 wrong input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"upipe {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"upipe {options.command}: interrupted", file=sys.stderr)
        return bench_cli.INTERRUPTED
    except BrokenPipeError:  # nobody reads on, as with `upipe plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="upipe", description="Head-chunked context-parallel attention (UPipe): plan it, prove it, time it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    check_cli.add(commands)
    bench_cli.add(commands)
    info_cli.add(commands)
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
        offload=words(options.offload) if options.offload else (),
        tiled_mlp=options.tiled_mlp,
        tiled_loss=options.tiled_loss,
        lora_rank=options.lora_rank,
    )
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


if __name__ == "__main__":
    sys.exit(main())
