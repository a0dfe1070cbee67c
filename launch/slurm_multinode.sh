#!/usr/bin/env bash
# Place one run on the nodes of a slurm allocation: launch/slurm_multinode.sh [option ...] RECIPE [path=value ...]
# launch/slurm.sbatch calls it in a job; inside `salloc` it works as well. Each node gets one task, there torchrun.
#   --engine-nodes N    separate: the last N nodes generate, the others train. 0, the default, is colocated: every
#                       node does both, on the same GPUs
#   --container IMAGE   pyxis/enroot image whose python3 has our requirements (default: the .venv here)
#   --mounts A:B,...    what it sees beside this directory, such as models and data
#   --run-dir DIR       on a file system that all nodes share (default: runs/RECIPE-JOBID)
#   --dry-run           check the recipe and print every command, also without slurm: --nodes N then says how many (2)
# Engine nodes run `megatron-rl engine`: every RL stage gets their names as engine.hosts, and as engine.secret_file a
# fresh secret. Say how many: stages.*.engine.replicas=4 of engine.tp 4 fill two nodes. They end with the trainers.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$root/launch/stopping.sh"
source "$root/launch/slurm_steps.sh"

num_engine_nodes=0 image='' mounts='' run_dir='' num_nodes=2 job=${SLURM_JOB_ID:-0}
parse "$0" "--engine-nodes=num_engine_nodes --container=image --mounts=mounts --run-dir=run_dir --nodes=num_nodes" "$@"
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
    names=$(scontrol show hostnames "$SLURM_JOB_NODELIST") && [[ -n $names ]] || fail "scontrol named no nodes"
    mapfile -t nodes <<<"$names"
elif [[ -n $dry_run ]]; then
    [[ $num_nodes =~ ^[1-9][0-9]*$ ]] || fail "--nodes: got '$num_nodes', must be a number of nodes"
    mapfile -t nodes < <(seq -f 'node%g' 1 "$num_nodes")
else
    fail "not in a slurm allocation; submit launch/slurm.sbatch, or add --dry-run"
fi
if ! [[ $num_engine_nodes =~ ^(0|[1-9][0-9]{0,5})$ ]] || ((num_engine_nodes >= ${#nodes[@]})); then
    fail "--engine-nodes: got '$num_engine_nodes', must be 0 to $((${#nodes[@]} - 1)) of ${#nodes[@]} nodes"
fi
num_trainers=$((${#nodes[@]} - num_engine_nodes)) is_shared='' colocated=false
trainers=("${nodes[@]:0:num_trainers}") engines=("${nodes[@]:num_trainers}")
if ! grep -qE "^[^#]*\bkind[\"']? *: *[\"']?rl\b" "$recipe"; then
    ((num_engine_nodes == 0)) || fail "--engine-nodes: $recipe has no stage of kind: rl, so nothing would run there"
elif ((num_engine_nodes == 0 && num_trainers > 1)); then
    # on one node the trainer starts its engines itself
    engines=("${nodes[@]}") is_shared=1 colocated=true
fi
run_dir=${run_dir:-runs/$(basename "$recipe" .yaml)-$job}
name_files

((${#engines[@]} == 0)) || point_at_engines
torchrun=("$root/launch/torchrun.sh" --nnodes "$num_trainers" --master "${trainers[0]}:$((20000 + job % 10000))"
    --run-dir "$run_dir" "$recipe" "${overrides[@]}")
check_placed

[[ -z $image ]] || run export MEGATRON_RL_PYTHON=python3
# says why NCCL fails. Where it picks wrong cards or networks, set NCCL_IB_HCA and NCCL_SOCKET_IFNAME before sbatch
run export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
make_run_dir
run rm -f "$stop_file" "$secret" "$run_dir/stopped.json"
run find "$run_dir/logs" -maxdepth 1 -name 'engine_host_*.log' -delete
note_stale_stop
trap ask_to_stop TERM USR1 INT
if ((${#engines[@]})); then
    run bash -c 'umask 077; od -An -N32 -tx1 /dev/urandom | tr -d " \n" >"$0"' "$secret"
    step "${engines[@]}"
    command=("${srun[@]}" --output="$run_dir/logs/engine_host_%N.log" bash "$root/launch/engine.sh" "$stop_file"
        --listen "0.0.0.0:${hosts[0]##*:}" --secret-file "$secret" --log-dir "$run_dir/logs/engines")
    if [[ -n $dry_run ]]; then
        echo "$(print_command "${command[@]}") &   # and once all of them listen:"
    else
        "${command[@]}" &
        engine_step=$!
        trap end_engines EXIT
        wait_for_engines "${#engines[@]}"
    fi
fi

step "${trainers[@]}"
if [[ -n $dry_run ]]; then
    print_command "${srun[@]}" bash "${torchrun[@]}"
    echo "# that is on ${trainers[0]}, and on the others with their --node-rank:"
    echo "#   ${there//$'\n'/$'\n#   '}"
    ((${#engines[@]} == 0)) || run touch "$stop_file"
    exit
fi
"${srun[@]}" bash "${torchrun[@]}" &
child=$!
wait_for_child
