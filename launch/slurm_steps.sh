#!/usr/bin/env bash
# The job steps of launch/slurm_multinode.sh; sourced by it.
set -euo pipefail

# name_files: in a run directory that another job may be using
name_files() {
    [[ ${run_dir:?} != *[$'\n'%\\]* ]] ||
        fail "--run-dir: got ${run_dir@Q}, must be without %, \\ and line breaks, which srun takes for something else"
    secret=$run_dir/logs/engine_secret-${job:?} stop_file=$run_dir/logs/engines_stop-$job
}

# point_at_engines: `hosts`, and what every RL stage of the recipe has to know of them. The user's overrides come last
point_at_engines() {
    hosts=("${engines[@]/%/:$((10000 + job % 10000))}")
    overrides=("stages.*.engine.hosts=[$(IFS=,; echo "${hosts[*]}")]"
        "stages.*.engine.secret_file='${secret//\'/\'\'}'" "stages.*.engine.colocated=$colocated" "${overrides[@]}")
}

# step NODE...: `srun`, the command that starts one task on each; all tasks end when one fails
step() {
    srun=(srun --kill-on-bad-exit=1 --ntasks-per-node=1 --nodes=$# --nodelist="$(IFS=,; echo "$*")")
    # a step does not inherit those of its job
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || srun+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    # trainers and engines are two steps on the same GPUs
    [[ -z ${is_shared:=} ]] || srun+=(--overlap)
    if [[ -n ${image:=} ]]; then
        local seen=$PWD:$PWD
        [[ $PWD == "${root:?}" ]] || seen+=,$root:$root
        srun+=(--container-image="$image" --container-workdir="$PWD" --container-mounts="$seen${mounts:+,$mounts}")
    fi
}

# check_placed: end with what is wrong with the recipe, before any host starts. In an image its Python asks, in a step
# of its own, which without engines would only repeat what the trainers do. `there`: what runs on a node
check_placed() {
    if [[ -n ${dry_run:-} ]]; then
        there=$(bash "${torchrun[@]}" --node-rank 0 --dry-run)
    elif [[ -z $image ]]; then
        check_recipe
    fi
    [[ -n $image ]] && ((${#engines[@]})) || return 0
    step "${trainers[0]}"
    local ask=(env MEGATRON_RL_PYTHON=python3 "${srun[@]}" bash "${torchrun[@]}" --node-rank 0 --dry-run)
    if [[ -n $dry_run ]]; then print_command "${ask[@]}"; else "${ask[@]}" >/dev/null; fi
}

# wait_for_engines NUMBER: until so many hosts listen
wait_for_engines() {
    : "${engine_step:?}"
    until (($(grep -lsZ 'listening on' "${run_dir:?}"/logs/engine_host_*.log | tr -dc '\0' | wc -c) == $1)); do
        [[ -z ${asked:-} ]] || exit 75
        kill -0 "$engine_step" 2>/dev/null || fail "an engine host did not start; see $run_dir/logs/engine_host_*.log"
        sleep 0.2
    done
}

# end_engines: their tasks look for the file; srun itself passes SIGTERM on as SIGKILL, so that is the last resort
end_engines() {
    touch "${stop_file:?}"
    for _ in {1..300}; do
        kill -0 "$engine_step" 2>/dev/null || return 0
        sleep 0.2
    done
    kill "$engine_step"
}
