#!/usr/bin/env bash
# Prepare .venv: launch/setup.sh [--gpu]. Does nothing when .venv is up to date; starts over after an interruption.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
    "") kind=cpu ;;
    --gpu) kind=gpu ;;
    *) echo "usage: launch/setup.sh [--gpu]" >&2; exit 2 ;;
esac
requirements=launch/requirements-$kind.txt
# one set-up at a time: a second one waits here, then finds everything done
exec 9<launch/setup.sh
flock 9
bash launch/packages.sh bubblewrap
wanted="$kind $({ pwd; cat "$requirements" setup.py launch/setup.sh; } | sha256sum)"
[[ -f .venv/setup-stamp && "$(<.venv/setup-stamp)" == "$wanted" ]] && exit 0

find_python() {
    for candidate in python3.11 python3 /usr/bin/python3.11; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate" && return
        fi
    done
    echo "error: no Python 3.11 with its venv module; install it, such as: apt-get install python3.11-venv" >&2
    return 1
}

quietly() {
    "$@" >>.venv/setup.log 2>&1 </dev/null && return
    tail -n 40 .venv/setup.log >&2
    hint="the CPU build of torch is on PyTorch's own package index: set PIP_EXTRA_INDEX_URL to it"
    grep -q 'No matching distribution found for torch==' .venv/setup.log && echo "$hint" >&2
    echo "error: failed: $*; all output: .venv/setup.log" >&2
    exit 1
}
install() {
    quietly .venv/bin/python -m pip --disable-pip-version-check --no-input install --root-user-action=ignore "$@"
}

echo "setting up .venv ($kind), which takes a few minutes the first time"
# a started set-up that never finished leaves packages half unpacked
[[ -e .venv/setup-started ]] && rm -rf .venv
python=$(find_python)
mkdir -p .venv && touch .venv/setup-started
rm -f .venv/setup-stamp .venv/setup.log
[[ -x .venv/bin/python ]] || quietly "$python" -m venv .venv

if [[ $kind == cpu ]]; then
    # the list is complete: resolving dependencies would pull in what it leaves out
    install --no-deps -r "$requirements"
else
    grep -vE '^(transformer-engine|flash-attn)' "$requirements" >.venv/first.txt
    install -r .venv/first.txt
    install --no-build-isolation -r "$requirements"
fi
install --no-deps --no-build-isolation -e .
rm .venv/setup-started
echo "$wanted" >.venv/setup-stamp
