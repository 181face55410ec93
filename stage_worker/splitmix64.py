"""SplitMix64 (Steele, Lea and Flood, 2014): a hash of 64 bits, in plain integers. Torch-free."""

from __future__ import annotations

MASK_64 = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


def mix(value: int) -> int:
    """The generator's step and finalizer: 64 bits to 64 bits, one to one."""
    z = (value + GOLDEN_GAMMA) & MASK_64
    z = ((z ^ (z >> 30)) * MULTIPLIER_1) & MASK_64
    z = ((z ^ (z >> 27)) * MULTIPLIER_2) & MASK_64
    return z ^ (z >> 31)
