#!/usr/bin/env bash
# Sets up and runs the tests. Usage: launch/test.sh [--slow] [PYTEST ARGUMENT ...]
# Without --slow: everything but the long ones, at most 15 minutes on 2 cores. With it: only the long ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh --tests

which="not slow and not gpu"
if [[ "${1:-}" == --slow ]]; then
    which="slow and not gpu"
    shift
fi
exec .venv/bin/python -m pytest -q -m "$which" "$@"
