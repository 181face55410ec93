"""From MODEL, as a user writes it, to a directory on this machine.

In this order: an existing directory, a demo model's name, a Hub repository id
(from the Hub's cache; downloaded where it is not there and the Hub can be
reached). Torch-free; huggingface_hub is imported only for a repository id.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.errors import ModelError
from services.models.cache import is_complete, models_directory
from services.models.demo import DEMO_MODELS

# owner/name or name, as the Hub allows it.
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class HubFiles:
    """Which files of a repository are wanted, and which of them show that it is there."""

    patterns: tuple[str, ...]
    ignored: tuple[str, ...]
    needed: tuple[str, ...]
    """Each must match a file that is not ignored."""

    def are_in(self, directory: Path) -> bool:
        """Whether the directory has what is needed."""
        return all(
            any(
                not any(path.match(pattern) for pattern in self.ignored)
                for path in directory.glob(wanted)
            )
            for wanted in self.needed
        )


# No other format of the weights, no second copy of them (consolidated.safetensors), no images.
MODEL_FILES = HubFiles(
    patterns=("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"),
    ignored=("consolidated*.safetensors",),
    needed=("config.json", "*.safetensors"),
)
# No weights at all: they may be hundreds of gigabytes.
TOKENIZER_FILES = HubFiles(
    patterns=("tokenizer*.json", "special_tokens_map.json", "chat_template.json", "*.jinja"),
    ignored=(),
    needed=("tokenizer.json",),
)


def resolve_model(model: str) -> Path:
    """The directory that holds config.json, weights and tokenizer of `model`.

    Raises `ModelError` that says what was looked for and what to do.
    """
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(
            f"{path} holds no config.json; name a Hugging Face model directory "
            f"(config.json, *.safetensors, tokenizer.json)"
        )
    return _resolve(model, MODEL_FILES)


def resolve_tokenizer(tokenizer: str) -> Path:
    """The directory that holds tokenizer.json, for `--tokenizer`: a directory, which needs no
    config.json, a demo model's name, or a Hub repository id, of which the tokenizer's files
    alone are downloaded. Raises `ModelError`."""
    return _resolve(tokenizer, TOKENIZER_FILES)


def _resolve(model: str, files: HubFiles) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelError(f"{path} is a file; name the Hugging Face model directory")
    if model in DEMO_MODELS:
        return _demo_model(model)
    if not is_repository_id(model):
        raise ModelError(
            f"there is no directory {model}; name a local Hugging Face directory, "
            f"{', '.join(DEMO_MODELS)}, or a Hub repository id like owner/name"
        )
    return _hub_snapshot(model, files)


def is_repository_id(model: str) -> bool:
    """Whether the text can be a Hub repository id, and no path."""
    return not _is_path(model) and _REPOSITORY.fullmatch(model) is not None


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") > 1


def _demo_model(name: str) -> Path:
    directory = models_directory() / name
    if not is_complete(directory):
        raise ModelError(f"{name} is not fetched yet; run: stagemesh model fetch {name}")
    return directory


def _hub_snapshot(repository: str, files: HubFiles) -> Path:
    """The repository's snapshot in the Hub's cache, downloaded where it is missing."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ModuleNotFoundError:
        raise ModelError(
            f"{repository} is no local directory, and the package huggingface-hub, which gets it "
            f"from the Hub, is not installed; pip install 'stagemesh[gateway]'"
        ) from None
    download = partial(
        snapshot_download,
        repository,
        allow_patterns=list(files.patterns),
        ignore_patterns=list(files.ignored),
    )
    try:
        cached = Path(download(local_files_only=True))
        if files.are_in(cached):
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    missing = f"{repository} is neither a local directory nor in the Hub's cache"
    if _offline():
        raise ModelError(
            f"{missing}, and HF_HUB_OFFLINE forbids to download it; unset it, "
            f"or copy the model here and name its directory"
        )
    try:
        return Path(download())
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no"
        raise ModelError(
            f"{missing}, and the Hub refuses it (HTTP status {status}); check the name and your "
            f"HF_TOKEN, or copy the model here and name its directory"
        ) from error
    except (OSError, HFValidationError) as error:
        raise ModelError(
            f"{missing}, and the Hub cannot be reached; check name and network, "
            f"or copy the model here and name its directory"
        ) from error


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
