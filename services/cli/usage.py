"""How the command line says that it was called wrongly."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from services.errors import UsageError as UsageError


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ ", did you mean X?" where something known is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f", did you mean {close[0]}?" if close else ""
