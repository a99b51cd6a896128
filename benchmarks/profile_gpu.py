"""What measuring 200 cells adds to a layer's forward on a GPU: kernels, their time, launches, copies and waits.

python benchmarks/profile_gpu.py TOKENS [ROWS]      ROWS sampled rows a layer (1024), or all
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from sparsity_lab import benchmark_gpu as gpu
from sparsity_lab.lightning import Lightning

LAYERS = (4, 8, 12, 14, 20, 21, 22, 23)  # three candidate sources and five layers that search in their pools
FEW = (4, 8, 12, 14)  # for every row
Table = dict[str, tuple[float, float, float]]  # event -> times, milliseconds on the device, on the CPU


def profiled(work: Callable[[], object]) -> Table:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    events = found.key_averages()
    return {e.key: (e.count, e.self_device_time_total / 1e3, e.self_cpu_time_total / 1e3) for e in events}


def main(tokens: int, rows: int | None) -> None:
    model = gpu.random_llama()
    scorer, documents = Lightning(model, gpu.INDEXER), gpu.random_documents(1, tokens, gpu.LLAMA_8B["vocab_size"])
    forward = gpu._forward(model, documents)
    layers = LAYERS if rows else FEW
    job = lambda: gpu.job(model, scorer, documents, gpu.long_cells(200), rows, layers=layers)  # noqa: E731
    job()
    plain, whole = profiled(forward), profiled(job)
    more = {
        key: [(a - b) / len(layers) for a, b in zip(row, plain.get(key, (0, 0, 0)), strict=True)]
        for key, row in whole.items()
    }
    kernels = {key: row for key, row in more.items() if whole[key][1] > 0 and not key.startswith("aten::")}
    operators = {key: row for key, row in more.items() if key.startswith("aten::")}
    # what the forward runs, too, does not cancel to the last microsecond
    added = {key: row for key, row in kernels.items() if key not in plain}
    count, busy = (sum(row[i] for row in added.values()) for i in (0, 1))
    print(f"a layer, in kernels that the forward has not: {count:.0f} launches, {busy:.1f} ms on the device")
    for name in ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaStreamSynchronize"):
        print(f"{name}: {more.get(name, [0])[0]:.1f} a layer")
    for table, column, title in ((kernels, 1, "device"), (operators, 2, "CPU")):
        print(f"most time on the {title} (times, ms on the device, ms on the CPU a layer)")
        for key, row in sorted(table.items(), key=lambda item: -item[1][column])[:45]:
            print(f"{row[0]:8.1f} {row[1]:8.2f} {row[2]:8.2f}  {key[:100]}")


if __name__ == "__main__":
    main(int(sys.argv[1]), None if sys.argv[2:] == ["all"] else int(*sys.argv[2:] or [1024]))
