"""What a Stagemesh endpoint says of itself: its stages and their clocks. Pure.

Of an endpoint that is no Stagemesh, there is nothing to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.topology.plan import idle_share
from services.topology.recommend import TOLERATED_IDLE_SHARE

_STAGE_SECONDS = re.compile(r"^stagemesh_stage_seconds_total\{([^}]*)\} (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

StageSeconds = Mapping[tuple[str, str], float]
"""(stage, phase) to seconds since the mesh began."""


@dataclass(frozen=True, slots=True)
class MeshSize:
    """Sizes of a mesh."""

    pp_size: int
    tp_size: int
    dp_size: int


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """A mesh under the load of a run."""

    size: MeshSize
    concurrency: float
    """Requests at a time and replica: as asked for, or as it came out (mean)."""
    expected_bubble: float
    """(P - 1) / (M + P - 1) with M = concurrency."""
    advice: str | None
    """Whether TP would use the same devices better; None without a pipeline."""
    phase_shares: Mapping[str, Mapping[str, float]]
    """Stage to phase to its share of that stage's time during the run; empty where the
    endpoint exports no clocks."""


def read_mesh(view: Any) -> MeshSize | None:
    """From the JSON of `/v1/mesh`; None where it is not that."""
    try:
        stages = view["stages"]
        ranks = {int(stage["pp_rank"]) for stage in stages}
        replicas = {int(stage.get("dp_rank", 0)) for stage in stages}
        tp_size = max(int(stage.get("tp_size", 1)) for stage in stages)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    return MeshSize(len(ranks), tp_size, len(replicas))


def read_stage_seconds(metrics: str | None) -> StageSeconds:
    """From the text of `/metrics`, replicas together; empty where it has no clocks."""
    seconds: dict[tuple[str, str], float] = {}
    for text, value in _STAGE_SECONDS.findall(metrics or ""):
        labels = dict(_LABEL.findall(text))
        key = labels.get("stage", ""), labels.get("phase", "")
        seconds[key] = seconds.get(key, 0.0) + float(value)
    return seconds


def phase_shares(before: StageSeconds, after: StageSeconds) -> dict[str, dict[str, float]]:
    """Stage to phase to its share of what the stage's clock counted in between."""
    shares: dict[str, dict[str, float]] = {}
    for (stage, phase), value in after.items():
        shares.setdefault(stage, {})[phase] = value - before.get((stage, phase), 0.0)
    for phases in shares.values():
        total = sum(phases.values())
        for phase in phases:
            phases[phase] = phases[phase] / total if total > 0 else 0.0
    return shares


def pipeline_report(
    size: MeshSize, concurrency: float, before: StageSeconds, after: StageSeconds
) -> PipelineReport:
    """Puts a run's load against the mesh. `concurrency` is over all replicas."""
    per_replica = concurrency / size.dp_size
    bubble = idle_share(size.pp_size, max(1.0, per_replica))
    return PipelineReport(
        size=size,
        concurrency=per_replica,
        expected_bubble=bubble,
        advice=_advice(size, per_replica, bubble),
        phase_shares=phase_shares(before, after),
    )


def _advice(size: MeshSize, concurrency: float, bubble: float) -> str | None:
    if size.pp_size == 1:
        return None
    if bubble <= TOLERATED_IDLE_SHARE:
        return f"PP {size.pp_size} is well filled with {concurrency:.3g} requests at a time"
    tp_size = size.tp_size * size.pp_size
    return (
        f"TP {tp_size} on the same devices is the better choice at {concurrency:.3g} requests at a "
        f"time, where the model's heads divide by {tp_size} and the links are fast: a pipeline "
        "makes no single request faster (stagemesh plan says what the model allows)"
    )
