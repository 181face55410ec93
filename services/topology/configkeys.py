"""Typed reading of a config.json's keys, with errors that name file and key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from services.errors import ModelError


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """A JSON object and where it stands. A key that is null counts as absent."""

    file: Path
    values: dict[str, object]
    prefix: str = ""
    """Name of the enclosing section and a dot, for messages."""

    def error(self, key: str, problem: str) -> ModelError:
        """The error to raise; `problem` follows on the key's name."""
        return ModelError(f"{self.file}: {self.prefix}{key} {problem}")

    def get(self, key: str) -> object:
        """The raw value; None where the key is missing."""
        return self.values.get(key)

    def present(self, key: str) -> bool:
        """Whether the key is written, null included."""
        return key in self.values

    def absent(self, key: str) -> bool:
        """Whether the key is missing or null."""
        return self.values.get(key) is None

    def only_scalars(self) -> bool:
        """Whether no value is itself an object."""
        return not any(isinstance(value, dict) for value in self.values.values())

    def section(self, key: str) -> ConfigKeys:
        """The object under `key`; empty where it is absent."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {type(value).__name__}")
        return ConfigKeys(self.file, value, f"{self.prefix}{key}.")

    def integer(self, key: str, *, maximum: int) -> int:
        """A required integer from 1 to `maximum`."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, not {type(value).__name__}")
        if not 1 <= value <= maximum:
            raise self.error(key, f"is {_shown(value)}; it must be between 1 and {maximum}")
        return value

    def number(self, key: str, *, above: float, default: float | None = None) -> float:
        """A finite number above `above`; required unless there is a default."""
        if self.absent(key) and default is not None:
            return default
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"must be a number, not {type(value).__name__}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= above:
            raise self.error(key, f"is {_shown(value)}; it must be a finite number above {above}")
        return number

    def boolean(self, key: str, *, default: bool) -> bool:
        """true or false; `default` where the key is absent."""
        if self.absent(key):
            return default
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {type(value).__name__}")
        return value

    def text(self, key: str, *, default: str) -> str:
        """A string; `default` where the key is absent."""
        if self.absent(key):
            return default
        value = self.values[key]
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {type(value).__name__}")
        return value

    def _required(self, key: str) -> object:
        value = self.values.get(key)
        if value is None:
            raise self.error(key, "is missing")
        return value


def _shown(value: object) -> str:
    """A value for a message; a number of thousands of digits is cut."""
    return f"{value:.6g}" if isinstance(value, float) else f"{value}"[:40]
