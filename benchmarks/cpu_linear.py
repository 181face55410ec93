"""One matrix product on one core: the compiled kernel against `F.linear` and oneDNN's packed
weight, in turns, on the shapes of SmolLM2-135M (fp32).

Expected: up to 4 rows the weight's way from memory is all of it (about 11 GB/s on one core), from
16 rows on the arithmetic (50-60 GFLOP/s); torch's two reach a quarter to a half of that below 32.
So 2 to 3 times at 4 and 8 rows, and no loss at 128.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
"""Output and input features: QKV, attention output, gate and up, down, LM head."""
ROWS = (1, 4, 8, 16, 32, 128)
ROUNDS = 7
COLD_BYTES = 64e6
"""Weights that pass by between two uses of one, so that none comes from a cache."""


def main() -> None:
    """Prints milliseconds and ratios; the geometric mean over the shapes last."""
    import torch
    import torch.nn.functional as F

    from stage_worker.kernels.native import NativeOperators
    from stage_worker.layers.linear import PackedLinear
    from stage_worker.layers.operators import TorchOperators

    torch.set_num_threads(1)
    native = NativeOperators(1, TorchOperators())
    ratios: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for out, size in SHAPES:
        weights = [
            torch.randn(out, size) for _ in range(max(1, int(COLD_BYTES / (4 * out * size))))
        ]
        kernels = [native.linear(weight, None) for weight in weights]
        packed = [PackedLinear(weight, None) for weight in weights]
        for rows in ROWS:
            x = torch.randn(rows, size)
            with torch.inference_mode():
                ours, plain, onednn = _in_turns(
                    lambda x=x, kernels=kernels: [kernel(x) for kernel in kernels],
                    lambda x=x, weights=weights: [F.linear(x, weight) for weight in weights],
                    lambda x=x, packed=packed: [linear(x) for linear in packed],
                )
            ratios[rows].append(min(plain, onednn) / ours)
            milliseconds = [1e3 * seconds / len(weights) for seconds in (ours, plain, onednn)]
            print(
                f"{size:5} -> {out:5}, {rows:3} rows: kernel {milliseconds[0]:.3f} ms, F.linear "
                f"{milliseconds[1]:.3f} ms, oneDNN packed {milliseconds[2]:.3f} ms; "
                f"ratio to the better {ratios[rows][-1]:.2f}",
                flush=True,
            )
    for rows in ROWS:
        print(f"{rows:3} rows: {statistics.geometric_mean(ratios[rows]):.2f} times as fast")


def _in_turns(*actions: Callable[[], object]) -> list[float]:
    """Least seconds of each."""
    best = [float("inf")] * len(actions)
    for _ in range(ROUNDS):
        for index, action in enumerate(actions):
            started = time.perf_counter()
            action()
            best[index] = min(best[index], time.perf_counter() - started)
    return best
