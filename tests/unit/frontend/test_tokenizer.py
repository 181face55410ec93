"""The tokenizer's own additions: bytes of tokens, special tokens, bad files and bad text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from gateway.frontend.tokenizer import Tokenizer
from services.errors import InvalidRequest, ModelError

TEXTS = [
    "Hello, world!",
    "naïve café 東京 🎉",
    "  two  blanks\n\ttabs",
    "<|end|>x<|end|>",
    "\x00\x7f",
]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        ["Hello, world! Hello, worlds"],
        trainers.BpeTrainer(
            vocab_size=280,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def byte_fallback() -> Backend:
    pieces = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    pieces |= {"\u2581": 257, "H": 258, "i": 259}
    backend = Backend(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
def test_bytes_of_tokens_make_up_the_text(backend: Backend, text: str) -> None:
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(one) for one in ids).decode() == text
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["bytes", "fallback"])
def test_ids_and_text_are_those_of_the_library(backend: Backend, special: bool) -> None:
    tokenizer = Tokenizer(backend)
    for text in [*TEXTS, "", " ".join(TEXTS) * 10]:
        ids = backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(
                ids, skip_special_tokens=skip
            )


def test_part_of_a_character_and_unknown_ids() -> None:
    tokenizer = Tokenizer(byte_level())
    first = tokenizer.encode("é", add_special_tokens=False)[0]
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.token_bytes(10_000) == b""


def test_half_a_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="character 1") as caught:
        Tokenizer(byte_level()).encode("a\ud800", add_special_tokens=False, param="messages")
    assert caught.value.param == "messages"


def test_the_longest_piece_bounds_texts_only_where_it_can() -> None:
    backend = byte_level()
    assert Tokenizer(backend).longest_piece_chars == max(map(len, backend.get_vocab()))
    assert Tokenizer(byte_fallback()).longest_piece_chars is None


def test_files_of_a_directory(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert len(tokenizer.encode("Hello Hello Hello", add_special_tokens=True)) > 2


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
