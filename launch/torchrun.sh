#!/usr/bin/env bash
# Train on the GPUs of this node, or of several: launch/torchrun.sh [option ...] RECIPE [path=value ...]
# Several nodes: the same command on each, with its own --node-rank. Each option may be a variable instead:
#   --nnodes N           NNODES          nodes (1)
#   --node-rank N        NODE_RANK       which one this is, from 0 (under srun: its number there)
#   --master HOST:PORT   MASTER_ADDR MASTER_PORT   node 0 as the others reach it (127.0.0.1:29500)
#   --nproc-per-node N   NPROC_PER_NODE  ranks of this node (one per GPU)
#   --run-dir DIR        RUN_DIR         shared between nodes (runs/RECIPE-DATE-TIME; with several nodes runs/RECIPE)
#   --dry-run            check the recipe (as far as this machine can), print the commands and start nothing
# A run directory that was used before is continued from its latest checkpoint. Rank 0 writes here, rank N to
# logs/rank_N.log there. SIGTERM or SIGUSR1 to this script on any node, or a file `stop` in the run directory, stops the
# run after the step at hand, with a checkpoint and exit code 75; a second signal ends it at once.
# Gloo takes the network that leads to --master. NCCL chooses its own: set NCCL_SOCKET_IFNAME where that is wrong.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$root/launch/stopping.sh"

nnodes=${NNODES:-1} node_rank=${NODE_RANK:-${SLURM_NODEID:-}} nproc=${NPROC_PER_NODE:-gpu} run_dir=${RUN_DIR:-}
master=${MASTER_ADDR:-}${MASTER_PORT:+:$MASTER_PORT}
parse "$0" "--nnodes=nnodes --node-rank=node_rank --master=master --nproc-per-node=nproc --run-dir=run_dir" "$@"
[[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "--nnodes: got '$nnodes', must be a number of nodes"
((nnodes > 1)) || node_rank=0
[[ $nproc =~ ^([1-9][0-9]*|gpu)$ ]] || fail "--nproc-per-node: got '$nproc', must be a number of ranks"
((nnodes == 1)) || [[ -n ${master%%:*} ]] || fail "--master: needed with several nodes, such as --master node1:29500"
if ! [[ $node_rank =~ ^(0|[1-9][0-9]*)$ ]] || ((node_rank >= nnodes)); then
    fail "--node-rank: got '$node_rank', must be 0 to $((nnodes - 1)), another one on each node"
fi
port=29500
[[ $master == *:* && $master != *] ]] && port=${master##*:} master=${master%:*}
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] && ((port <= 65535)) || fail "--master: got the port '$port', must be 1 to 65535"
[[ $master == \[*\] ]] && master=${master:1:-1} || [[ $master != *:* ]] || fail "--master: got '$master' before the port, \
must be a name or an address; one of IPv6 in brackets, such as [fe80::1]:29500"
name=$(basename "$recipe" .yaml)
# several nodes could not agree on a time
[[ -n $run_dir ]] || run_dir=runs/$name$( ((nnodes > 1)) || date +-%Y%m%d-%H%M%S)

resume=()
[[ -e $run_dir/recipe.resolved.yaml ]] && resume=(--resume)
# megatron-core overlaps communication with computation only with CUDA_DEVICE_MAX_CONNECTIONS=1
command=(env OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
    "$python" -m torch.distributed.run --nnodes "$nnodes" --node-rank "$node_rank" --nproc-per-node "$nproc"
    --master-addr "${master:-127.0.0.1}" --master-port "$port"
    --no-python bash -c '((RANK == 0)) || exec >>"$0/rank_$RANK.log" 2>&1; exec "$@"' "$run_dir/logs"
    "$python" -m megatron_rl train "$recipe" --run-dir "$run_dir" "${resume[@]}" "${overrides[@]}")
world=()
[[ $nproc == gpu ]] || world=(--world $((nnodes * nproc)))
# before every rank says the same
check_recipe "${world[@]}"
if [[ -z $dry_run && $nproc == gpu ]] && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    fail "--nproc-per-node: this machine shows no GPU; without any, say how many ranks to start"
fi
make_run_dir
run rm -f "$run_dir/stopped.json"
[[ -z $dry_run ]] || { print_command "${command[@]}"; exit; }
note_stale_stop
trap ask_to_stop TERM USR1
"${command[@]}" &
child=$!
code=0
wait_for_child || code=$?
((code != 75)) || echo "stopped as asked to, see $run_dir/stopped.json; the same --run-dir goes on from there" >&2
((code == 0 || code == 75)) || echo "exit code $code; what each rank said: $run_dir/logs/rank_*.log" >&2
exit "$code"
