#!/usr/bin/env bash
# Check transfers and kernels on the GPUs of this machine: tools/gpu_check.sh [--help]. Fails where there is none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python tools/gpu_check.py "$@"
