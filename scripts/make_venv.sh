#!/usr/bin/env bash
# Makes .venv with Miles, its development tools and the right torch: the CUDA build when nvidia-smi works, else a CPU build.
# `make` runs it when .venv is missing or older than pyproject.toml, constraints.txt or this file. PYTHON=... chooses the
# interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Miles needs Python 3.11 or 3.12, and none was found. On Debian 12 or Ubuntu 24.04:" >&2
    echo "    apt-get install python3 python3-venv" >&2
    echo "or name one: make PYTHON=/path/to/python3.12 ..." >&2
    return 1
}

# Debian ships Python without ensurepip, which `python -m venv` needs; these are the ways around it, the usual one first.
make_venv() {
    local python=$1
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        "$python" -m venv "$venv"
    elif "$python" -m virtualenv --version >/dev/null 2>&1; then
        "$python" -m virtualenv --quiet "$venv"
    elif command -v virtualenv >/dev/null; then
        virtualenv --quiet --python "$python" "$venv"
    elif command -v uv >/dev/null; then
        uv venv --quiet --seed --python "$python" "$venv"
    elif "$python" -c 'import venv' 2>/dev/null && "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install --quiet pip
    else
        echo "$python cannot make a virtual environment: its venv package is not installed. On Debian or Ubuntu:" >&2
        echo "    apt-get install python3-venv" >&2
        echo "(with sudo when you are not root), or install virtualenv or uv; then run make again." >&2
        return 1
    fi
}

# The first source that has a CPU build, quickest first: wheels that pip is told to look for on this machine, PyTorch's
# index of CPU builds, and pip's default index, whose build may bring CUDA libraries that go unused.
install_cpu_torch() {
    local torch pip=("$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check)
    torch=$(grep '^torch==' constraints.txt)
    if "$venv/bin/python" -m pip freeze 2>/dev/null | grep -q "^$torch\(+\|$\)"; then
        return
    fi
    "${pip[@]}" --no-index "$torch" 2>/dev/null ||
        "${pip[@]}" --timeout 10 --retries 0 --index-url https://download.pytorch.org/whl/cpu "$torch" 2>/dev/null ||
        "${pip[@]}" "$torch"
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "making $venv with $("$python" --version)"
    rm -rf "$venv"
    make_venv "$python"
fi
if nvidia-smi >/dev/null 2>&1; then
    extras=dev,gpu
    echo "installing Miles with a CUDA build of torch (nvidia-smi works); this takes some minutes the first time"
else
    echo "installing Miles with a CPU build of torch (no NVIDIA GPU was found); this takes some minutes the first time"
    extras=dev,interpreter
    install_cpu_torch
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
# An editable install finds `miles` alone; the scripts of `benchmarks/` and `recipes/` import each other, too.
pwd >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/miles_repository.pth"
touch "$venv/.ready"
