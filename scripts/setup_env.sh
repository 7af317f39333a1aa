#!/usr/bin/env bash
# Creates .venv in the checkout with the project, its DeepSpeed, Megatron and PEFT extras and the development
# tools, at the versions of constraints.txt. A second run returns at once while nothing relevant has
# changed; anything else (a change, an interrupted run, another PYTHON) removes .venv and builds it anew.
#
#   scripts/setup_env.sh                        Python 3.12, else 3.13, 3.11 or 3.10
#   PYTHON=/path/to/python scripts/setup_env.sh that interpreter (3.10 or newer)
#
# A second environment beside it, for another release of a host:
#   VENV=.venv-megatron-0.16 VERSIONS="3.11 3.10" EXTRAS=megatron,dev scripts/setup_env.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
# Not newer: Megatron has no wheels for it.
versions=${VERSIONS:-3.12 3.13 3.11 3.10}
extras=${EXTRAS:-deepspeed,megatron,peft,liger,dev,docs}
stamp=$venv/.stamp
log=$venv/setup.log
SECONDS=0

say() { printf 'setup: [%3ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# Prints "VERSION PATH" of the interpreter behind $1 (a name or a path), outside of any virtual
# environment. Fails when it does not run (as a pyenv shim of an inactive version), is older than
# 3.10, is a free-threaded build, is not the version $2 (if given), or cannot make environments.
probe() {
    "$1" - "${2-}" 2>/dev/null <<'PY'
import os, sys, sysconfig
import ensurepip, venv
found = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 10) or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
if sys.argv[1] not in ("", found):
    sys.exit(1)
print(found, os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
PY
}

# Looks for Python $1 on PATH, then among pyenv's versions, highest patch release first.
find_version() {
    local root=${PYENV_ROOT:-${HOME:-}/.pyenv} candidate
    probe "python$1" "$1" && return
    while IFS= read -r candidate; do
        probe "$candidate" "$1" && return
    done < <(compgen -G "$root/versions/$1*/bin/python" | sort -rV)
    return 1
}

choose_python() {
    local version
    if [[ -n ${PYTHON:-} ]]; then
        probe "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.10 or newer with the venv module" \
            "(on Debian and Ubuntu that module is the package python3.X-venv)"
        return
    fi
    for version in $versions; do
        find_version "$version" && return
    done
    version=${versions%% *}
    die "found no Python $versions, neither on PATH nor in pyenv. Install Python $version with its venv" \
        "module (Debian, Ubuntu: apt-get install python$version python$version-venv; pyenv: pyenv install $version)," \
        "or name an interpreter: PYTHON=/path/to/python $0"
}

# The checkout's path is part of it: an environment does not survive being moved.
fingerprint=$({ pwd -P; echo "$extras"; cat pyproject.toml constraints.txt scripts/setup_env.sh; } | sha256sum | cut -d ' ' -f 1)

base=
if [[ -n ${PYTHON:-} ]]; then
    base=$(choose_python)
fi
if [[ -f $stamp && -x $venv/bin/python ]]; then
    { read -r old_fingerprint && read -r old_base; } <"$stamp" || true
    if [[ ${old_fingerprint-} == "$fingerprint" && ${base:-${old_base-}} == "${old_base-}" ]]; then
        say "$venv is up to date"
        exit 0
    fi
fi
if [[ -z $base ]]; then
    base=$(choose_python)
fi

# From here until the stamp is written, $venv counts as unfinished.
say "Python ${base%% *} from ${base#* }"
rm -rf "$venv"
mkdir "$venv"
trap 'say "interrupted; the next run starts again" >&2; exit 130' INT TERM

step() {
    local what=$1
    shift
    say "$what"
    if ! "$@" >>"$log" 2>&1; then
        printf 'setup: failed: %s. The end of %s:\n' "$what" "$log" >&2
        tail -n 40 "$log" >&2
        exit 1
    fi
}
pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# DeepSpeed's kernels are built on first use, not here.
export DS_BUILD_OPS=0
if ! nvidia-smi >/dev/null 2>&1; then
    export DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
fi

step "creating $venv" "${base#* }" -m venv "$venv"
step "pip, setuptools, wheel" pip_install --upgrade pip setuptools wheel -c constraints.txt
step "torch (a large download)" pip_install torch numpy -c constraints.txt
# Without build isolation, so that DeepSpeed is built against the torch installed above.
step "the project with $extras" pip_install --no-build-isolation -e ".[$extras]" -c constraints.txt

printf '%s\n%s\n' "$fingerprint" "$base" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done"
