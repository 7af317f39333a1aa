"""``python -m megatron_patch SCRIPT [ARGUMENTS]``: run a Megatron script with UPipe's arguments."""

from __future__ import annotations

import os
import runpy
import sys

import upipe_autoload

_USAGE = """usage: python -m megatron_patch SCRIPT [ARGUMENTS ...]

Runs a Megatron training script (pretrain_gpt.py, ...) with UPipe's arguments added:
  --context-parallel-impl upipe   replace context-parallel attention by UPipe
  --upipe-chunk-heads N|auto      query heads per stage over all context-parallel ranks
`python -m megatron_patch pretrain_gpt.py --help` lists all of them.

On several GPUs:
  torchrun --nproc-per-node 8 -m megatron_patch pretrain_gpt.py --context-parallel-size 8 \\
      --context-parallel-impl upipe --upipe-chunk-heads 8 ...
"""


def main() -> None:
    """Install the hooks, and run the script as the main program."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        sys.exit(0 if arguments else 2)
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"python -m megatron_patch: {script}: no such file. Give the path of a training script.", file=sys.stderr)
        sys.exit(2)
    try:
        import wrapt  # noqa: F401
    except ImportError:
        print("python -m megatron_patch: wrapt is missing. pip install 'upipe-integrations[megatron]'", file=sys.stderr)
        sys.exit(2)
    upipe_autoload.megatron()
    sys.argv = arguments
    # As python does for a script; it put the current directory there for -m.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
