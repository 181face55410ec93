"""The environment as settings read it."""

from __future__ import annotations

import os

from services.config import API_KEY_VARIABLE


def take_environment() -> dict[str, str]:
    """The process's variables, of which the keys are dropped: what is started from here on
    (workers, ranks, a Ray cluster) inherits the rest, and needs no key."""
    environment = dict(os.environ)
    os.environ.pop(API_KEY_VARIABLE, None)
    return environment
