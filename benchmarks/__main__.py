"""`python -m benchmarks [NAME] ...`: runs one benchmark; without a name, all of them."""

from __future__ import annotations

import sys

from benchmarks import (
    async_scheduling,
    compare,
    cpu_linear,
    front_door,
    gateway_step,
    long_prompt,
    pipeline_fullness,
    recovery,
    stage_step,
    start_up,
)

BENCHMARKS = {
    "start-up": start_up.main,
    "recovery": recovery.main,
    "gateway-step": gateway_step.main,
    "front-door": front_door.main,
    "long-prompt": long_prompt.main,
    "async-scheduling": async_scheduling.main,
    "pipeline-fullness": pipeline_fullness.main,
    "cpu-linear": cpu_linear.main,
    "stage-step": stage_step.main,
    "compare": compare.main,
}


def main() -> int:
    """Runs what the command line names."""
    names = sys.argv[1:] or list(BENCHMARKS)
    for name in names:
        if name not in BENCHMARKS:
            print(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
            return 2
    for name in names:
        print(f"== {name}", flush=True)
        BENCHMARKS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
