#!/usr/bin/env bash
# What a release must pass: builds the sdist and the wheel from it, looks into both, installs the wheel in a clean
# environment, and runs `upipe info`, `upipe plan` and `upipe check` on two ranks there. Leaves dist/ as it is uploaded.
#
#   scripts/release_check.sh                              Python 3 of PATH; downloads torch
#   PYTHON=/path/to/python scripts/release_check.sh       that interpreter
#   scripts/release_check.sh --system-torch PYTHON        torch and all else but this project from that interpreter's
#                                                         environment, which must be of the same Python version
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'release check: %s\n' "$*"; }
die() { printf 'release check: %s\n' "$*" >&2; exit 1; }
usage() { grep '^#' "$0" | tail -n +2 >&2; exit 2; }

torch_from=
case ${1-} in
    "") ;;
    --system-torch) [[ $# -eq 2 && -x $2 ]] || usage; torch_from=$2 ;;
    *) usage ;;
esac
python=${PYTHON:-${torch_from:-python3}}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say "building (the log is printed if it fails)"
"$python" -m venv "$work/build"
run_quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; die "failed: $*"; }; }
run_quietly "$work/build/bin/python" -m pip install --disable-pip-version-check build packaging
rm -rf dist build ./*.egg-info
# The wheel is built from the sdist: what the sdist lacks, the wheel lacks too.
run_quietly "$work/build/bin/python" -m build --outdir dist .

say "looking into dist/"
"$work/build/bin/python" scripts/release_contents.py dist

say "installing the wheel in a clean environment"
"$python" -m venv "$work/clean"
wheel=$(echo "$PWD"/dist/*.whl)
if [[ -n $torch_from ]]; then
    # A .pth, as for any other folder of packages; ours still comes from the wheel.
    site=$("$work/clean/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$torch_from" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/system_torch.pth"
    run_quietly "$work/clean/bin/python" -m pip install --disable-pip-version-check --no-deps "$wheel"
else
    run_quietly "$work/clean/bin/python" -m pip install --disable-pip-version-check "$wheel"
fi

# Not from the checkout, whose packages Python would import.
cd "$work"
upipe=$work/clean/bin/upipe
"$work/clean/bin/python" -c 'import upipe_integrations as u; assert "clean" in u.__file__, u.__file__'
say "upipe info"
"$upipe" info >"$work/info"
grep -E '^(upipe-integrations|torch|autoload|  (deepspeed|megatron)) ' "$work/info"
grep -q '^autoload  *on for deepspeed, megatron' "$work/info" || die "upipe info does not say that autoload is on"
if grep -q 'NOT patched' "$work/info"; then die "a host that is installed is not patched"; fi
say "upipe plan"
"$upipe" plan llama3-8b --ranks 8 --gpu-memory 80 --seq-len 1M --tiled-loss >"$work/plan"
grep '^Recommended' "$work/plan"
say "upipe check, two ranks"
"$upipe" check llama3.2-1b --ranks 2
say "all is well; dist/ is ready"
