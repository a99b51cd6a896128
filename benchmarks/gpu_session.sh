#!/usr/bin/env bash
# The measurements that need a GPU, in parts that each fit a given time, on a machine without a network:
#
#   OUT=out KEEP=/tmp/keep SECONDS_LEFT=570 benchmarks/gpu_session.sh setup jobs profile
#   OUT=out KEEP=/tmp/keep SECONDS_LEFT=570 benchmarks/gpu_session.sh suite
#
# Parts run in the order given; one that time runs out on is stopped, and what it wrote so far is in OUT.
#
#   setup        install the wheels of WHEELS (pytest, hydra ...) into KEEP, where later calls find them; name the cards
#   jobs         plain forward, 1 and 200 cells at 8,192 and 32,768 tokens, 1,024 rows a layer   (about 60 s)
#   profile      kernels, launches and waits of a layer of the 200 cells at 32,768 tokens        (60 s)
#   all_rows     200 cells at 32,768 tokens, every row                                           (180 s)
#   long         131,072 tokens, then one layer of 1,048,576                                     (200 s)
#   side         the alternatives side by side, and the kernels alone                            (250 s)
#   suite        the tests, PROCESSES (14) at a time (SLICE=i/n: a part of their files)          (250 s)
#   compile      a training step of the mini with and without torch.compile                      (120 s)
#   two_gpus     the tests of torchrun's processes through NCCL; DOCUMENTS (64) documents of SmolLM2 in two shards, on two
#                GPUs against one; needs TOKENS, cut by benchmarks/distill_tokens.py FOLDER 8192  (300 s)
#   smollm2      SmolLM2 with its indexers at 8,192 tokens; with CPU_TABLE (benchmarks/smollm2_gpu.py cpu float32 ...)
#                and its TOKENS_8192 also the differences from the CPU                           (60 s)
#   distill      train and test indexers of SmolLM2 on documents of 8,192 tokens: STEPS steps, as the time allows; needs
#                TOKENS, cut by benchmarks/distill_tokens.py FOLDER 8192
#
# SmolLM2 itself is expected in $SPARSITY_LAB_CACHE (KEEP/cache unless it is set): its wheel, or the unpacked folder.
set -uo pipefail
: "${OUT:?where results go}" "${KEEP:=/tmp/keep}" "${SECONDS_LEFT:=570}" "${WHEELS:=.whl}" "${SLICE:=0/1}" "${STEPS:=500}"
python=${PYTHON:-python3}
end=$((SECONDS + SECONDS_LEFT))
export PYTHONPATH="$KEEP/site:$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export SPARSITY_LAB_CACHE=${SPARSITY_LAB_CACHE:-$KEEP/cache} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
mkdir -p "$OUT" "$KEEP" "$SPARSITY_LAB_CACHE"

# limited NAME COMMAND...: run it within the time left, output to OUT/NAME.log (without progress bars), its end shown.
# INT, so that it notes how far it came.
limited() {
    local name=$1 left=$((end - SECONDS))
    shift
    ((left > 10)) || { echo "$name: no time left"; return; }
    timeout -s INT -k 10 "$left" "$@" 2>&1 | tr '\r' '\n' >"$OUT/$name.log"
    echo "--- $name: status ${PIPESTATUS[0]}, $SECONDS s so far"
    tail -n "${SHOW:-15}" "$OUT/$name.log" | cut -c1-240
}

bench() { # NAME OVERRIDES...: a record in OUT; every case is in the log as soon as it is measured
    limited "bench-$1" "$python" experiments/bench.py device=cuda "record=$OUT/bench-$1.json" "${@:2}"
}

setup() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    compgen -G "$WHEELS/*.whl" >/dev/null && "$python" -m pip install -q --no-index --no-deps --no-compile \
        --no-cache-dir --upgrade --target "$KEEP/site" "$WHEELS"/*.whl
    "$python" -c "import torch, transformers, triton; print(torch.__version__, transformers.__version__, triton.__version__)"
}

profile() { limited profile "$python" benchmarks/profile_gpu.py 32768; }

suite() { # every n-th file, so that slow neighbours part
    local files
    mapfile -t files < <(printf '%s\n' tests/test_*.py | awk -v i="${SLICE%/*}" -v n="${SLICE#*/}" 'NR % n == i')
    SHOW=40 limited "suite-${SLICE/\//of}" "$python" -m pytest -q -n "${PROCESSES:-14}" --timeout 120 \
        -p no:cacheprovider -rfE --durations=10 "${files[@]}"
}

compile() { # the speed of every stage is in the last lines
    for yes in true false; do
        limited "compile-$yes" "$python" experiments/pretrain.py experiment=pretrain/v41_mini preflight=true \
            "recipe.compile=$yes" 'data.packages=[]' "results_dir=$KEEP" "name=compile-$yes"
    done
}

