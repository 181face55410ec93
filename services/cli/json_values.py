"""Options whose value is a JSON object: text on the command line, text or a mapping in YAML.

As in `services.cli.values`, a parser raises `ValueError` with what is wrong and where.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NoReturn

from services.cli.values import Raw, texts
from services.text import shown
from services.topology.additional_config import AdditionalConfig, read_additional_config
from services.topology.kv_transfer import KvTransferConfig, read_kv_transfer_config

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_RULE = 'must be a JSON object, like {"key": "value"}'


def additional_config(raw: Raw) -> AdditionalConfig:
    """`--additional-config`."""
    return read_additional_config(json_object(raw))


def kv_transfer_config(raw: Raw) -> KvTransferConfig | None:
    """`--kv-transfer-config`; None where it asks for nothing."""
    return read_kv_transfer_config(json_object(raw))


def origins(raw: Raw) -> tuple[str, ...]:
    """`--allowed-origins`: origins, or as vLLM has it one JSON list of them; * is all."""
    rule = "must be origins like https://chat.example (scheme, host, port), or *"
    found = texts(raw)
    if len(found) == 1 and found[0].startswith("["):
        try:
            found = texts(json.loads(found[0]))
        except json.JSONDecodeError:
            raise ValueError(rule) from None
    for origin in found:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(rule)
    return found


def json_object(raw: Raw) -> Mapping[str, object]:
    """The object. An empty text is none: it is what an unset variable of a shell leaves."""
    if isinstance(raw, Mapping):
        return _with_text_keys(raw)
    if not isinstance(raw, str):
        raise ValueError(_RULE)
    if not raw.strip():
        raise ValueError("is empty, which is not JSON; {} or no flag asks for nothing")
    try:
        content = json.loads(raw, object_pairs_hook=_once, parse_constant=_not_a_number)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(_RULE)
    return content


def _with_text_keys(content: Mapping[str, object]) -> Mapping[str, object]:
    for key in content:
        if not isinstance(key, str):
            raise ValueError(f"has the key {shown(repr(key))}; keys must be texts")
    return content


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content: dict[str, object] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"has the key {shown(key)} twice")
        content[key] = value
    return content


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, which is not JSON")
