"""From MODEL to its config.json, for what needs no weights. Downloads nothing, torch-free."""

from __future__ import annotations

from pathlib import Path

from services.errors import ModelError
from services.models.demo import DEMO_MODELS
from services.models.resolve import is_repository_id, resolve_model

CONFIG = "config.json"


def find_config(model: str) -> Path:
    """The config.json that `model` names: a directory, the file itself (of any name), a demo
    model, or a Hub repository id that is in the Hub's cache. Raises `ModelError`."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.resolve()
    if path.is_dir() or model in DEMO_MODELS or not is_repository_id(model):
        return resolve_model(model) / CONFIG
    return _cached(model)


def _cached(repository: str) -> Path:
    missing = f"{repository} is neither a local directory nor in the Hub's cache"
    remedy = f"fetch it with `hf download {repository} {CONFIG}`, or name the file"
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:
        raise ModelError(
            f"{repository} is no local directory, and the package huggingface-hub, which knows "
            f"the Hub's cache, is not installed; name a {CONFIG}"
        ) from None
    try:
        found = try_to_load_from_cache(repository, CONFIG)
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise ModelError(f"{missing}, and a plan downloads nothing; {remedy}")
    return Path(found)
