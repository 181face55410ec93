"""A doctor's findings for people, and for programs."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from services.control.progress import StageProgress
from services.doctor.facts import NodeFacts
from services.doctor.findings import Finding, Outcome, all_well
from services.doctor.head import LinkFacts, PeerFacts

SCHEMA_VERSION = 1
WIDTH = 100
_MARKS = {Outcome.OK: "ok", Outcome.WARNING: "warning", Outcome.FAILED: "FAILED"}
_MARK_WIDTH = 9
_CHECK_WIDTH = 15


@dataclass(frozen=True, slots=True)
class MeshReport:
    """What was measured and heard at the head."""

    address: str
    node: str
    """Host name of the head."""
    link: LinkFacts
    peers: tuple[PeerFacts, ...]
    progress: tuple[StageProgress, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run of a doctor has to say."""

    node_rank: int
    model: str | None
    """As the user named it; None where none was named."""
    findings: tuple[Finding, ...]
    facts: NodeFacts
    mesh: MeshReport | None = None
    """None where no head was asked or none has answered."""

    @property
    def healthy(self) -> bool:
        """Whether nothing has failed."""
        return all_well(self.findings)


def render(report: Report) -> str:
    """The text, with a newline at its end. Failures stand where their check stands."""
    of_model = "" if report.model is None else f", model {report.model}"
    lines = [f"node {report.node_rank} ({report.facts.host}){of_model}", ""]
    for finding in report.findings:
        lines += finding_lines(finding)
    return "\n".join([*lines, "", _sum(report)]) + "\n"


def finding_lines(finding: Finding) -> Iterator[str]:
    """One finding as it stands in the text."""
    indent = " " * (_MARK_WIDTH + _CHECK_WIDTH)
    first = f"{_MARKS[finding.outcome]:<{_MARK_WIDTH}}{finding.check.value:<{_CHECK_WIDTH}}"
    yield from _wrapped(finding.what, first, indent)
    if finding.remedy:
        yield from _wrapped(finding.remedy, f"{indent}do: ", indent + " " * len("do: "))


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        # Paths, addresses and flags stay whole.
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sum(report: Report) -> str:
    count = Counter(finding.outcome for finding in report.findings)
    bad, doubtful, good = (count[o] for o in (Outcome.FAILED, Outcome.WARNING, Outcome.OK))
    return f"{bad} failed, {doubtful} to look at, {good} ok"


def to_json(report: Report) -> str:
    """The same as one JSON document, with a newline at its end."""
    document = {"schema_version": SCHEMA_VERSION, "healthy": report.healthy, **asdict(report)}
    return json.dumps(document, indent=2) + "\n"
