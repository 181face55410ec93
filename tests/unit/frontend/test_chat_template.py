"""Chat templates: Hugging Face's conventions, the sandbox, and where the source comes from."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from gateway.frontend.chat_template import ChatTemplate, Message, template_source
from services.errors import ConfigError, InvalidRequest, ModelError

HELLO = (Message("user", "Hello"), Message("assistant", "<Hi> & 'you'"))


def render(source: str, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(HELLO)


def test_blocks_leave_no_blanks() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "user\nassistant\n"


def test_special_tokens_and_generation_prompt() -> None:
    source = "{{ bos_token }}{% if add_generation_prompt %}GO{% endif %}{{ eos_token }}"
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(HELLO) == "<s>GO</s>"
    assert template.render(HELLO, add_generation_prompt=False) == "<s></s>"


def test_tojson_keeps_html_and_unicode() -> None:
    source = "{{ messages[1].content | tojson }}{{ {'b': 'é', 'a': 1} | tojson(indent=1) }}"
    assert render(source) == "\"<Hi> & 'you'\"" + json.dumps(
        {"b": "é", "a": 1}, ensure_ascii=False, indent=1
    )


def test_strftime_now_and_loop_controls_and_generation() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}"
    assert render(source) == "x"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hello"


def test_a_template_may_refuse() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source)


def test_optional_fields_are_absent_unless_given() -> None:
    source = "{% for m in messages %}{{ 'name' in m }}{{ 'tool_call_id' in m }};{% endfor %}"
    messages = (Message("user", "x", name="me"), Message("tool", "y", tool_call_id="1"))
    assert ChatTemplate(source).render(messages) == "TrueFalse;FalseTrue;"


def test_a_broken_template_is_a_config_error_with_its_line() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


def write(directory: Path, name: str, value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    (directory / name).write_text(text)


def test_sources_in_their_order(tmp_path: Path) -> None:
    assert template_source(tmp_path, None) is None
    write(tmp_path, "tokenizer_config.json", {"chat_template": "from config"})
    assert template_source(tmp_path, None) == "from config"
    write(tmp_path, "chat_template.jinja", "from file")
    assert template_source(tmp_path, None) == "from file"
    write(tmp_path, "other.jinja", "from flag")
    assert template_source(tmp_path, str(tmp_path / "other.jinja")) == "from flag"
    assert template_source(tmp_path, "{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match="--chat-template"):
        template_source(tmp_path, str(tmp_path / "missing.jinja"))


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert template_source(tmp_path, None) == "D"
    write(tmp_path, "tokenizer_config.json", {"chat_template": named[1:]})
    with pytest.raises(ModelError, match="rag"):
        template_source(tmp_path, None)
