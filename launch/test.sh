#!/usr/bin/env bash
# Set up .venv, then lint, type-check and test everything. Arguments go to pytest: launch/test.sh tests/unit -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# the tests run even if these complain, and end with pytest's summary
checks=0
.venv/bin/ruff check --quiet . || checks=1
.venv/bin/mypy || checks=1

tests=0
.venv/bin/python -m pytest "$@" || tests=$?
exit $((tests != 0 ? tests : checks))
