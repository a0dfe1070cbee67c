#!/usr/bin/env bash
# Run generation engines on this node for a trainer elsewhere, until the file STOP_FILE appears or SIGTERM comes:
# launch/engine.sh STOP_FILE [option of `megatron-rl engine` ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ $# -ge 1 && $1 != -* ]] || fail "usage: launch/engine.sh STOP_FILE [option of megatron-rl engine ...]"
stop_file=$1
shift

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}"

"$python" -m megatron_rl engine "$@" &
host=$!
end_host() {
    kill -TERM "$host" 2>/dev/null || true
}
trap end_host TERM INT
while kill -0 "$host" 2>/dev/null; do
    [[ -e $stop_file ]] && end_host
    sleep 0.3
done
wait "$host"
