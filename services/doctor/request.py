"""What `stagemesh doctor` is asked. Light: the command line makes one before it imports more."""

from __future__ import annotations

from dataclasses import dataclass

from services.config import ServeConfig
from services.errors import UsageError

DEFAULT_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """The command line of `serve`, and how to look at it."""

    config: ServeConfig
    """`config.model` is empty where no model was named."""
    problems: tuple[UsageError, ...]
    """Flags that cannot be used or not together; `config` has defaults in their place."""
    asks_head: bool = False
    """Whether a head is named, or needed: then it is asked what it knows."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """For each question over the network."""
    json: bool = False
    deep: bool = False
    """Hashes all weights, and compares them with the head's."""
    listen: bool = False
    """Answers other doctors afterwards, in the place of a head."""
