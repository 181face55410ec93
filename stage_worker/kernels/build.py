"""Compiles the kernels for this machine, once, and loads it. Torch-free.

The library lies in `${STAGEMESH_HOME}/kernels`, under a name made of everything
that it depends on: source, compiler, flags and the CPU's own features, so that a
home directory which several kinds of machines share never gives one of them the
other's instructions. Compiling takes about a second.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.models.cache import stagemesh_home

_HERE = Path(__file__).parent
SOURCES = tuple(
    _HERE / name
    for name in (
        *("linear.c", "compact.c", "layers.c"),
        *("attention.c", "prompt_attention.c", "blocks.c"),
    )
)
_HEADERS = tuple(_HERE / name for name in ("vector.h", "weights.h", "cache.h", "kernels.h"))
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_SECONDS = 60.0
_BASE_FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
_CPU_FACTS = ("flags", "Features", "model name", "CPU implementer", "CPU part", "CPU variant")


class KernelsUnavailable(Exception):
    """There is no compiled library on this machine; the text says why."""


def load_library() -> ctypes.CDLL:
    """The compiled kernels. Raises `KernelsUnavailable`."""
    compiler = _compiler()
    try:
        directory = stagemesh_home() / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(directory)
    except OSError as error:
        raise KernelsUnavailable(f"no directory for compiled kernels: {error}") from error
    version = _output((compiler, "--version"))
    problem = ""
    for flags in _flag_sets():
        library = directory / f"{_key(compiler, version, flags)}.so"
        try:
            if not library.exists():
                _compile(compiler, flags, library)
            _check_ours(library)
            return ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError) as error:
            problem = problem or _why(error)
    raise KernelsUnavailable(f"{compiler} cannot compile the kernels: {problem}")


def _compiler() -> str:
    named = os.environ.get("CC")
    for name in (named,) if named else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise KernelsUnavailable(
        f"CC names {named}, which is not there" if named else "there is no C compiler"
    )


def _flag_sets() -> Iterator[tuple[str, ...]]:
    """What to try, best first: a compiler may know neither this CPU nor OpenMP."""
    native = (
        "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    )
    for tuning in ((native,), ()):
        for threads in (("-fopenmp",), ()):
            yield (*_BASE_FLAGS, *tuning, *threads)


def _key(compiler: str, version: str, flags: tuple[str, ...]) -> str:
    sources = (path.read_text(encoding="utf-8") for path in (*_HEADERS, *SOURCES))
    parts = (*sources, compiler, version, *flags, _cpu_identity())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _cpu_identity() -> str:
    """What the compiler's "native" depends on."""
    facts = {platform.machine(), platform.libc_ver()[1]}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        facts.add(platform.processor())
    else:
        facts.update(line for line in lines if line.split("\t")[0].strip() in _CPU_FACTS)
    return "\n".join(sorted(facts))


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    """Compiles beside the target and renames, so that ranks which start together do not meet
    half a file."""
    handle, name = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        _output((compiler, *flags, *map(str, SOURCES), "-o", name))
        os.replace(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _check_ours(path: Path) -> None:
    """Code that somebody else can change is not loaded. Raises `KernelsUnavailable`."""
    facts = path.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelsUnavailable(f"{path} can be changed by other users")


def _output(command: tuple[str, ...]) -> str:
    done = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=COMPILE_TIMEOUT_SECONDS,
    )
    return done.stdout


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        return str(error.stderr).strip().splitlines()[0][:200]
    return str(error)[:200]
