"""Ranges of numbers that the command line, the servers and the front doors share."""

from __future__ import annotations

import ctypes
import math

MAX_PORT = 65535
"""Of TCP; 0 asks for a free one where something is bound."""

MAX_COUNT = 2**20
"""Of what there is more than one of in a mesh: ranks, nodes, sequences. Far above any."""

MAX_TOKENS = 2**31 - 1
"""Of token counts; they travel in 32 bits (proto/stagemesh/v1/stage_worker.proto)."""

MAX_BYTES = 2**63 - 1
"""Of sizes in bytes, which travel in 64 bits."""

MAX_SEED = 2**64 - 1
"""Seeds are 64 bits, unsigned (proto/stagemesh/v1/step.proto)."""

MAX_BATCH_DEPTH = 16
"""Of batches beyond one for each stage. One or two hide what is to be hidden; with more, requests
only wait longer."""


def as_float32(value: float) -> float:
    """The number that 32 bits keep of it, as stages get it: 0.0 or infinite where it is too
    small or too large."""
    try:
        return ctypes.c_float(value).value
    except OverflowError:  # an integer that no float holds
        return math.inf if value > 0 else -math.inf
