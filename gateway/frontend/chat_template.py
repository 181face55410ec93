"""Chat templates, by the Hugging Face conventions, in a sandbox.

The template comes with the model, so it is not trusted: it runs in jinja2's
immutable sandbox and sees the messages and the special tokens only.
https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.frontend.model_files import read_json
from services.errors import ConfigError, InvalidRequest, ModelError

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILES = ("chat_template.json", "tokenizer_config.json")
DEFAULT_NAME = "default"

# What a template can raise on a conversation that it was not written for.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None
    tool_call_id: str | None = None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what a model has written, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own convention)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(
            ("name:endgeneration",), drop_needle=True
        )
        return body


class ChatTemplate:
    """A compiled template. Immutable; rendering has no effects."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Raises `ConfigError` where the source is no template."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid: {error.message} (line {error.lineno})",
                param="--chat-template",
            ) from error
        self._special_tokens = dict(special_tokens or {})

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the text that the model was trained on.

        Raises `InvalidRequest` where the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=[_as_mapping(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except _RENDER_ERRORS as error:
            reason = error.message if isinstance(error, jinja2.TemplateError) else str(error)
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from error


def _as_mapping(message: Message) -> dict[str, str]:
    mapping = {"role": message.role, "content": message.content}
    if message.name is not None:
        mapping["name"] = message.name
    if message.tool_call_id is not None:
        mapping["tool_call_id"] = message.tool_call_id
    return mapping


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which a model was not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def template_source(directory: Path, override: str | None) -> str | None:
    """The template's text: the override (a file, or the text itself), else the model's own.

    None where the model has none. Raises `ConfigError` for an override that is neither.
    """
    if override is not None:
        return _override_source(override)
    path = directory / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in CONFIG_FILES:
        value = (read_json(directory / name) or {}).get("chat_template")
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return _named_source(value, directory / name)
    return None


def _override_source(override: str) -> str:
    if "{%" in override or "{{" in override:
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {override!r} is neither a readable file nor a template "
            "(a template holds '{{' or '{%')",
            param="--chat-template",
        ) from error


def _named_source(entries: Sequence[object], path: Path) -> str:
    sources = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
    if DEFAULT_NAME not in sources:
        raise ModelError(
            f"{path} has several chat templates ({', '.join(sorted(sources)) or 'none usable'}) "
            f"and none is called {DEFAULT_NAME!r}; choose one with --chat-template FILE"
        )
    return sources[DEFAULT_NAME]
