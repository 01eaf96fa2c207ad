#!/usr/bin/env bash
# Makes .venv and installs vit_tp into it; does nothing where that is done already.
# Usage: launch/setup.sh [--tests]      --tests adds the tools of ./launch/test.sh
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=requirements.txt
if [[ "${1:-}" == --tests ]]; then requirements=requirements-test.txt; fi

find_python() {
    # A name on PATH may be a version manager's stub for a version that is not there: ask it.
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 python; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.11, 3.12 or 3.13 with venv was found; the pinned packages exist for these only." >&2
    echo "Install one, or set PYTHON=/path/to/python3.11." >&2
    return 1
}

if ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python)
    echo "Making .venv with $("$python" --version) ..."
    "$python" -m venv --clear .venv
fi

# The folder is part of the stamp: an editable install points to where the clone was.
stamp=$({ pwd; cat "$requirements" requirements.txt setup.py pyproject.toml; } | .venv/bin/python -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
stamp_file=.venv/.installed-${requirements%.txt}
if [[ "$(cat "$stamp_file" 2>/dev/null || true)" != "$stamp" ]]; then
    echo "Installing $requirements into .venv (several minutes the first time) ..."
    # torch first: DeepSpeed asks for it while it is built. DS_BUILD_OPS=0: nothing is compiled.
    pip=(.venv/bin/python -m pip install)
    first=$(grep -E '^(torch|torchvision|numpy|ninja)==' requirements.txt)
    # shellcheck disable=SC2086  # several words
    if ! {
        "${pip[@]}" setuptools wheel $first &&
            DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation -r "$requirements" &&
            "${pip[@]}" --no-build-isolation --no-deps -e .
    } >.venv/install.log 2>&1; then
        tail -n 30 .venv/install.log >&2
        echo "The installation failed; all that pip said is in .venv/install.log." >&2
        exit 1
    fi
    echo "$stamp" >"$stamp_file"
fi
