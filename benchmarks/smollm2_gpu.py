"""SmolLM2 with its learned indexers at its full context, on whatever device: one tidy table, to be compared.

python benchmarks/smollm2_gpu.py cpu float32 cpu.csv --tokens tokens.npy
python benchmarks/smollm2_gpu.py cuda float32 cuda.csv --tokens tokens.npy --against cpu.csv

Other Pythons bring other texts along, so the first run writes the tokens it takes, and the others read them.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import pandas as pd

import sparsity_lab as sl
from sparsity_lab.lightning import Lightning

METRICS = [
    "recall",
    "coverage",
    "oracle_coverage",
    "total_coverage",
    "pool_coverage",
    "worst_head_coverage",
    "output_error",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", help="cpu, cuda, ...")
    parser.add_argument("dtype", help="float32, bfloat16 or float16")
    parser.add_argument("out", help="where the table goes")
    parser.add_argument("--against", help="a table of another device: print the largest difference of every metric")
    parser.add_argument("--tokens", required=True, type=Path, help="tokens to use; made from pydoc if not there yet")
    parser.add_argument("--length", type=int, default=8192)
    options = parser.parse_args()
    model = sl.load_model("smollm2", device=options.device, dtype=options.dtype)
    if not options.tokens.exists():
        np.save(
            options.tokens, sl.data.pydoc(model.tokenizer, num_documents=1, length=options.length)[0].tokens.numpy()
        )
    documents = sl.data.tokens(options.tokens, num_documents=1, length=options.length)
    pools = [None, {"source_layer": 8, "topk_blocks": 128, "block_size": 8}]
    cells = sl.grid(scorer="lightning", topk=[64, 256], compress_ratio=[1, 4], candidate=pools)
    start = time.perf_counter()
    scorers = {"lightning": Lightning(model, weights="shipped")}
    found = sl.measure(model, documents, cells, scorers=scorers, rows=128, detail_rows=16)
    print(f"{options.device} {options.dtype}: {time.perf_counter() - start:.1f} s")
    keys = ["scorer", "compress_ratio", "topk", "candidate_topk_blocks", "layer"]
    table = found.frame().fillna({"candidate_topk_blocks": 0}).sort_values(keys)[keys + METRICS].reset_index(drop=True)
    table.to_csv(options.out, index=False)
    if options.against:
        other = pd.read_csv(options.against)
        assert table[keys].astype(str).equals(other[keys].astype(str)), "not the same cells"
        for metric in METRICS:
            difference = (table[metric] - other[metric]).abs()
            print(f"{metric:20s} largest difference {difference.max():.2e}, mean {difference.mean():.2e}")


if __name__ == "__main__":
    main()
