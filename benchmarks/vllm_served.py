"""vLLM's own server, from a virtual environment of its own (benchmarks/make_vllm_venv.sh)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

PYTHON_VARIABLE = "STAGEMESH_VLLM_PYTHON"
READY_SECONDS = 600.0
"""It compiles both stages: 130 s on two cores with nothing in its cache."""
SETTINGS = {
    # One core for each stage, as Stagemesh's ranks have.
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmServed:
    """`vllm serve` with PP 2, compiled (its pipeline does not run eagerly on a CPU).

    Its ranks spin while they have nothing to do, so it is stopped except while it is
    measured: see `running`.
    """

    def __init__(self, python: str, model_path: str, name: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]  # vLLM cannot be asked for any free port
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed in __exit__
            prefix="vllm-", suffix=".log"
        )
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model_path]
        command += ["--served-model-name", name, "--dtype", "float32", "--max-model-len", "2048"]
        command += ["--pipeline-parallel-size", "2", "--host", "127.0.0.1", "--port", str(port)]
        # Prompts differ from round to round, as they do for the others.
        command += ["--no-enable-prefix-caching"]
        inherited = {
            k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")
        }
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            env={**inherited, **SETTINGS},
            start_new_session=True,
        )
        self.ready_seconds = 0.0

    def __enter__(self) -> VllmServed:
        started = time.monotonic()
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() - started > READY_SECONDS:
                tail = Path(self._log.name).read_text("utf-8")[-3000:]
                self._end()
                raise RuntimeError(f"vLLM did not become ready; the end of its log:\n{tail}")
            time.sleep(0.5)
        self.ready_seconds = time.monotonic() - started
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @contextmanager
    def running(self) -> Iterator[VllmServed]:
        """Lets it run for as long as the block takes."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait(30)
        self._log.close()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False
