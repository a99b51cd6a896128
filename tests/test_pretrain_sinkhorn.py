"""The fused Sinkhorn kernel against the plain function, interpreted where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import torch
from sparsity_lab.kernels.sinkhorn import sinkhorn
from sparsity_lab.models.deepseek_v41.hyper import sinkhorn as plain

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
for copies, iters in ((4, 1), (4, 2), (4, 20), (2, 7)):
    logits, weights = torch.randn(2, 5, 9, copies, copies, device=device)
    results = []
    for function in (plain, sinkhorn):
        x = logits.clone().requires_grad_()
        out = function(x, iters, 1e-6)
        (out * weights).sum().backward()
        results += [out.detach(), x.grad]
    torch.testing.assert_close(results[:2], results[2:], rtol=1e-4, atol=1e-6)
print("the same")
"""


def test_forward_and_backward_are_those_of_the_plain_function():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0" if torch.cuda.is_available() else "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.strip() == "the same", done.stderr
