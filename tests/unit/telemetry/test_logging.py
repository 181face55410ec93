"""Logs are one line each, with fields and the request id."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from services.errors import ConfigError
from services.telemetry.logging import (
    KeyValueFormatter,
    log_event,
    log_level,
    request_id_scope,
)


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(KeyValueFormatter())
    logger = logging.getLogger("stagemesh-test")
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


LOGGER = logging.getLogger("stagemesh-test")


def test_a_line_has_message_fields_and_request_id(output: io.StringIO) -> None:
    with request_id_scope("req-1"):
        log_event(LOGGER, logging.INFO, "request done", {"status": 200, "seconds": 0.25})
    line = output.getvalue()
    assert line.endswith(
        'INFO stagemesh-test request_id=req-1 msg="request done" status=200 seconds=0.25\n'
    )


def test_line_breaks_cannot_forge_a_second_line(output: io.StringIO) -> None:
    LOGGER.info("first\nsecond %s", "a=b")
    assert output.getvalue().count("\n") == 1


def test_a_trace_stays_on_its_line(output: io.StringIO) -> None:
    try:
        raise ValueError("x")
    except ValueError:
        LOGGER.exception("failed")
    assert output.getvalue().count("\n") == 1
    assert "ValueError" in output.getvalue()


def test_no_request_id_outside_a_request(output: io.StringIO) -> None:
    LOGGER.info("idle")
    assert "request_id" not in output.getvalue()


def test_levels() -> None:
    assert log_level({}) == logging.INFO
    assert log_level({"STAGEMESH_LOG_LEVEL": "debug"}) == logging.DEBUG
    with pytest.raises(ConfigError, match="LOUD"):
        log_level({"STAGEMESH_LOG_LEVEL": "LOUD"})
