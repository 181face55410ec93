"""What a check has found: plain data that text and JSON are made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from services.errors import StagemeshError


class Outcome(str, Enum):
    """How a check ended. Its value stands in the JSON."""

    OK = "ok"
    WARNING = "warning"
    """Worth knowing; a mesh can run with it."""
    FAILED = "failed"
    """A mesh does not start, or does not run as it should, until this is put right."""


class Check(str, Enum):
    """Every check, in the order of a report. The value stands in the report, and is a section
    of docs/doctor.md."""

    SETTINGS = "settings"
    DEVICES = "devices"
    RAY = "ray"
    MODEL = "model"
    PARTITION = "partition"
    COMPATIBILITY = "compatibility"
    LAYOUT = "layout"
    MEMORY = "memory"
    VERSIONS = "versions"
    PORTS = "ports"
    KV_TRANSFER = "kv transfer"
    LIMITS = "limits"
    DISK = "disk"
    SHARED_MEMORY = "shared memory"
    TLS = "tls"
    HEAD = "head"
    JOIN = "join"
    WEIGHTS = "weights"
    CLOCK = "clock"
    NETWORK = "network"
    MESH = "mesh"
    PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say."""

    check: Check
    outcome: Outcome
    what: str
    """What was found, with the values, on one line."""
    remedy: str = ""
    """What to do; empty where nothing is to do or `what` says it, as the errors of `serve` do."""


def ok(check: Check, what: str) -> Finding:
    """All well."""
    return Finding(check, Outcome.OK, what)


def warning(check: Check, what: str, remedy: str) -> Finding:
    """A mesh can run with it."""
    return Finding(check, Outcome.WARNING, what, remedy)


def failed(check: Check, what: str, remedy: str) -> Finding:
    """To be put right."""
    return Finding(check, Outcome.FAILED, what, remedy)


def refused(check: Check, error: StagemeshError) -> Finding:
    """What `serve` would refuse with the same words."""
    return Finding(check, Outcome.FAILED, " ".join(error.message.split()))


def all_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing has failed; warnings do not count."""
    return all(finding.outcome is not Outcome.FAILED for finding in findings)
