"""Reading a JSON object from a model directory, with bounds and errors that help."""

from __future__ import annotations

import json
from pathlib import Path

from services.errors import ModelError

# The largest index files of public checkpoints (some hundred thousand tensors) stay below 50 MB.
MAX_JSON_BYTES = 100_000_000


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, object]:
    """Reads the file and returns its top-level object.

    Raises `ModelError`, naming the file, where it is missing, unreadable, over
    `max_bytes`, not JSON or not an object.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelError(f"{path} is {size} bytes; more than {max_bytes} is not believed")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(
            f"{path} does not exist; the model directory is incomplete, download it again"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, name: str) -> dict[str, object]:
    """Parses UTF-8 JSON that must be an object; raises `ModelError` naming `name`."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{name} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except (ValueError, RecursionError):
        # An integer of thousands of digits, or nesting without end.
        raise ModelError(f"{name} is not a JSON file that can be read") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name} must hold a JSON object, not {type(value).__name__}")
    return value
