"""When requests are sent. Pure."""

from __future__ import annotations

import math
import random
from itertools import accumulate


def arrival_times(
    count: int, request_rate: float, burstiness: float, rng: random.Random
) -> list[float]:
    """Seconds after the start at which each of `count` requests is sent, ascending.

    An infinite rate sends all at 0. Else the gaps follow a gamma distribution of mean
    1 / request_rate and shape `burstiness`: 1 is a Poisson process, less comes in bursts,
    more evens out, infinite is a metronome. As in vLLM's bench the times are then scaled
    so that `count` requests take count / request_rate seconds whatever the seed.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [number / request_rate for number in range(1, count + 1)]
    scale = 1.0 / (request_rate * burstiness)
    times = list(accumulate(rng.gammavariate(burstiness, scale) for _ in range(count)))
    if not times or times[-1] == 0.0:
        return times
    stretch = count / request_rate / times[-1]
    return [time * stretch for time in times]
