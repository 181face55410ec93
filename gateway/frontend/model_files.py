"""Reads the small JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path

from services.errors import ModelError


def read_json(path: Path) -> dict[str, object] | None:
    """The object in a file, None where there is no such file.

    Raises `ModelError` naming the file where it cannot be read or is no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__} where an object belongs")
    return value
