#!/usr/bin/env bash
# Train on the GPUs of this node, or of several: launch/torchrun.sh RECIPE RUN_DIR [path=value ...]
# Several nodes: run it on each, with NNODES, NODE_RANK and MASTER_ADDR set; RUN_DIR must be shared between them.
# A RUN_DIR that was used before is continued from its latest checkpoint.
# SIGTERM or SIGUSR1 to this script on any node, or a file RUN_DIR/stop, stops the run after the step at hand, with a
# checkpoint and exit code 75; a second signal ends it at once.
set -euo pipefail
if [[ $# -lt 2 ]]; then
    echo "usage: launch/torchrun.sh RECIPE RUN_DIR [path=value ...]" >&2
    exit 2
fi
recipe=$1 run_dir=$2
shift 2

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# megatron-core overlaps communication with computation only in this order
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

resume=()
[[ -e "$run_dir/recipe.resolved.yaml" ]] && resume=(--resume)
mkdir -p "$run_dir"
rm -f "$run_dir/stopped.json"

asked=
ask_to_stop() {
    [[ -n $asked ]] && kill -TERM "$torchrun"
    asked=1
    # not passed on: torchrun would give the ranks 30 s
    touch "$run_dir/stop"
}
trap ask_to_stop TERM USR1

"$root/.venv/bin/python" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${MASTER_PORT:-29500}" \
    --log-dir "$run_dir/logs" --redirects 3 --tee 0:3 \
    -m megatron_rl train "$recipe" --run-dir "$run_dir" "${resume[@]}" "$@" &
torchrun=$!

# a trap ends `wait` before its time
code=0
wait "$torchrun" || code=$?
while kill -0 "$torchrun" 2>/dev/null; do
    code=0
    wait "$torchrun" || code=$?
done
# the exit codes of the ranks are lost in torchrun
[[ -e "$run_dir/stopped.json" ]] && exit 75
exit "$code"
