"""Reads the YAML of a settings file: plain data, each key once, of bounded depth and size."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from services.text import shown

MAX_DEPTH = 20
MAX_NODES = 10_000


class _Refused(ValueError):
    """It is YAML, and more than a settings file may hold."""


class _Loader(yaml.SafeLoader):
    """The safe loader, which refuses a key that stands twice instead of taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Raises `ValueError` with key and line."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise _Refused(
                    f"has the key {shown(key.value)} twice, again at line "
                    f"{key.start_mark.line + 1}; leave one out"
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> object:
    """The content of the one document; None where there is none.

    Raises `ValueError` that says what is wrong and at which line: no YAML, a key twice, an
    anchor or alias, more than `MAX_DEPTH` levels or `MAX_NODES` values.
    """
    try:
        _check_events(text)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"is not valid YAML: {reason}") from None
    except _Refused:
        raise
    except ValueError as error:  # of a date that is none, or a number of thousands of digits
        raise ValueError(f"has a value that cannot be read: {error}") from None


def _check_events(text: str) -> None:
    """Before anything is built of them: aliases make much of little, and building recurses."""
    depth = nodes = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        mark = event.start_mark
        line = 0 if mark is None else mark.line + 1
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            if event.anchor is not None:
                raise _Refused(
                    f"has the anchor or alias {shown(event.anchor)} at line {line}; write the "
                    "value out"
                )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise _Refused(f"is nested more than {MAX_DEPTH} levels deep at line {line}")
        if nodes > MAX_NODES:
            raise _Refused(f"has more than {MAX_NODES} values, at line {line}")
