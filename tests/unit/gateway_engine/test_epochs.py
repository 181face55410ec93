"""Epochs never come twice, whatever gateways there have been."""

from __future__ import annotations

from itertools import islice

from gateway.recovery import epochs_above


def test_a_new_mesh_begins_with_the_first() -> None:
    assert list(islice(epochs_above(lambda: 0), 3)) == [1, 2, 3]


def test_what_workers_have_been_in_is_left_behind() -> None:
    last = iter([7, 7, 7, 20])
    assert list(islice(epochs_above(lambda: next(last)), 4)) == [8, 9, 10, 21]
