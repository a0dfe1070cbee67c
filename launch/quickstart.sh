#!/usr/bin/env bash
# From nothing to a trained tiny model: set-up, model, data, then SFT and RL by recipes/quickstart.yaml.
# Arguments go to `megatron-rl train`: launch/quickstart.sh --nproc 1 run.seed=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if [[ ! -f models/tiny/config.json ]]; then
    .venv/bin/python tools/make_tiny_model.py --out models/tiny
fi
for file in sft train heldout; do
    if [[ ! -f data/quickstart/$file.jsonl ]]; then
        .venv/bin/python tools/prepare_math_data.py --out data/quickstart
        break
    fi
done

# two data-parallel ranks, one per core; the numbers are those of one rank, sooner
exec .venv/bin/megatron-rl train recipes/quickstart.yaml --nproc 2 "$@"
