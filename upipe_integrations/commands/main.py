"""The ``upipe`` command: hands its words to the subcommand that they name, and turns errors into an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from upipe_integrations.commands import bench, check, info, plan
from upipe_integrations.commands.parsing import INTERRUPTED


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
        return INTERRUPTED
    except BrokenPipeError:  # nobody reads on, as with `upipe plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="upipe", description="Head-chunked context-parallel attention (UPipe): plan it, prove it, time it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for subcommand in (plan, check, bench, info):
        subcommand.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
