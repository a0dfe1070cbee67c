"""Stand-ins for slurm's programs: what they are told is written down, and tasks run here, one per node, as there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# its own options, then the command; signals as srun has them: SIGTERM ends every task at once
_SRUN = """#!/usr/bin/env bash
printf '%q ' "$@" >>srun.log; echo >>srun.log
declare -A inside=({inside})
# each task a process group, which ends as a whole
set -m
trap 'for task in "${{tasks[@]}}"; do kill -KILL -- "-$task"; done; exit 137' TERM
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) nodes=${{1#*=}} ;; --output=*) output=${{1#*=}} ;; esac
    shift
done
tasks=() number=0
for node in ${{nodes//,/ }}; do
    if [[ -z ${{output:-}} ]]; then
        SLURM_NODEID=$number ${{inside[$node]:-}} "$@" &
    else
        SLURM_NODEID=$number ${{inside[$node]:-}} "$@" >>"${{output//%N/$node}}" 2>&1 &
    fi
    tasks+=($!) number=$((number + 1))
done
code=0
for task in "${{tasks[@]}}"; do wait "$task" || code=$?; done
exit "$code"
"""
_SCONTROL = """#!/usr/bin/env bash
echo "$@" >>scontrol.log
[[ $1 == show ]] && printf '%s\\n' ${3//,/ }
exit 0
"""


def make_slurm(programs: Path, inside: Mapping[str, Sequence[str]] | None = None) -> None:
    """`srun` and `scontrol` in the directory `programs`; `inside` has the command that enters a node, if one does."""
    entries = " ".join(f"[{node}]={shlex.quote(shlex.join(command))}" for node, command in (inside or {}).items())
    make_script(programs / "srun", _SRUN.format(inside=entries))
    make_script(programs / "scontrol", _SCONTROL)


def make_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def job_variables(nodes: Sequence[str], *, submitted_in: Path) -> dict[str, str]:
    """What slurm tells the script of a job."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_NODEID": "0",
        "SLURM_SUBMIT_DIR": str(submitted_in),
        "SLURM_CPUS_PER_TASK": "64",
    }
