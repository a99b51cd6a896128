"""On a card: a whole pass there gives the CPU's numbers, for the model families and the scorers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

from sparsity_lab import kernels
from sparsity_lab.cells import grid
from sparsity_lab.documents import Document, Documents
from sparsity_lab.lightning import IndexerConfig, Lightning
from sparsity_lab.measurement import measure
from sparsity_lab.metrics import METRICS
from sparsity_lab.models.hf import HFModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=32, query_pre_attn_scalar=64),
    "gpt_oss": GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1, sliding_window=32),
}


def model_of(family: str, device: str, dtype: torch.dtype) -> HFModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name and weight.ndim == 2:
                weight.mul_(8)  # attention that is not nearly uniform
    return HFModel(model.to(device), name=family, fingerprint=family)


def frame(family: str, device: str, dtype: torch.dtype, share: str):
    model = model_of(family, device, dtype)
    tokens = torch.randint(128, (2, 300), generator=torch.Generator().manual_seed(1))
    documents = Documents(tuple(Document(i, t, str(i)) for i, t in enumerate(tokens)), {"name": "random"})
    first = min(layer for layer, window in model.windows().items() if window is None)
    pools = [None, {"source_layer": first, "topk_blocks": 8, "block_size": 4}]
    cells = grid(["lightning", "quest", "mean_key"], topk=[8, 16], compress_ratio=[1, 3], share=share, candidate=pools)
    scorers = {"lightning": Lightning(model, IndexerConfig(4, 32, 16, 32))}
    found = measure(model, documents, cells, scorers=scorers, rows=100, detail_rows=8)
    keys = ["scorer", "compress_ratio", "topk", "candidate_topk_blocks", "layer"]
    return found.frame().fillna({"candidate_topk_blocks": 0}).sort_values(keys).reset_index(drop=True)


@pytest.mark.parametrize("share", ["layer", "kv_head"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_kernels", [True, False])
def test_the_card_gives_the_numbers_of_the_cpu(family, share, with_kernels, monkeypatch):
    wanted = frame(family, "cpu", torch.float32, share)
    if not with_kernels:
        monkeypatch.setenv("SPARSITY_LAB_KERNELS", "0")
    assert kernels.usable(torch.device("cuda")) == with_kernels
    found = frame(family, "cuda", torch.float32, share)
    for name in METRICS:  # float32 rounds differently there, so a position at the edge of a selection may change
        difference = (found[name] - wanted[name]).abs()
        assert found[name].isna().equals(wanted[name].isna())
        assert difference.max() < 3e-3 or wanted[name].isna().all(), f"{name}: {difference.max()}"


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_with_and_without_kernels(family, monkeypatch):
    found = frame(family, "cuda", torch.bfloat16, "layer")
    monkeypatch.setenv("SPARSITY_LAB_KERNELS", "0")
    wanted = frame(family, "cuda", torch.bfloat16, "layer")
    for name in METRICS:
        difference = (found[name] - wanted[name]).abs()
        assert difference.max() < 3e-3 or wanted[name].isna().all(), f"{name}: {difference.max()}"
