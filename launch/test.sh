#!/usr/bin/env bash
# Set up .venv, then lint, type-check and test everything, in three processes.
# Arguments go to pytest, which then runs in one: launch/test.sh tests/unit -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
bash launch/packages.sh chromium iproute2
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# a hundred processes start here: each would compile our modules again
unset PYTHONDONTWRITEBYTECODE

# the tests run even if these complain, and end with pytest's summary
checks=0
.venv/bin/ruff check --quiet . || checks=1
.venv/bin/mypy || checks=1

# files stay whole, for what a file starts once, such as an engine; those that take longest come first. Three
# processes on two cores: tests that kill, cut and time out spend a third of their time waiting
[[ $# -eq 0 ]] && set -- --numprocesses 3 --dist loadfile --no-loadscope-reorder

tests=0
.venv/bin/python -m pytest "$@" || tests=$?
exit $((tests != 0 ? tests : checks))
