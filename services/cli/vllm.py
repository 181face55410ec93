"""What `vllm serve` takes, so that its users learn what Stagemesh lacks.

The list is data (`vllm_serve_flags.txt`), taken from a vLLM release.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def vllm_serve_flags() -> frozenset[str]:
    """Every spelling that `vllm serve` accepts, with its dashes."""
    data = Path(__file__).with_name("vllm_serve_flags.txt").read_text("utf-8")
    return frozenset(line for line in data.splitlines() if line and not line.startswith("#"))


def is_vllm_flag(name: str) -> bool:
    """Whether vLLM has this flag, also as `--no-flag` or as `--flag.key`."""
    base = name.split(".", 1)[0]
    flags = vllm_serve_flags()
    return base in flags or (base.startswith("--no-") and f"--{base[5:]}" in flags)
