#!/usr/bin/env bash
# Install bubblewrap, the sandbox of the reward code_tests, where it is missing and we may. Never fails: the rest
# works without it. A failed try is not repeated as long as .venv/no-bubblewrap is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v bwrap >/dev/null && exit 0
hint="note: the reward code_tests needs bubblewrap 0.8 or later; install it, such as: apt-get install bubblewrap"
if [[ -e .venv/no-bubblewrap ]]; then
    exit 0
elif [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    echo "$hint"
    exit 0
fi

get() {
    said=$(DEBIAN_FRONTEND=noninteractive timeout 120 apt-get -qq -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=20 "$@" 2>&1 </dev/null)
}
# package lists may be missing on a fresh machine, and fetching them is the slow part
get install -y --no-install-recommends bubblewrap && exit 0
get update && get install -y --no-install-recommends bubblewrap && exit 0
mkdir -p .venv
echo "$hint (tried; apt-get said: ${said##*$'\n'})" | tee .venv/no-bubblewrap
