"""Turns what a user wrote into checked values.

One parser per kind of value, for the command line, the YAML file and the
environment alike: each takes the raw value and returns the checked one, or
raises `ValueError` with what is allowed ("must be ..."). The caller adds which
flag it was and what was written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path

from services.ranges import MAX_BATCH_DEPTH, MAX_BYTES, MAX_COUNT, MAX_PORT, MAX_SEED, MAX_TOKENS

Raw = str | int | float | bool | Sequence[str | int | float] | Mapping[str, object]
"""A string from the command line, or what YAML has: a scalar, a list, and for options that
are JSON objects a mapping."""
Parser = Callable[[Raw], object]

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


def _as_text(raw: Raw, rule: str) -> str:
    """One scalar as text. YAML's booleans and lists are not numbers or names."""
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError(rule)
    return str(raw).strip()


def _as_integer(raw: Raw, rule: str) -> int:
    text = _as_text(raw, rule)
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(rule)
    return int(text)


def text(raw: Raw) -> str:
    """Any text that is not empty."""
    value = _as_text(raw, "must be a text")
    if not value:
        raise ValueError("must not be empty")
    return value


def path(raw: Raw) -> str:
    """A path, from here on absolute: processes elsewhere are given it too."""
    return str(Path(text(raw)).expanduser().absolute())


def texts(raw: Raw) -> tuple[str, ...]:
    """One or several texts; a single one need not be in a list."""
    if isinstance(raw, Mapping):
        raise ValueError("must be a text or a list of texts")
    items = [raw] if isinstance(raw, str | int | float) else list(raw)
    if not items:
        raise ValueError("must name at least one value")
    return tuple(text(item) for item in items)


def switch(raw: Raw) -> bool:
    """True or false."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    raise ValueError("must be true or false")


def port(raw: Raw) -> int:
    """A TCP port; 0 takes a free one."""
    rule = f"must be a port from 0 (any free one) to {MAX_PORT}"
    value = _as_integer(raw, rule)
    if not 0 <= value <= MAX_PORT:
        raise ValueError(rule)
    return value


def positive_integer(raw: Raw) -> int:
    """A count of at least 1."""
    return _in_range(raw, 1, MAX_COUNT)


def natural_integer(raw: Raw) -> int:
    """A count of at least 0."""
    return _in_range(raw, 0, MAX_COUNT)


def batch_depth(raw: Raw) -> int:
    """Batches that wait in front of stages; each makes all of them smaller."""
    return _in_range(raw, 0, MAX_BATCH_DEPTH)


def _in_range(raw: Raw, least: int, most: int) -> int:
    rule = f"must be a whole number from {least} to {most}"
    value = _as_integer(raw, rule)
    if not least <= value <= most:
        raise ValueError(rule)
    return value


def seed(raw: Raw) -> int:
    """An unsigned integer of 64 bits, as the wire carries it."""
    rule = f"must be a whole number from 0 to {MAX_SEED}"
    value = _as_integer(raw, rule)
    if not 0 <= value <= MAX_SEED:
        raise ValueError(rule)
    return value


def seconds(raw: Raw) -> float:
    """A finite duration of 0 or more, in seconds."""
    rule = "must be a number of seconds, 0 or more"
    value = _as_number(raw, rule)
    if value < 0:
        raise ValueError(rule)
    return value


def positive_seconds(raw: Raw) -> float:
    """A finite duration above 0, in seconds."""
    rule = "must be a number of seconds above 0"
    value = _as_number(raw, rule)
    if value <= 0:
        raise ValueError(rule)
    return value


def fraction(raw: Raw) -> float:
    """A share above 0, at most 1."""
    rule = "must be above 0 and at most 1, for example 0.9"
    value = _as_number(raw, rule)
    if not 0 < value <= 1:
        raise ValueError(rule)
    return value


def _as_number(raw: Raw, rule: str) -> float:
    try:
        value = float(_as_text(raw, rule))
    except ValueError:
        raise ValueError(rule) from None
    if not math.isfinite(value):
        raise ValueError(rule)
    return value


def size(raw: Raw) -> int:
    """Bytes, at least 1, plain or with a suffix as vLLM reads it:
    k, m, g, t are powers of 1000, K, M, G, T powers of 1024."""
    return _suffixed(raw, MAX_BYTES)


def token_count(raw: Raw) -> int:
    """Tokens, at least 1, with suffixes as `size`."""
    return _suffixed(raw, MAX_TOKENS)


def _suffixed(raw: Raw, most: int) -> int:
    rule = "must be a whole number of at least 1, or one like 8k (8000), 8K (8192), 1.5g, 4G"
    written = _as_text(raw, rule)
    match = _SIZE.fullmatch(written)
    if match is None:
        value = positive_integer_or(rule, raw)
    elif (suffix := match[2]) in _BINARY:
        number = match[1]
        if "." in number:
            raise ValueError(
                f"takes no decimal point before {suffix} (a power of 1024); "
                f"write {number}{suffix.lower()} for a power of 1000"
            )
        value = int(number) * _BINARY[suffix]
    else:
        value = int(Decimal(match[1]) * _DECIMAL[suffix])
    if value < 1:
        raise ValueError(rule)
    if value > most:
        raise ValueError(f"must be at most {most}")
    return value


def positive_integer_or(rule: str, raw: Raw) -> int:
    """As `positive_integer`, with a rule of the caller's own."""
    value = _as_integer(raw, rule)
    if value < 1:
        raise ValueError(rule)
    return value


def token_count_or_auto(raw: Raw) -> int | None:
    """As `token_count`; `auto` and -1 leave the decision to the model (None)."""
    written = str(raw).strip().lower() if isinstance(raw, str | int) else ""
    return None if written in ("auto", "-1") else token_count(raw)


def partition(raw: Raw) -> tuple[int, ...]:
    """Layers per stage, as "32,29" or a list. Count and sum are checked against the
    mesh and the model later, by `services.topology`."""
    rule = 'must be one whole number of at least 1 per stage, like "32,29"'
    if isinstance(raw, str):
        items: Sequence[str | int | float] = raw.split(",")
    elif isinstance(raw, bool | float | Mapping):
        raise ValueError(rule)
    else:
        items = [raw] if isinstance(raw, int) else raw
    if not items:
        raise ValueError(rule)
    return tuple(
        positive_integer_or(f"{rule} (stage {stage} has {str(item).strip() or 'nothing'})", item)
        for stage, item in enumerate(items)
    )


def stages(raw: Raw) -> tuple[int, ...]:
    """Numbers of stages, as "0,1" or a list."""
    rule = 'must be one or more numbers of stages, like "0,1"'
    if isinstance(raw, bool | float | Mapping):
        raise ValueError(rule)
    items = raw.split(",") if isinstance(raw, str) else [raw] if isinstance(raw, int) else raw
    numbers = tuple(_as_integer(item, rule) for item in items)
    if not numbers or min(numbers) < 0 or max(numbers) > MAX_COUNT:
        raise ValueError(rule)
    return numbers


def one_of(*choices: str) -> Parser:
    """A parser that takes exactly these words."""
    rule = f"must be one of {', '.join(choices)}"

    def parse(raw: Raw) -> str:
        value = _as_text(raw, rule)
        if value not in choices:
            raise ValueError(rule)
        return value

    return parse


def generation_config(raw: Raw) -> str:
    """`auto`, `none` (vLLM spells it `vllm`) or a directory."""
    value = text(raw)
    return "none" if value == "vllm" else value
