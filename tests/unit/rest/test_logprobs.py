"""Offsets of tokens in the text of a completion."""

from __future__ import annotations

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from gateway.engine.types import TokenLogprob
from gateway.frontend.tokenizer import Tokenizer
from gateway.rest.logprobs import CompletionLogprobs


def bytewise() -> Tokenizer:
    """One token for each byte."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    return Tokenizer(backend)


def test_offsets_find_each_character_that_is_spread_over_tokens() -> None:
    text = "aé😀b"
    tokenizer = bytewise()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    entries = [TokenLogprob(token_id, -0.5) for token_id in ids]
    logprobs = CompletionLogprobs(tokenizer, offset=10)
    # In two takes, the second of which begins in the middle of a character.
    offsets = [
        *logprobs.take(entries[:2])["text_offset"],
        *logprobs.take(entries[2:])["text_offset"],
    ]
    characters = [10 + text.index(char) for char in text for _ in char.encode()]
    assert offsets == characters
