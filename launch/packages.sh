#!/usr/bin/env bash
# Install Debian packages where they are missing and we may: launch/packages.sh PACKAGE ... Never fails: the rest works
# without them. A failed try is not repeated as long as .venv/no-PACKAGE is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# package: the command that it brings, and what needs it
declare -A commands=([bubblewrap]=bwrap [chromium]=chromium [iproute2]=ip)
declare -A needed_by=(
    [bubblewrap]="the reward code_tests needs bubblewrap 0.8 or later"
    [chromium]="the test of the report needs the browser Chromium"
    [iproute2]="tests of several machines need network namespaces"
)

get() {
    said=$(DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=20 "$@" 2>&1 </dev/null)
}
for package in "$@"; do
    command -v "${commands[$package]}" >/dev/null && continue
    [[ -e .venv/no-$package ]] && continue
    hint="note: ${needed_by[$package]}; install it, such as: apt-get install $package"
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "$hint"
        continue
    fi
    # package lists may be missing on a fresh machine, and fetching them is the slow part
    get install -y --no-install-recommends "$package" && continue
    get update && get install -y --no-install-recommends "$package" && continue
    mkdir -p .venv
    echo "$hint (tried; apt-get said: ${said##*$'\n'})" | tee ".venv/no-$package"
done
