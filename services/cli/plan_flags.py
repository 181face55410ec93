"""The flags of `plan`, as data: those of `serve` that decide about memory, and the devices."""

from __future__ import annotations

from dataclasses import dataclass

from services.cli import values
from services.cli.flag import Arity, Flag, FlagGroup
from services.cli.flags import SERVE_GROUPS, all_flags
from services.topology.plan_result import PlanSettings


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One call of `plan`."""

    model: str
    json: bool
    settings: PlanSettings


def _of_serve(*names: str) -> tuple[Flag, ...]:
    """The same flags, spelled and read as `serve` does."""
    by_name = {flag.names[0]: flag for flag in all_flags(SERVE_GROUPS)}
    return tuple(by_name[name] for name in names)


PLAN_GROUPS = (
    FlagGroup(
        "layout",
        (
            *_of_serve(
                "--tensor-parallel-size",
                "--pipeline-parallel-size",
                "--pp-layer-partition",
                "--data-parallel-size",
            ),
        ),
    ),
    FlagGroup(
        "devices",
        (
            *_of_serve("--nnodes"),
            Flag(
                ("--devices-per-node",),
                values.positive_integer,
                "devices in each node; default: as many as the layout takes",
            ),
            Flag(
                ("--device-memory-bytes",),
                values.size,
                "memory of one device, plain or like 64G; without it nothing is said about fit",
                metavar="SIZE",
            ),
            *_of_serve("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--device"),
        ),
    ),
    FlagGroup(
        "model and load",
        (
            *_of_serve(
                "--dtype",
                "--max-model-len",
                "--block-size",
                "--max-num-seqs",
                "--max-num-batched-tokens",
            ),
            Flag(
                ("--concurrency",),
                values.positive_integer,
                "requests at a time, for the pipeline's bubble",
            ),
        ),
    ),
    FlagGroup(
        "what vLLM Ascend combines (docs/compatibility.md)",
        _of_serve(
            "--prefill-context-parallel-size",
            "--additional-config",
            "--kv-transfer-config",
            "--interconnect",
        ),
    ),
    FlagGroup(
        "output",
        (Flag(("--json",), values.switch, "print the plan as JSON", arity=Arity.SWITCH),),
    ),
)
