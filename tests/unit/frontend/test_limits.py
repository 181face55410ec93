"""docs/limits.md says what the constants say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from gateway.frontend import limits
from services.rpc import settings
from stagemesh import _transport

DOCUMENT = Path(__file__).parents[3] / "docs" / "limits.md"
NOT_LIMITS = {"MIB", "KEEPALIVE_MILLISECONDS", "KEEPALIVE_TIMEOUT_MILLISECONDS"}


def documented(section: str) -> dict[str, float]:
    text = next(part for part in DOCUMENT.read_text().split("\n## ") if section in part)
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([0-9.]+) \|", text, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def constants(module: ModuleType) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in vars(module).items()
        if re.fullmatch(r"[A-Z][A-Z_]+", name)
        and isinstance(value, (int, float))
        and name not in NOT_LIMITS
        # What a module imports from another is that one's to document.
        and (module is settings or name not in vars(settings))
    }


@pytest.mark.parametrize(
    ("section", "module"),
    [
        ("gateway/frontend/limits.py", limits),
        ("services/rpc/settings.py", settings),
        ("stagemesh/_transport.py", _transport),
    ],
    ids=["frontend", "rpc", "sdk"],
)
def test_the_document_is_complete_and_right(section: str, module: ModuleType) -> None:
    found = constants(module)
    assert found
    assert documented(section) == found


@pytest.mark.parametrize(
    ("section", "some"),
    [
        (
            "At start",
            {"MAX_CONFIG_FILE_BYTES", "MAX_CONNECTORS", "MAX_FILE_BYTES", "JOIN_TIMEOUT_SECONDS"},
        ),
        (
            "Inside the gateway",
            {
                "MERGE_QUEUE_SIZE",
                "DRAIN_BYTES",
                "MAX_TRACE_BYTES",
                "MOST_CACHED_BLOCKS",
            },
        ),
        (
            "Stage worker and ranks",
            {"MAX_FORM_SECONDS", "MAX_BLOCK_TABLE_BYTES", "MAX_MODEL_LEN", "MAX_BATCHED_TOKENS"},
        ),
        (
            "Control service",
            {"CONTROL_MAX_REQUEST_BYTES", "MAX_CONTROL_RPCS", "MAX_DOCTOR_CALLS", "MAX_ECHO_BYTES"},
        ),
    ],
)
def test_what_stands_elsewhere_is_right_too(section: str, some: set[str]) -> None:
    text = next(p for p in DOCUMENT.read_text().split("\n## ") if p.startswith(section))
    rows = re.findall(r"^\| `([A-Z_]+)` \(`([a-z_/]+)\.py`\) \| ([0-9.]+) \|", text, re.MULTILINE)
    assert some <= {name for name, _, _ in rows}
    for name, path, value in rows:
        module = importlib.import_module(path.replace("/", "."))
        assert getattr(module, name) == float(value), name


def test_client_and_server_agree_on_sizes() -> None:
    assert _transport.MAX_REQUEST_BYTES == settings.INFERENCE_MAX_REQUEST_BYTES
    assert _transport.MAX_RESPONSE_BYTES == settings.INFERENCE_MAX_RESPONSE_BYTES
    assert limits.MAX_BODY_BYTES == settings.INFERENCE_MAX_REQUEST_BYTES
    # The SDK's pings must not be faster than the server allows.
    assert _transport.KEEPALIVE_MILLISECONDS >= settings.MIN_PING_INTERVAL_SECONDS * 1000
