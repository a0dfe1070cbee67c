#!/usr/bin/env bash
# What the launch scripts share; sourced by them. It sets `root`, this repository, and `python`, what runs it:
# MEGATRON_RL_PYTHON, else that of launch/setup.sh, else the one on the path, as in a container.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python=$root/.venv/bin/python
[[ -x $python ]] || python=python3
python=${MEGATRON_RL_PYTHON:-$python}

fail() {
    echo "error: $1" >&2
    exit 2
}

# parse SCRIPT "--option=variable ..." ARGUMENT...: set the variables; the rest becomes `recipe` and `overrides`
parse() {
    local script=$1 known=" $2 "
    shift 2
    dry_run='' recipe='' overrides=()
    while (($#)); do
        case $1 in
            -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script"; exit ;;
            --dry-run) dry_run=1 ;;
            --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}"; continue ;;
            -*) [[ $known == *" $1="* ]] || fail "$1: no such option; see $script --help"
                [[ -n ${2:-} && $2 != --* ]] || fail "$1: needs a value${2:+, got the option $2}"
                local variable=${known#*" $1="}
                printf -v "${variable%% *}" %s "$2"
                shift ;;
            *) if [[ -z $recipe ]]; then
                   recipe=$1
               elif [[ $1 == *=* ]]; then
                   overrides+=("$1")
               else
                   fail "got '$1' after the recipe, must be path=value; a run directory is --run-dir DIR"
               fi ;;
        esac
        shift
    done
    [[ -n $recipe ]] || fail "no recipe; usage: $script RECIPE [path=value ...], see --help"
    [[ -f $recipe ]] || fail "$recipe: no such recipe file"
    # no command takes it for an option
    [[ ${run_dir:=} != -* ]] || run_dir=./$run_dir
}

# check_recipe [option]: end with what is wrong with recipe and overrides, as far as this machine can say
check_recipe() {
    local said code=0
    said=$(PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" "$python" -m megatron_rl check "$recipe" \
        --recipe-alone "$@" "${overrides[@]}" 2>&1 >/dev/null) || code=$?
    ((code != 2)) || { echo "$said" >&2; exit 2; }
    # such as a login node, where the requirements are in an image
    ((code == 0)) || echo "# the recipe was not checked: ${said##*$'\n'}" >&2
}

# make_run_dir: with a place for logs
make_run_dir() {
    run mkdir -p "${run_dir:?}/logs" || fail "--run-dir: $run_dir cannot be made; choose another directory"
}

# run COMMAND...: run it, or with --dry-run print it
run() {
    if [[ -n $dry_run ]]; then print_command "$@"; else "$@"; fi
}

# print_command WORD...: as a shell reads it, quoted where needed
print_command() {
    local word line=
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then line+="$word "; else line+="${word@Q} "; fi
    done
    printf '%s\n' "${line% }"
}
