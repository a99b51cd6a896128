"""One of the processes that test_v41_parallel.py starts with torchrun: python v41_worker.py OUT_FOLDER.

On whatever devices its environment shows it: a GPU each, or the CPU.
"""

import sys
from pathlib import Path

import torch
from v41_cases import UNQUANTISED, cached, golden_io, manifest, prompt, run_in_pieces

from sparsity_lab.activations import LayerActivations
from sparsity_lab.models.deepseek_v41 import DeepseekV41, DeepseekV41Config, load
from sparsity_lab.models.deepseek_v41.checkpoint import load_checkpoint
from sparsity_lab.models.deepseek_v41.parallel import Shard

GOLDEN = "two_groups"
LENGTH, CUTS = 40, [17, 18]
Tensors = dict[str, torch.Tensor]


def computed(loaded: DeepseekV41, golden_folder: Path, shard: Shard) -> Tensors:
    """Logits, decisions and caches of a random model in chunks and of a golden checkpoint at once."""
    logits, trace, held = run_in_pieces(loaded.model, prompt(LENGTH, batch=2).to(loaded.device), CUTS)
    config = DeepseekV41Config.from_dict(manifest()[GOLDEN]["config"])
    golden = load_checkpoint(golden_folder, config, shard=shard, device=loaded.device)
    golden_logits, golden_trace, _ = run_in_pieces(golden, golden_io(GOLDEN)["input_ids"].to(loaded.device), [])
    found = {
        "logits": logits,
        "golden.logits": golden_logits,
        **trace,
        **cached(held),
        **{f"golden.{name}": tensor for name, tensor in golden_trace.items()},
    }
    return {name: tensor.cpu() for name, tensor in found.items()}


def observed(loaded: DeepseekV41) -> Tensors:
    """Everything in the activations of all layers."""
    found: Tensors = {}

    def observer(acts: LayerActivations) -> None:
        for owner, part in (("", acts), ("index.", acts.index), ("compressed.", acts.compressed)):
            for name, value in vars(part).items() if part is not None else ():
                if isinstance(value, torch.Tensor):
                    found[f"L{acts.layer}.{owner}{name}"] = value.to("cpu", copy=True)

    loaded.observe(prompt(LENGTH), observer, range(loaded.num_layers))
    return found


def failures(loaded: DeepseekV41) -> str:
    """What comes of an observer that fails in the middle of a forward, and of tokens that do not exist."""

    def fail(acts: LayerActivations) -> None:
        if acts.layer == 3:
            raise ValueError("the check of layer 3 failed")

    messages = []
    for tokens in (prompt(LENGTH), torch.tensor([[5, 999]])):
        try:
            loaded.observe(tokens, fail, range(loaded.num_layers))
        except ValueError as error:
            messages.append(str(error))
    return "; ".join(messages)


def main() -> None:
    out = Path(sys.argv[1])
    loaded = load("tiny", dtype="float32", **UNQUANTISED)
    shard = loaded.model.shard
    tensors = computed(loaded, out / "golden", shard)
    tensors |= {f"part.{name}": p.detach().cpu() for name, p in loaded.model.named_parameters()}
    if shard.rank:
        torch.save(tensors, out / f"{shard.rank}.pt")
        loaded.serve()  # returns when the first process ends
        (out / f"{shard.rank}.ended").touch()
        return
    (out / "failures").write_text(failures(loaded), encoding="utf-8")
    torch.save(tensors | observed(loaded) | {"again": observed(loaded)["L7.output"]}, out / "0.pt")


if __name__ == "__main__":
    main()
