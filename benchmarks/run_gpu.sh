#!/usr/bin/env bash
# The proof on this machine's GPUs: benchmarks/proof.py, which says what it does; the tests marked `gpu` come after it.
#
#   benchmarks/run_gpu.sh OUTPUT_FOLDER          PYTHON=... picks the interpreter, GPUS=... how many are used
set -euo pipefail
[[ $# -eq 1 ]] || { grep '^#' "$0" | tail -n +2 >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/.." && root=$PWD && cd - >/dev/null
python=${PYTHON:-python}
gpus=${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
failed=0
"$python" "$root/benchmarks/proof.py" "$1" --gpus "$gpus" || failed=1
# pytest is not there where the core and PyTorch are installed alone.
if "$python" -c 'import pytest' 2>/dev/null; then
    (cd "$root" && "$python" -m pytest -m gpu -q) || failed=1
fi
exit "$failed"
