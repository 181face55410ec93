"""The command line between a stage worker and the rank processes that it starts. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

STEP_TIMEOUT_SECONDS = 60.0
"""Above any step's own time: a rank or neighbour stuck for longer is taken for hung. The one
such number; a rank is given it as `RankArguments.step_timeout_seconds`."""
NO_STAGE = -1
"""PP rank of what has no place in the mesh."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands in the mesh."""

    pp_rank: int
    tp_rank: int

    @property
    def stage(self) -> int:
        """The stage for messages, which know none below 0."""
        return max(0, self.pp_rank)


def process_name(place: RankPlace) -> str:
    """What the log lines of a rank's process begin with."""
    stage = "spare" if place.pp_rank == NO_STAGE else f"stage-{place.pp_rank}"
    return f"{stage}/rank-{place.tp_rank}"


@dataclass(frozen=True, slots=True)
class RankArguments:
    """What a rank knows before its first command; the rest comes over the socket."""

    fd: int
    """Its end of the socket pair."""
    parent_pid: int
    host: str
    """Address on which it may listen for its neighbours."""
    device: str
    device_index: int
    num_threads: int
    pp_rank: int
    """`NO_STAGE` for a rank of a spare worker, until it is told."""
    tp_rank: int
    step_timeout_seconds: float
    """Of every wait for another rank inside a step."""

    @property
    def place(self) -> RankPlace:
        """Where the rank stands when it starts."""
        return RankPlace(self.pp_rank, self.tp_rank)

    def at(self, place: RankPlace) -> RankArguments:
        """The same rank elsewhere in the mesh."""
        return replace(self, pp_rank=place.pp_rank, tp_rank=place.tp_rank)

    def to_argv(self) -> list[str]:
        """Flags that `parse` turns back into this."""
        argv: list[str] = []
        for field in fields(self):
            argv += [f"--{field.name.replace('_', '-')}", str(getattr(self, field.name))]
        return argv

    @classmethod
    def parse(cls, argv: Sequence[str]) -> RankArguments:
        """Reads what `to_argv` wrote; exits with a usage error on anything else."""
        parser = argparse.ArgumentParser(prog="python -m stage_worker.rank_main")
        kinds = {"int": int, "float": float, "str": str}
        for field in fields(cls):
            flag = f"--{field.name.replace('_', '-')}"
            parser.add_argument(flag, type=kinds[str(field.type)], required=True)
        return cls(**vars(parser.parse_args(argv)))
