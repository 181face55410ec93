"""What steps cost on simulated devices: the file behind `--sim-cost`.

    {"every_stage": {"fixed_seconds": 0.02, "per_token_seconds": 1e-5},
     "stages": {"0": {"fixed_seconds": 0.05}}}

`stages` changes single numbers for single stages, by PP rank. What is not named
costs nothing. See docs/simulated-device.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from services.errors import ConfigError
from services.topology.jsonfile import parse_json_object
from stagemesh.v1 import stage_worker_pb2

SIM_COST_FLAG = "--sim-cost"
MAX_FILE_BYTES = 1 << 20
MAX_SECONDS = 30.0
"""Of any one number. A step above the ranks' step time-out (60 s) would be taken for hung."""
_EVERY_STAGE = "every_stage"
_STAGES = "stages"


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one step costs on one stage."""

    fixed_seconds: float = 0.0
    """For every step that has query tokens."""
    per_token_seconds: float = 0.0
    """For each query token."""
    per_context_token_seconds: float = 0.0
    """For each token of the sequences in the step, those of this step included."""

    def to_proto(self) -> stage_worker_pb2.SimulatedCost:
        """As the stage gets it."""
        return stage_worker_pb2.SimulatedCost(
            fixed_seconds=self.fixed_seconds,
            per_token_seconds=self.per_token_seconds,
            per_context_token_seconds=self.per_context_token_seconds,
        )


_NAMES = tuple(field.name for field in fields(StageCost))


def read_stage_costs(path: Path, pp_size: int) -> tuple[StageCost, ...]:
    """One cost for each stage, by PP rank. Raises `ConfigError` that names file and field."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise _wrong(f"{path} is larger than {MAX_FILE_BYTES} bytes; a cost file is a few lines")
    return parse_stage_costs(parse_json_object(data, f"{SIM_COST_FLAG} {path}"), path, pp_size)


def parse_stage_costs(
    content: dict[str, object], path: Path, pp_size: int
) -> tuple[StageCost, ...]:
    """See `read_stage_costs`."""
    for key in content:
        if key not in (_EVERY_STAGE, _STAGES):
            raise _wrong(f'{path}: unknown key "{key}"; known: {_EVERY_STAGE}, {_STAGES}')
    common = _cost(content.get(_EVERY_STAGE, {}), StageCost(), f"{path}: {_EVERY_STAGE}")
    costs = [common] * pp_size
    stages = content.get(_STAGES, {})
    if not isinstance(stages, dict):
        raise _wrong(f'{path}: {_STAGES} must be an object like {{"0": {{...}}}}, by PP rank')
    for key, value in stages.items():
        if key not in map(str, range(pp_size)):
            raise _wrong(
                f'{path}: {_STAGES} has "{key}", and this mesh has the stages 0 to {pp_size - 1}'
            )
        costs[int(key)] = _cost(value, common, f"{path}: {_STAGES}.{key}")
    return tuple(costs)


def _cost(value: object, base: StageCost, where: str) -> StageCost:
    """`base` with the numbers that `value` names."""
    if not isinstance(value, dict):
        raise _wrong(f"{where} must be an object with {', '.join(_NAMES)}")
    for name, seconds in value.items():
        if name not in _NAMES:
            raise _wrong(f'{where} has unknown "{name}"; known: {", ".join(_NAMES)}')
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not math.isfinite(seconds) or not 0 <= seconds <= MAX_SECONDS:
            raise _wrong(
                f"{where}.{name} must be a number of seconds from 0 to {MAX_SECONDS:.0f}, "
                f"got {seconds!r}"
            )
    return replace(base, **{name: float(seconds) for name, seconds in value.items()})


def _wrong(message: str) -> ConfigError:
    return ConfigError(
        message if message.startswith(SIM_COST_FLAG) else f"{SIM_COST_FLAG} {message}",
        param=SIM_COST_FLAG,
    )
