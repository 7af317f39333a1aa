#!/usr/bin/env bash
# Everything that wants a GPU, in about ten minutes on one to eight of them: tests marked `gpu`, `upipe check`, and the
# benchmarks, with sizes that fit 24 GiB. Leaves logs, JSON and plots in a folder; goes on after a failure and ends
# with 1 if there was one.
#
#   benchmarks/run_gpu.sh OUTPUT_FOLDER          PYTHON=... picks the interpreter, GPUS=... how many are used
set -uo pipefail
[[ $# -eq 1 ]] || { grep '^#' "$0" | tail -n +2 >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
export PYTHONPATH=$PWD

found=${GPUS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}
# The layer's 8 KV heads and the sequence are cut into equal shards: a power of two.
ranks=1
while ((ranks * 2 <= found && ranks < 8)); do ranks=$((ranks * 2)); done
failed=0

# step NAME SECONDS COMMAND...: the command's output goes to NAME.log.
step() {
    local name=$1 seconds=$2 begin=$SECONDS
    shift 2
    if timeout "$seconds" "$@" >"$out/$name.log" 2>&1; then
        printf '%-10s ok      %4d s\n' "$name" $((SECONDS - begin))
    else
        printf '%-10s FAILED  %4d s, see %s\n' "$name" $((SECONDS - begin)) "$out/$name.log"
        failed=1
    fi
}

printf '%s GPUs, %s ranks, results in %s\n' "$found" "$ranks" "$out"
{ nvidia-smi; "$python" -m upipe_integrations.commands.main info; } >"$out/machine.log" 2>&1
layer=(--heads 32 --kv-heads 8 --head-dim 128 --hidden-size 4096 --ranks "$ranks")
step tests 120 "$python" -m pytest -m gpu -q
step check 60 "$python" -m upipe_integrations.commands.main check --heads 32 --kv-heads 8 --head-dim 128 --seq-len 2048 \
    --ranks "$ranks" --chunk-heads 8 --dtype bfloat16
step precision 90 "$python" benchmarks/precision.py --head-dim 128 --kernels auto --stages 1 4 8 16 --blocks 2 8
step memory 60 "$python" benchmarks/memory.py --json --models "Llama3-8B on 8" --tokens 131072 1048576 8388608
step speed 210 "$python" benchmarks/speed.py "${layer[@]}" --chunk-heads 8 16 --modes keep_heads keep fused blocks \
    --tokens 8192 32768 65536 --repeats 5 --warmup 2 --json "$out/speed.json" --plot "$out/speed.png"
step profile 60 "$python" benchmarks/speed.py "${layer[@]}" --chunk-heads 8 --modes keep fused --tokens 32768 --profile
exit "$failed"
