"""`--deep`: is every byte of the weights the same here and at the head? Pure."""

from __future__ import annotations

from collections.abc import Iterator

from services.doctor.findings import Check, Finding, failed, ok
from services.models.content_hash import HashProgress
from services.units import counted, human_bytes
from stagemesh.v1 import control_pb2

_SHOWN_DIGITS = 12
_COPY = "give every node the same copy of the model"


def check_weights_here(ours: HashProgress) -> Iterator[Finding]:
    """Where no head is asked: what two nodes' reports can be compared by."""
    if ours.error:
        yield failed(Check.WEIGHTS, ours.error, "copy the model again")
        return
    shown = ", ".join(f"{file.name} {file.sha256}" for file in ours.files)
    yield ok(Check.WEIGHTS, f"{human_bytes(ours.total_bytes)} read; SHA-256: {shown}")


def check_weights_equal(
    ours: HashProgress, theirs: control_pb2.ContentHash, head: str
) -> Iterator[Finding]:
    """Which files differ; `head` is the head's host name."""
    if ours.error:
        yield failed(Check.WEIGHTS, ours.error, "copy the model again")
        return
    if not theirs.files:
        progress = f"{theirs.hashed_bytes} of {theirs.total_bytes} bytes read"
        yield failed(
            Check.WEIGHTS,
            f"{head} did not finish the hash of its weights: {theirs.error or progress}",
            "look at the disk of the head, and ask again: it goes on from where it was",
        )
        return
    here = {file.name: file.sha256 for file in ours.files}
    there = {file.name: file.sha256 for file in theirs.files}
    differing = [
        name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)
    ]
    for name in differing:
        yield failed(
            Check.WEIGHTS,
            f"{name} differs: {head} has {_shown(there.get(name))} and this node has "
            f"{_shown(here.get(name))} (SHA-256)",
            _COPY,
        )
    if not differing:
        yield ok(
            Check.WEIGHTS,
            f"every byte of {counted(len(here), 'file')} ({human_bytes(ours.total_bytes)}) is "
            f"equal here and on {head}",
        )


def _shown(sha256: str | None) -> str:
    return "no such file" if sha256 is None else f"{sha256[:_SHOWN_DIGITS]}..."
