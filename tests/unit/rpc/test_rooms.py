"""Who has to go when a room is full."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rpc.peers import endpoint_of, group_of
from services.rpc.rooms import Holder, Room

PLACES = 5
COMING_AND_GOING = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, PLACES - 1)), max_size=60
)


@given(COMING_AND_GOING)
def test_nobody_is_displaced_by_a_group_that_holds_more(
    events: list[tuple[str, bool, int]],
) -> None:
    room = Room(PLACES)
    inside: list[Holder] = []
    displaced: list[str] = []

    for group, comes, index in events:
        if not comes:
            if index < len(inside):
                room.leave(inside.pop(index))
            continue
        holder = Holder(group, lambda group=group: displaced.append(group))
        held = Counter(one.group for one in inside)
        gone_before = len(displaced)
        room.enter(holder)
        if len(inside) < PLACES:
            assert len(displaced) == gone_before
        else:
            (victim,) = displaced[gone_before:]
            assert held[victim] >= held[group] or victim == group
            # Of a group, who has been there longest.
            inside.remove(next(one for one in inside if one.group == victim))
        inside.append(holder)
        assert len(room) == len(inside) <= PLACES


def test_who_was_displaced_leaves_no_second_time() -> None:
    room = Room(1)
    first, second = (Holder("a", lambda: None) for _ in range(2))
    room.enter(first)
    room.enter(second)
    room.leave(first)
    assert len(room) == 1
    room.leave(second)
    assert len(room) == 0


@pytest.mark.parametrize(
    ("peer", "group", "endpoint"),
    [
        ("ipv4:10.0.0.1:4711", "10.0.0.1", ("10.0.0.1", 4711)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:4711", "10.0.0.1", ("10.0.0.1", 4711)),
        ("ipv6:[::1]:80", "::/64", ("::1", 80)),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", "fe80::/64", ("fe80::1", 80)),
        ("ipv6:[2001:db8:1:2:3::4]:80", "2001:db8:1:2::/64", ("2001:db8:1:2:3::4", 80)),
        ("unix:/run/x.sock", "unix", None),
        ("", "", None),
    ],
)
def test_a_peer_is_counted_with_its_address(
    peer: str, group: str, endpoint: tuple[str, int] | None
) -> None:
    assert group_of(peer) == group
    assert endpoint_of(peer) == endpoint
