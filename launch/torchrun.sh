#!/usr/bin/env bash
# Train on the GPUs of this node, or of several: launch/torchrun.sh RECIPE RUN_DIR [path=value ...]
# Several nodes: run it on each, with NNODES, NODE_RANK and MASTER_ADDR set; RUN_DIR must be shared between them.
# A RUN_DIR that was used before is continued from its latest checkpoint.
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

exec "$root/.venv/bin/python" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" \
    --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "${NPROC_PER_NODE:-gpu}" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${MASTER_PORT:-29500}" \
    --log-dir "$run_dir/logs" --redirects 3 --tee 0:3 \
    -m megatron_rl train "$recipe" --run-dir "$run_dir" "${resume[@]}" "$@"
