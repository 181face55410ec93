"""Tokenizer and chat templates against transformers, on the demo model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gateway.frontend.chat_template import ChatTemplate, Message
from gateway.frontend.frontend import ModelAssets, load_assets
from services.config import ServeConfig

TEXTS = [
    "What is the capital of France?",
    "naïve café — 東京 🎉👩‍👩‍👧 عربى",
    "  leading and   inner blanks \n\n\ttabs\r\n",
    "<|im_start|>user\nspecial tokens in text<|im_end|>",
    "def f(x):\n    return x ** 2  # 12345 3.14159",
    "\x00\x1f\ufffd\u200b",
    "a" * 1000,
    " ".join(f"word{i}" for i in range(3000)),
]

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hello <b> & \"you\" 'there'"},
        {"role": "assistant", "content": "Hi!\n"},
        {"role": "user", "content": "  blanks  "},
    ],
    [{"role": "user", "content": ""}],
]

# In the manner of templates that are in use: macros, namespaces, whitespace control, JSON.
TEMPLATES = [
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}",
    "{%- set ns = namespace(system='none') -%}\n{%- for m in messages if m.role == 'system' -%}\n"
    "    {%- set ns.system = m.content -%}\n{%- endfor -%}\n"
    "{%- macro turn(m) -%}\n<|{{ m['role'] }}|>\n{{ m['content'] | trim }}\n{%- endmacro -%}\n"
    "System: {{ ns.system }}\n{% for m in messages %}\n    {{- turn(m) }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}\n",
    "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ tools is none }}|"
    "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
    "{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
]


@pytest.fixture(scope="module")
def oracle(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def assets(demo_model: Path) -> ModelAssets:
    return load_assets(ServeConfig(model=str(demo_model)), demo_model)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_ids_and_text(
    assets: ModelAssets, oracle: Any, text: str, add_special_tokens: bool
) -> None:
    ids = assets.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert ids == oracle.encode(text, add_special_tokens=add_special_tokens)
    assert assets.tokenizer.decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False)
    assert assets.tokenizer.decode(ids, skip_special_tokens=True) == oracle.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    joined = b"".join(assets.tokenizer.token_bytes(one) for one in ids)
    assert joined.decode() == text


def test_special_tokens_and_defaults(assets: ModelAssets, oracle: Any, demo_model: Path) -> None:
    assert assets.tokenizer.special_tokens["eos_token"] == oracle.eos_token
    assert assets.tokenizer.special_tokens["bos_token"] == oracle.bos_token
    eos = json.loads((demo_model / "generation_config.json").read_text())["eos_token_id"]
    assert eos in assets.defaults.eos_token_ids


def as_messages(conversation: Sequence[dict[str, str]]) -> list[Message]:
    return [Message(one["role"], one["content"]) for one in conversation]


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_model_s_own_template(
    assets: ModelAssets,
    oracle: Any,
    conversation: list[dict[str, str]],
    add_generation_prompt: bool,
) -> None:
    assert assets.chat_template is not None
    text = assets.chat_template.render(
        as_messages(conversation), add_generation_prompt=add_generation_prompt
    )
    assert text == oracle.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    ids = oracle.apply_chat_template(
        conversation, add_generation_prompt=add_generation_prompt, return_dict=True
    )["input_ids"]
    assert assets.tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize("source", TEMPLATES, ids=range(len(TEMPLATES)))
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_other_templates(
    assets: ModelAssets, oracle: Any, source: str, conversation: list[dict[str, str]]
) -> None:
    template = ChatTemplate(source, assets.tokenizer.special_tokens)
    try:
        expected = oracle.apply_chat_template(
            conversation, chat_template=source, tokenize=False, add_generation_prompt=True
        )
    except Exception:
        with pytest.raises(Exception, match="chat template refuses"):
            template.render(as_messages(conversation))
    else:
        assert template.render(as_messages(conversation)) == expected
