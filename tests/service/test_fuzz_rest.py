"""The REST door against requests that schemathesis makes from its OpenAPI schema: right ones,
wrong ones, and what is just outside of the limits. No answer is a 500, and every answer is what
the schema says."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import pytest
from front_doors import Rest

RUN_SECONDS = 90.0
EXAMPLES = 60
"""Of each kind and operation, besides those of the coverage phase."""
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
"""Not "negative_data_rejection" and its reverse: null stands for absent here, and some limits
depend on one another."""


async def test_the_schema_holds_for_any_request(
    rest: Rest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rest.gateway.engine.reply = "x"
    program = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "run", f"{rest.url}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--max-examples", str(EXAMPLES)),
        *("--phases", "examples,coverage,fuzzing", "--seed", "1", "--generation-deterministic"),
        *("--no-color", "--request-timeout", "10"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(RUN_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (await rest.http.get("/health")).status_code == 200
