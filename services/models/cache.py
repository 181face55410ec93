"""Where fetched models lie, and when one is complete.

    ${STAGEMESH_HOME:-~/.cache/stagemesh}/models/NAME/
        config.json, model.safetensors, tokenizer.json, ...
        .stagemesh-complete     written last: names and sizes of the files

A directory without the marker, or whose files differ from it in size, does
not count: it is fetched again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from services.errors import ModelError

HOME_VARIABLE = "STAGEMESH_HOME"
MARKER = ".stagemesh-complete"


def stagemesh_home() -> Path:
    """The directory for what Stagemesh keeps on this machine."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    try:
        return Path.home() / ".cache" / "stagemesh"
    except RuntimeError:
        raise ModelError(f"this user has no home directory; set {HOME_VARIABLE}") from None


def models_directory() -> Path:
    """The parent of all fetched models; may not exist yet."""
    return stagemesh_home() / "models"


def write_marker(directory: Path, source: str) -> None:
    """Declares `directory` complete. `source` says where its content came from."""
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    marker = directory / MARKER
    with marker.open("w", encoding="utf-8") as file:
        json.dump({"source": source, "sizes": sizes}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def is_complete(directory: Path) -> bool:
    """Whether the marker is there and every file has the size that it names."""
    try:
        marker = json.loads((directory / MARKER).read_text("utf-8"))
        sizes: dict[str, int] = marker["sizes"]
        return bool(sizes) and all(
            (directory / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
