#!/usr/bin/env bash
# Train and measure the learned indexers of SmolLM2 on one GPU, in as many calls as it takes:
#
#   python benchmarks/distill_tokens.py .carry/distill                # where the text is
#   TOKENS=.carry/distill KEEP=/tmp/keep OUT=out SECONDS_LEFT=560 benchmarks/distill_gpu.sh shipped no_pydoc no_code fp4
#
# The same command goes on where the last one was stopped; finished runs cost seconds. STEPS changes the length of all
# runs, ARGS adds overrides for both scripts (such as model=hf model.path=...). OUT gets the shipped weight files and records.tar.gz: every run's log, manifest and test results.
set -uo pipefail
: "${TOKENS:?a folder made by benchmarks/distill_tokens.py}" "${KEEP:=/tmp/keep}" "${OUT:?where results go}"
export TOKENS
python=${PYTHON:-python3}
end=$((SECONDS + ${SECONDS_LEFT:-560}))
test_on() { case $1 in no_pydoc) echo pydoc ;; no_code) echo stdlib ;; *) echo pydoc stdlib ;; esac; }
shape() {
    case $1 in
    no_*) echo "[{topk:64,compress_ratio:1},{topk:16,compress_ratio:4}]" ;;
    ratio1) echo "[{topk:64,compress_ratio:1}]" ;;
    *) echo "[{topk:64,compress_ratio:1},{topk:32,compress_ratio:2},{topk:16,compress_ratio:4}]" ;;
    esac
}
mkdir -p "$KEEP" "$OUT"
for run in "${@:-shipped}"; do
    left=$((end - SECONDS))
    if ((left < 30)); then
        echo "no time left for $run"
        break
    fi
    # INT, so that the run notes it; its last checkpoint stays
    timeout -s INT "$left" "$python" experiments/distill.py "experiment=distill/$run" "results_dir=$KEEP" \
        ${STEPS:+recipe.steps=$STEPS} ${ARGS:-} 2>&1 | grep -v 'Loading weights'
    [ "$(cat "$KEEP/distill/$run/status")" = complete ] || continue
    for text in $(test_on "$run"); do
        timeout -s INT "$((end - SECONDS > 5 ? end - SECONDS : 5))" "$python" experiments/recall.py \
            data=tokens "data.path=$TOKENS/${text}_test.npy" data.num_documents=8 scorer=lightning \
            "scorer.weights=$KEEP/distill/$run" selection.topk=64 selection.compress_ratio=1 \
            "selection.zipped=$(shape "$run")" measure.detail_rows=0 \
            "results_dir=$KEEP" experiment_name=tests "name=$run-$text" ${ARGS:-} 2>&1 | grep -v 'Loading weights'
    done
done
cp "$KEEP"/distill/shipped/*.safetensors "$OUT" 2>/dev/null
(cd "$KEEP" && find distill tests -name '*.csv' -o -name manifest.json -o -name '*.log' -o -name status |
    tar -czf records.tar.gz -T -) && cp "$KEEP/records.tar.gz" "$OUT"
for run in "$KEEP"/distill/*/; do echo "$(basename "$run"): $(cat "$run/status")"; done
