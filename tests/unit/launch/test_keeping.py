"""A worker's place is filled again as long as it makes sense."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.launch.keeping import keep
from services.launch.launcher import WorkerExit
from services.launch.restarts import RestartLimits


class Worker:
    """Ends at once, each time with the next code."""

    def __init__(self, codes: Sequence[int], fails_to_start: bool = False) -> None:
        self.codes = list(codes)
        self.starts = 1
        self.fails_to_start = fails_to_start

    async def ended(self) -> WorkerExit:
        code = self.codes.pop(0)
        return WorkerExit(None, 0, f"exited with {code}", code=code)

    async def start(self) -> None:
        if self.fails_to_start:
            raise OSError("no memory")
        self.starts += 1


def goes_on(end: WorkerExit) -> bool:
    return not end.dismissed


@pytest.mark.parametrize(
    ("worker", "most", "how", "starts"),
    [
        (Worker([0]), 10, "exited with 0", 1),
        (Worker([1, 0]), 10, "exited with 0", 2),
        (Worker([1, 7]), 1, "exited with 7, after 1 restarts within 60 s", 2),
        (
            Worker([1], fails_to_start=True),
            10,
            "exited with 1, and no other could be started (no memory)",
            1,
        ),
    ],
    ids=["dismissed", "restarted", "too often", "no other"],
)
async def test_the_end_after_which_there_is_no_other(
    worker: Worker, most: int, how: str, starts: int
) -> None:
    end = await keep(worker.ended, worker.start, goes_on, RestartLimits(most, 60.0))
    assert (end.how, worker.starts) == (how, starts)
