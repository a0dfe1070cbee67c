#!/usr/bin/env bash
# What the launch scripts do when they are told to stop; sourced by them. They set `run_dir`, and as `child` what they
# started in the background.
set -euo pipefail
asked='' child=''

# note_stale_stop: which `stop` an earlier start left. One that is made from now on is meant for this start, however
# long its ranks take to look (megatron_rl/train/stopping.py)
note_stale_stop() {
    : "${MEGATRON_RL_STALE_STOP=$(stat -c '%i %.9Y' "${run_dir:?}/stop" 2>/dev/null || true)}"
    export MEGATRON_RL_STALE_STOP
}

# for `trap`: the run saves and ends after the step at hand; the second time `child` is ended
ask_to_stop() {
    [[ -z $asked || -z $child ]] || kill -TERM "$child"
    asked=1
    # not passed on: torchrun would give the ranks 30 s, and srun would end its tasks
    touch "${run_dir:?}/stop"
}

# wait_for_child: its exit code, or 75, which torchrun loses, for a run that has stopped because it was asked to
wait_for_child() {
    local code=0
    # a trap ends `wait` before its time
    while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
    wait "$child" || code=$?
    [[ ! -e ${run_dir:?}/stopped.json ]] || code=75
    return "$code"
}