two_gpus() {
    : "${TOKENS:?a folder made by benchmarks/distill_tokens.py}"
    limited nccl "$python" -m pytest -q --timeout 300 -p no:cacheprovider tests/test_v41_parallel.py \
        tests/test_pretrain_fsdp.py
    # The same two shards, a process each: one after the other on one card, then one on each. By the jobs' own seconds,
    # from a job's first log line to its last word, so that each loads the model once. Hydra's -m stands before the
    # overrides. A first job on two documents leaves Triton's kernels compiled.
    local work=(data=tokens "data.path=$TOKENS/stdlib.npy" data.length=8192 scorer=quest "selection.topk=[16,32,64]"
        "selection.compress_ratio=[1,4]" "results_dir=$KEEP" experiment_name=shards)
    local shard
    limited warm "$python" experiments/recall.py "${work[@]}" data.num_documents=2 name=warm
    work+=("data.num_documents=${DOCUMENTS:-64}" data.num_shards=2)
    for shard in 0 1; do
        limited "one_gpu-$shard" "$python" experiments/recall.py "${work[@]}" "data.shard=$shard" \
            model.device=cuda:0 "name=one$shard"
    done
    limited both_gpus "$python" experiments/recall.py -m hydra/launcher=joblib hydra.launcher.n_jobs=2 "${work[@]}" \
        data.shard=0,1 'model.device=cuda:${data.shard}' name=both
    "$python" - "$KEEP"/shards/{one0/jobs/single,one1/jobs/single,both/jobs/0,both/jobs/1} <<'PY' | tee "$OUT/shards.txt"
import sys
from datetime import datetime
from pathlib import Path

seconds = []
for job in map(Path, sys.argv[1:]):
    first = (job / "recall.log").read_text().split("]")[0].strip("[")
    begin = datetime.strptime(first, "%Y-%m-%d %H:%M:%S,%f").timestamp()
    seconds.append((job / "status").stat().st_mtime - begin)
    print(f"{job.relative_to(job.parents[2])}: {(job / 'status').read_text().strip()}, {seconds[-1]:.1f} s")
one, two = sum(seconds[:2]), max(seconds[2:])
print(f"one GPU {one:.1f} s, two GPUs {two:.1f} s: {one / two:.2f} times the throughput")
PY
}

smollm2() {
    for dtype in float32 bfloat16; do
        limited "smollm2-$dtype" "$python" benchmarks/smollm2_gpu.py cuda "$dtype" "$OUT/smollm2-$dtype.csv" \
            --tokens "${TOKENS_8192:-$KEEP/tokens_8192.npy}" ${CPU_TABLE:+--against "$CPU_TABLE"}
    done
}

distill() { # as distill_gpu.sh does, on what few long documents the text gives
    : "${TOKENS:?a folder made by benchmarks/distill_tokens.py FOLDER 8192}"
    export TOKENS
    local text
    local train='[{name:tokens,label:pydoc,path:"${oc.env:TOKENS}/pydoc.npy",num_documents:8,weight:1},{name:tokens,label:stdlib,path:"${oc.env:TOKENS}/stdlib.npy",num_documents:96,weight:3}]'
    limited distill "$python" experiments/distill.py experiment=distill/shipped name=long "results_dir=$KEEP" \
        "data.train=$train" data.length=8192 "recipe.steps=$STEPS" schedule.evaluate_every=100
    cp "$KEEP"/distill/long/{*.safetensors,*.csv,manifest.json,distill.log} "$OUT" 2>/dev/null
    [ "$(cat "$KEEP/distill/long/status" 2>/dev/null)" = complete ] || return
    for text in pydoc stdlib; do
        for weights in shipped "$KEEP/distill/long"; do # those trained at 2,048 tokens, and these
            limited "distill-$text-$(basename "$weights")" "$python" experiments/recall.py data=tokens \
                "data.path=$TOKENS/${text}_test.npy" data.length=8192 data.num_documents=4 scorer=lightning \
                "scorer.weights=$weights" "selection.zipped=[{topk:64,compress_ratio:1},{topk:16,compress_ratio:4}]" \
                selection.topk=64 selection.compress_ratio=1 measure.detail_rows=0 "results_dir=$KEEP" \
                experiment_name=tests "name=$(basename "$weights")-$text"
            cp "$KEEP/tests/$(basename "$weights")-$text/summary.csv" \
                "$OUT/tests-$(basename "$weights")-$text.csv" 2>/dev/null
        done
    done
}

for part in "$@"; do
    case $part in
    jobs) bench jobs 'gpu.parts=[jobs]' 'gpu.lengths=[8192,32768]' gpu.all_rows_up_to=0 ;;
    all_rows) bench all_rows 'gpu.parts=[jobs]' 'gpu.lengths=[32768]' gpu.all_rows_up_to=32768 ;;
    long) bench long 'gpu.parts=[jobs,one_layer]' 'gpu.lengths=[131072]' gpu.all_rows_up_to=0 ;;
    side) bench side 'gpu.parts=[alternatives,kernels]' ;;
    setup | profile | suite | compile | two_gpus | smollm2 | distill) "$part" ;;
    *) echo "$part: no such part; see the head of $0" && exit 1 ;;
    esac
done
