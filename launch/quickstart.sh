#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up, then trains a small vision transformer on handwritten digits, cut over
# 2 tensor-parallel x 2 pipeline ranks on the CPU. Run again, it trains under the next free name.
# Usage: launch/quickstart.sh [OVERRIDE ...]      for example  launch/quickstart.sh run.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
./launch/setup.sh

runs=runs
for word in "$@"; do
    if [[ "$word" == run.dir=* ]]; then runs=${word#run.dir=}; fi
done
name=digits_smoke
number=2
while [[ -e "$runs/$name" ]]; do
    name=digits_smoke-$number
    number=$((number + 1))
done
exec .venv/bin/vit-tp train experiment=digits_smoke run.name="$name" "$@"
