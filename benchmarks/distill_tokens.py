"""Cut the documents that the shipped indexers are trained and tested on, as token files for a machine without the text.

python benchmarks/distill_tokens.py FOLDER [LENGTH]

Writes <name>.npy (uint16 [documents, LENGTH], 2048 unless told) for pydoc, stdlib, readme (the README texts in the
installed packages' metadata) and pod (Perl's documentation, where Perl is installed), each cut as `sparsity_lab.data`
cuts it with seed 0.
The first HELD_OUT documents of every source, which are also the ones that experiments measure by default, go to
<name>_test.npy; training never sees them.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from sparsity_lab import data
from sparsity_lab.assets import smollm2_folder
from sparsity_lab.documents import Documents

LENGTH, HELD_OUT, MOST = 2048, 8, 400


def cut(source: Callable[..., Documents], tokenizer: object, length: int) -> np.ndarray:
    """As many documents as there are, at most MOST + HELD_OUT, uint16 [documents, length]."""
    low, high = HELD_OUT + 1, MOST + HELD_OUT
    while low < high:  # a source says only that it holds too little, so the count is searched for
        middle = (low + high + 1) // 2
        try:
            source(tokenizer, num_documents=middle, length=length)
            low = middle
        except ValueError:
            high = middle - 1
    documents = source(tokenizer, num_documents=low, length=length)
    return np.stack([document.tokens.numpy() for document in documents]).astype(np.uint16)


def main(folder: Path, length: int = LENGTH) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    packages = Path(sysconfig.get_paths()["purelib"])
    sources: dict[str, Callable[..., Documents]] = {
        "pydoc": data.pydoc,
        "stdlib": data.stdlib,
        "readme": partial(data.text, path=packages / "*.dist-info" / "METADATA"),
        "pod": partial(data.text, path="/usr/share/perl/**/*.pod"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        try:
            tokens = cut(source, tokenizer, length)
        except ValueError as error:
            print(f"{name}: left out ({error})", file=sys.stderr)
            continue
        np.save(folder / f"{name}_test.npy", tokens[:HELD_OUT])
        np.save(folder / f"{name}.npy", tokens[HELD_OUT:])
        print(f"{name}: {len(tokens) - HELD_OUT} documents for training, {HELD_OUT} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
