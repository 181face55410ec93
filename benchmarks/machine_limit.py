"""What the machine's arithmetic and memory allow, by formula.

    prompts    N * P * 2 * W / G                      seconds
    a step     max(N * 2 * (W + H) / G, 4 * (W + H) / B)
    limit      N * O / (prompts + O * step)           output tokens per second

N requests of P prompt and O output tokens; W weights of the layers, H of the LM head, fp32; G and B
measured: operations per second of large fp32 matrix products and bytes per second read, on all
cores. Attention, norms and everything else count as nothing, so no system reaches it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

FLOAT32_BYTES = 4
_PROGRAM = """
import sys, time, torch
n, seconds = 1536, 0.4
a, b = torch.randn(n, n), torch.randn(n, n)
big = torch.randn(64 << 20)
print("ready", flush=True)
def best(action, amount):
    action()
    found, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        action()
        found = max(found, amount / (time.perf_counter() - started))
    return found
for line in sys.stdin:
    print(best(lambda: a @ b, 2.0 * n ** 3), best(lambda: big.sum(), 4.0 * big.numel()), flush=True)
"""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Of all cores together."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Weights that a token is multiplied with; the embedding is only looked up."""

    layers: int
    head: int


def limit_tokens_per_second(
    weights: ModelWeights,
    rates: MachineRates,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
) -> float:
    """Output tokens per second that nothing on this machine exceeds. See the module."""
    everything = weights.layers + weights.head
    prompts = num_requests * prompt_tokens * 2 * weights.layers / rates.flops_per_second
    step = max(
        num_requests * 2 * everything / rates.flops_per_second,
        FLOAT32_BYTES * everything / rates.bytes_per_second,
    )
    return num_requests * output_tokens / (prompts + output_tokens * step)


class MachineMeter:
    """Measures the rates, in a process of its own, when asked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())},
        )
        self._line()

    def measure(self) -> MachineRates:
        """Takes about a second."""
        if self._process.stdin is None:
            raise RuntimeError("the measuring process has no pipe")
        print("go", file=self._process.stdin, flush=True)
        flops, read = map(float, self._line().split())
        return MachineRates(flops, read)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        if self._process.stdout is None:
            raise RuntimeError("the measuring process has no pipe")
        return self._process.stdout.readline()
