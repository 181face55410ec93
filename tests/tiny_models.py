"""Makes tiny random checkpoints with transformers, for tests of any part.

    path = make_tiny_llama(tmp_path / "model", tied=True)

Each has a small byte-level tokenizer, so that text goes in and out. The same
arguments give the same weights. Sizes let TP 2 and PP 3 divide them, and PP 2
leave a remainder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB_SIZE = 288
"""256 bytes and a few special tokens, rounded up; not a multiple of 64."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a tiny model."""

    num_layers: int = 5
    hidden_size: int = 32
    intermediate_size: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    vocab_size: int = VOCAB_SIZE
    max_position_embeddings: int = 512


def make_tiny_llama(
    path: Path,
    *,
    tied: bool = False,
    llama3_rope: bool = False,
    bias: bool = False,
    shape: TinyShape | None = None,
    max_shard_bytes: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """A LlamaForCausalLM with random weights. `max_shard_bytes` splits it into files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = shape or TinyShape()
    extra: dict[str, Any] = {}
    if llama3_rope:
        extra["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    config = LlamaConfig(
        **_common(shape), tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias, **extra
    )
    return _save(path, LlamaForCausalLM, config, shape, max_shard_bytes, dtype, seed)


def make_tiny_mistral(path: Path, *, shape: TinyShape | None = None, seed: int = 0) -> Path:
    """A MistralForCausalLM without sliding window, its head size not hidden / heads."""
    from transformers import MistralConfig, MistralForCausalLM

    shape = shape or TinyShape()
    config = MistralConfig(**_common(shape), head_dim=16, sliding_window=None)
    return _save(path, MistralForCausalLM, config, shape, None, "float32", seed)


def make_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja: one token
    for each byte, then `<s>`, `</s>`, the roles of the chat template, and fillers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    special += [f"<|filler_{i}|>" for i in range(vocab_size - len(alphabet) - len(special))]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(path)


BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257


def _common(shape: TinyShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_position_embeddings,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        # Far above the usual 0.02: random logits must differ enough to have a clear best.
        "initializer_range": 0.3,
    }


def _save(
    path: Path,
    kind: Any,
    config: Any,
    shape: TinyShape,
    max_shard_bytes: int | None,
    dtype: str,
    seed: int,
) -> Path:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        # transformers starts norms at one and biases at zero, which would hide mistakes.
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith(".bias"):
                torch.nn.init.normal_(parameter, 0.0, 0.3)
        model = model.to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    limits = {} if max_shard_bytes is None else {"max_shard_size": max_shard_bytes}
    model.save_pretrained(path, **limits)
    make_tokenizer(path, shape.vocab_size)
    return path
