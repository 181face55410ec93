"""Small files of a system, which may be missing."""

from __future__ import annotations

from pathlib import Path

_MAX_TEXT_BYTES = 65_536


def read_text(path: Path) -> str:
    """The file's beginning as text; empty where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
