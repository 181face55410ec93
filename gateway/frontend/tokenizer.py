"""The model's tokenizer, from tokenizer.json, without transformers.

A thin wrapper of `tokenizers.Tokenizer` that also knows the bytes of single
tokens (for logprobs) and the named special tokens (for chat templates).
Knows nothing of requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as BackendTokenizer

from gateway.frontend.model_files import read_json
from services.errors import InvalidRequest, ModelError

# One thread tokenizes (`gateway.frontend.frontend`); the library's own pool would take the
# cores from the event loop, and warns in every process that is forked after its first use.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SENTENCEPIECE_BLANK = "\u2581"


class Tokenizer:
    """Text to ids and back. Thread-safe: nothing changes after construction."""

    def __init__(
        self, backend: BackendTokenizer, special_tokens: dict[str, str] | None = None
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        """"bos_token" and the like to their text, where the model names them."""
        self._added = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._byte_of_char = _byte_level_alphabet() if _is_byte_level(backend) else None
        self.longest_piece_chars = _longest_piece_chars(backend)
        """Most characters that one token can stand for; None where that has no bound."""

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json and its neighbours; raises `ModelError`."""
        path = directory / TOKENIZER_FILE
        if not path.is_file():
            raise ModelError(
                f"{directory} has no {TOKENIZER_FILE}; convert the tokenizer with transformers "
                "(save_pretrained) or name another directory with --tokenizer",
                param="--tokenizer",
            )
        try:
            backend = BackendTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"cannot read {path}: {error}", param="--tokenizer") from error
        # A file may carry a training-time cut or padding; prompts are never changed in silence.
        backend.no_truncation()
        backend.no_padding()
        special: dict[str, str] = {}
        for name in (SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE):
            special.update(_special_tokens(read_json(directory / name)))
        return cls(backend, special)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows; the model's embedding may have more rows."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Ids of a text. Special tokens written in the text are recognised, as in training.

        Raises `InvalidRequest` for text that is no valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"'{param}' has half a surrogate pair at character {error.start}, which is "
                "no valid Unicode text",
                param=param,
            ) from error
        # A batch of one: `encode` holds the interpreter's lock while it works, so that even
        # from a thread of its own it would stop the event loop for seconds.
        batch = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids; ids above the tokenizer's vocabulary give nothing."""
        # A batch of one, as in `encode`.
        batch = self.backend.decode_batch(
            [list(token_ids)], skip_special_tokens=skip_special_tokens
        )
        return str(batch[0])

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that one token stands for; may be part of a character."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode("utf-8")
        piece: str | None = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_of_char is not None:
            table = self._byte_of_char
            return b"".join(
                bytes((table[char],)) if char in table else char.encode("utf-8") for char in piece
            )
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes((int(piece[3:5], 16),))
        return piece.replace(_SENTENCEPIECE_BLANK, " ").encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """Text of one token, with a replacement character where it is part of one."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _special_tokens(config: dict[str, object] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = (config or {}).get(name)
        if isinstance(value, dict):  # an AddedToken, written out
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _is_byte_level(backend: BackendTokenizer) -> bool:
    """Whether pieces are spelled in GPT-2's byte alphabet."""
    if backend.decoder is None:
        return False
    # The pickled state is the decoder's JSON; the whole tokenizer's would be megabytes.
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _longest_piece_chars(backend: BackendTokenizer) -> int | None:
    # Normalizers, other alphabets and tokens that swallow blanks may drop any amount of text.
    swallows = any(
        token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
    )
    if backend.normalizer is not None or not _is_byte_level(backend) or swallows:
        return None
    return max((len(piece) for piece in backend.get_vocab(with_added_tokens=True)), default=1)


def _byte_level_alphabet() -> dict[str, int]:
    """Character to byte, as in the GPT-2 tokenizer: printable bytes stand for themselves,
    the others take the code points from 256 on, in order."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\u00a1"), ord("\u00ac") + 1),
        *range(ord("\u00ae"), ord("\u00ff") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return table
