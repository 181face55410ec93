"""What others wrote, as one line of a message can hold it."""

from __future__ import annotations

MAX_SHOWN_CHARACTERS = 80


def shown(text: str) -> str:
    """Cut where it is long, with control characters visible: "a\\nb"."""
    cut = text[:MAX_SHOWN_CHARACTERS]
    return visible(cut) if cut == text else f"{visible(cut)}..."


def visible(text: str) -> str:
    """The whole text, with control characters as escapes that do nothing to a terminal."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )
