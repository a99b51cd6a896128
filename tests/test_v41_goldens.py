"""The whole model against the golden models: logits, selections and every intermediate, in three call patterns."""

import pytest
import torch
from v41_cases import NAMES, golden_io, golden_model, golden_weights, manifest, run_in_pieces, run_model

PATTERNS = ("prefill", "decode", "prefill_then_decode")
# the manifest allows 1e-4, which leaves room for other devices; float32 on a CPU stays within this
CPU_TOLERANCE = 2e-5


def tolerance(entry: dict, kind: str) -> float:
    """Absolute; 0 for what must be exact."""
    stated = entry["tolerance"].get(kind, CPU_TOLERANCE)
    return 0.0 if stated == "exact" else min(stated, CPU_TOLERANCE)


def assert_golden(entry: dict, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    kind = name.split(".")[0]
    assert got.shape == want.shape, name
    torch.testing.assert_close(
        got.to(want.dtype), want, rtol=0, atol=tolerance(entry, kind), msg=lambda m: f"{name}: {m}"
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("model", NAMES)
def test_everything_in_the_io_file(model, pattern):
    entry, io = manifest()[model], golden_io(model)
    first = {"prefill": entry["length"], "decode": 1, "prefill_then_decode": entry["prefill_then_decode_at"]}[pattern]
    logits, found = run_model(entry["config"], golden_weights(model), io["input_ids"], first)
    assert_golden(entry, "logits", logits, io[f"logits_{pattern}"])
    expected = {name for name in io if ".L" in name}
    assert expected == set(found), "every intermediate has a golden value, and the other way round"
    for name in sorted(expected):
        assert_golden(entry, name, found[name], io[name])


def test_goldens_cover_what_they_should():
    kinds = {name.split(".")[0] for model in NAMES for name in golden_io(model) if ".L" in name}
    assert kinds == {
        "streams", "pre", "attn_out", "experts", "expert_weights",
        "index_scores", "topk", "candidates", "compressed_kv", "index_k",
    }  # fmt: skip
    assert len(NAMES) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("model", NAMES)
def test_logits_and_selections_on_a_gpu(model, pattern):
    entry, io = manifest()[model], golden_io(model)
    first = {"prefill": entry["length"], "decode": 1, "prefill_then_decode": entry["prefill_then_decode_at"]}[pattern]
    loaded = golden_model(model)
    try:
        pieces = range(first, entry["length"])
        logits, found, _ = run_in_pieces(loaded.cuda(), io["input_ids"].cuda(), pieces)
    finally:
        loaded.cpu()
    torch.testing.assert_close(logits.cpu(), io[f"logits_{pattern}"], rtol=0, atol=entry["tolerance"]["logits"])
    for name in (n for n in io if n.split(".")[0] in ("topk", "candidates", "experts")):
        assert torch.equal(found[name].cpu().to(io[name].dtype), io[name]), name
