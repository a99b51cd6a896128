#!/usr/bin/env bash
# Train the small V4.1 model on one GPU machine without a network, and measure it for its card:
#
#   PREFLIGHT=1 OUT=out SECONDS_LEFT=240 benchmarks/pretrain_gpu.sh       # only try everything, and say how fast it is
#   OUT=out KEEP=/tmp/keep SECONDS_LEFT=570 benchmarks/pretrain_gpu.sh
#
# The text comes from the machine's own Python. Training ends its schedule within the time (its steps follow from the
# speed measured at first); cut short, the same command goes on. ARGS adds overrides of experiments/pretrain.py, CARD
# those of experiments/mini_card.py; NAME is the run's. OUT gets model.tar (for sparsity_lab/weights/v41_mini),
# held_out.npz, card.json and records.tar.gz; OUT=none keeps everything in KEEP only.
set -uo pipefail
: "${OUT:?where results go}" "${KEEP:=/tmp/keep}" "${SECONDS_LEFT:=570}" "${NAME:=v41_mini}" "${EXPERIMENT:=v41_mini}"
: "${RESERVE:=90}" # seconds kept for the card
python=${PYTHON:-python3}
end=$((SECONDS + SECONDS_LEFT))
run="$KEEP/pretrain/$NAME"
export TOKENIZERS_PARALLELISM=true PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$run" "$OUT"

collect() {
    [ -d "$run/model" ] && tar -C "$run" -cf "$OUT/model.tar" model
    cp "$run/data/held_out.npz" "$OUT" 2>/dev/null
    cp "$run/card.json" "$run/README.md" "$OUT" 2>/dev/null
    (cd "$run" && find . -name '*.csv' -o -name manifest.json -o -name '*.log' -o -name status -o -name corpus.json |
        tar -czf "$OUT/records.tar.gz" -T -)
    echo "$NAME: $(cat "$run/status" 2>/dev/null || echo 'nothing yet')"
}
trap collect EXIT

if [ "${PREFLIGHT:-0}" = 1 ]; then
    timeout -s INT "$SECONDS_LEFT" "$python" experiments/pretrain.py "experiment=pretrain/$EXPERIMENT" "name=$NAME" \
        "results_dir=$KEEP" preflight=true ${ARGS:-} 2>&1 | tee "$run/preflight.log"
    exit
fi
timeout -s INT $((end - SECONDS - 10)) "$python" experiments/pretrain.py "experiment=pretrain/$EXPERIMENT" \
    "name=$NAME" "results_dir=$KEEP" recipe.steps=null "recipe.seconds=$((SECONDS_LEFT - RESERVE))" ${ARGS:-} 2>&1 |
    tee -a "$run/training.log"
left=$((end - SECONDS - 5))
if [ -d "$run/model" ] && ((left > 10)); then
    timeout -s INT "$left" "$python" experiments/mini_card.py model=deepseek_v41 "model.path=$run/model" \
        "held_out=$run/data/held_out.npz" "record=$run/card.json" "training=$run" model.name=v41_mini "hydra.run.dir=$run/card" ${CARD:-} 2>&1 |
        tee "$run/card.log"
fi
