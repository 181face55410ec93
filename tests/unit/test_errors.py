"""The error tree is where it says it is, and is what it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import services.errors
from services.control import client
from services.errors import HeadLost, UsageError, all_errors

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("services", "gateway", "stage_worker")


def test_the_drawing_is_the_tree() -> None:
    drawn: dict[str, tuple[str | None, str, int, str, bool]] = {}
    parents: dict[int, str] = {}
    for line in (services.errors.__doc__ or "").splitlines():
        row = re.fullmatch(
            r"    ([ │├└─]*)(\w+) +([A-Z_]+) +(\d{3}) +(\w+)(?: +(\(retryable\)))?", line
        )
        if row is None:
            continue
        depth, name = len(row[1]) // 4, row[2]
        parents[depth] = name
        drawn[name] = (parents.get(depth - 1), row[3], int(row[4]), row[5], row[6] is not None)
    assert drawn == {
        one.__name__: (
            None if one.__base__ is Exception else one.__base__.__name__,
            one.grpc_code,
            one.http_status,
            one.openai_type,
            one.retryable,
        )
        for one in all_errors()
        if one.__base__ is not None
    }


def test_reasons_are_unique() -> None:
    reasons = [one.reason for one in all_errors()]
    assert len(set(reasons)) == len(reasons)


def test_no_error_of_the_tree_is_made_elsewhere() -> None:
    """A class that only some processes have loaded could not come back from the wire."""
    known = {one.__name__ for one in all_errors() if one.__module__ == services.errors.__name__}
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}: {node.name}"
        for package in OWN_PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
        if path != REPOSITORY / "services" / "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id in known for base in node.bases)
    ]
    assert not wrong, "\n".join(wrong)
    assert {"HeadLost", "UsageError"} <= known
    assert client.HeadLost is HeadLost and UsageError.reason == "USAGE_ERROR"
