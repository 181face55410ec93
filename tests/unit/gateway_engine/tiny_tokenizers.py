"""Tokenizers built on the spot, one for each way decoders put bytes together."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_SEQUENCE = "<eos>"


def byte_level() -> Tokenizer:
    """One token per byte, as GPT-2's alphabet writes it, then some pieces of several bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_SEQUENCE, special=True)])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Llama 2's way: pieces with a space mark, bytes as a fall-back, first space stripped."""
    vocab = {"<unk>": 0}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", "▁the", "▁Paris", "a", "b", "s", "!", "▁▁", "\ufffd", "é"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(END_OF_SEQUENCE, special=True)])
    return tokenizer
