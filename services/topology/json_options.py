"""Reads the JSON objects that options hold: every key known, every value of its kind.

Problems are `ValueError`s that say where (`kv_connector_extra_config.decode`) and what is
allowed; whoever reads the option adds its name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from services.ranges import MAX_COUNT, MAX_PORT
from services.text import shown

_MAX_KEYS = 1000


class Options:
    """One JSON object, read key by key."""

    def __init__(
        self, content: Mapping[str, object], known: Iterable[str] | None, where: str = ""
    ) -> None:
        """Raises `ValueError` for a key that is not in `known`; None knows all of them."""
        self._content, self.where = content, where
        names = tuple(content if known is None else known)
        for key in list(content)[:_MAX_KEYS]:
            if key not in names:
                raise ValueError(
                    f"has the unknown key {self._path(shown(key))}{_close(key, names)}; "
                    f"known keys: {', '.join(names)}"
                )

    def absent(self, key: str) -> bool:
        """Whether the key is not there, or null."""
        return self._content.get(key) is None

    def text(self, key: str) -> str:
        """A text that is not empty."""
        value = self._content.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(key, "a text that is not empty")
        return value.strip()

    def boolean(self, key: str, *, default: bool) -> bool:
        """true or false, and nothing that only looks like it."""
        value = self._content.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def count(self, key: str, *, default: int) -> int:
        """A whole number of at least 1."""
        value = self._content.get(key, default)
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            raise self._wrong(key, f"a whole number from 1 to {MAX_COUNT}")
        return value

    def port(self, key: str) -> int:
        """A TCP port; vLLM's own examples write it as a text."""
        value = self._content.get(key)
        rule = f"a port from 1 to {MAX_PORT}"
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value[:8])
        if type(value) is not int or not 1 <= value <= MAX_PORT:
            raise self._wrong(key, rule)
        return value

    def section(self, key: str, known: Iterable[str] | None) -> Options:
        """The object under a key; empty where the key is absent."""
        value = self._content.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Options(value, known, self._path(key))

    def objects(self, key: str) -> tuple[Mapping[str, object], ...]:
        """A list of objects; empty where the key is absent."""
        value = self._content.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self._wrong(key, "a list of objects")
        return tuple(value)

    def _wrong(self, key: str, rule: str) -> ValueError:
        value = shown(repr(self._content.get(key)))
        return ValueError(f"has {self._path(key)} = {value}, which must be {rule}")

    def _path(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key


def _close(key: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""
