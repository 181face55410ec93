"""Quantities as people read them."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(num_bytes: float) -> str:
    """At most one decimal and a binary unit: "39.9 GiB", "311 MiB", "512 B"."""
    value, unit = float(num_bytes), _BYTE_UNITS[0]
    for larger in _BYTE_UNITS[1:]:
        if value < 1000:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == _BYTE_UNITS[0] or value >= 99.95 else 1
    return f"{value:.{digits}f} {unit}"


def counted(count: int, noun: str) -> str:
    """ "1 device", "2 devices"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
