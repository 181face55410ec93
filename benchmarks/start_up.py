"""How long `stagemesh serve` takes until it is ready, with a warm model cache.

Expected on two cores: 2 s for the gateway and workers, 4 s to import torch twice,
1 s to load; the limit is 20 s.
"""

from __future__ import annotations

from benchmarks.served import DEMO_MODEL, served

RUNS = 3
LIMIT_SECONDS = 20.0


def main() -> None:
    """Prints each run and the worst."""
    seconds = []
    for run in range(RUNS):
        with served(DEMO_MODEL, "-pp", "2") as mesh:
            seconds.append(mesh.ready_seconds)
            print(f"run {run + 1}: ready after {mesh.ready_seconds:.1f} s", flush=True)
    print(f"worst {max(seconds):.1f} s; limit {LIMIT_SECONDS:.0f} s")
