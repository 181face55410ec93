"""Bounded numbers of callers, shared out between their addresses.

Pure: knows calls by what ends them, and decides whose turn it is to go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """One who has a place."""

    group: str
    """With whom it is counted: the callers of one address."""
    give_up: Callable[[], None]
    """Called when another takes the place, which is not the holder's any more then."""
    since: float = 0.0
    """When it came, by a clock of whoever wants to know."""


class Room:
    """Places for those who are not supposed to stay.

    Who comes while it is full takes the place of who has been there longest, among the group
    that holds most with the one who comes: so whoever fills it from one address displaces
    himself, and nobody from another.
    """

    def __init__(self, places: int) -> None:
        """`places` is at least 1."""
        self._places = places
        self._holders: dict[Holder, None] = {}  # In the order in which they came.

    def __len__(self) -> int:
        return len(self._holders)

    def enter(self, holder: Holder) -> None:
        """Takes a place; may take another's."""
        if (displaced := self.next_to_go(holder.group)) is not None:
            del self._holders[displaced]
            displaced.give_up()
        self._holders[holder] = None

    def leave(self, holder: Holder) -> None:
        """Gives the place back, where it is still held."""
        self._holders.pop(holder, None)

    def next_to_go(self, newcomer: str) -> Holder | None:
        """Whose place one of this group would take now; None where there is a free one."""
        if len(self._holders) < self._places:
            return None
        held = Counter(one.group for one in self._holders)
        wanted = held + Counter((newcomer,))
        # A group of which nobody is here yet has no place to give.
        most = max(wanted[group] for group in held)
        return next(one for one in self._holders if wanted[one.group] == most)
