"""Tiny things for tests, made on the spot; nothing from the network."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

_LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "def attention(query, key, value): return softmax(query @ key.T) @ value",
    "Sparse attention keeps only a few positions, chosen by an indexer.",
]


def tiny_tokenizer(vocab_size: int = 300, eos_token: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """A byte-level BPE that encodes any text without loss, with an end-of-text token or none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[eos_token] if eos_token else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    named = {"eos_token": eos_token} if eos_token else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **named)
