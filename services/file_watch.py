"""Hears of changed files by an event, not by looking: inotify(7). Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.2
"""Files that belong together are replaced one after the other; what came of it is read after
the last."""
_EVENT_BYTES = 64 << 10
_NONBLOCK_CLOSED_ON_EXEC = os.O_NONBLOCK | os.O_CLOEXEC
# Written and closed, moved in or out, made or deleted (sys/inotify.h): editors, `mv`, symlinks.
_MASK = 0x8 | 0x40 | 0x80 | 0x100 | 0x200


@contextlib.contextmanager
def watching(paths: Sequence[Path], on_change: Callable[[], None]) -> Iterator[None]:
    """Calls `on_change` in the running event loop after one of the files has changed.

    The directories are watched, so that a file may be replaced, also by way of a symbolic link
    in its directory. Where that cannot be done, a line in the log says that a restart is needed.
    """
    directories = sorted({path.parent for path in paths})
    try:
        descriptor = _watch(directories)
    except OSError as error:
        names = ", ".join(map(str, paths))
        log.warning("changes of %s need a restart: %s", names, error.strerror or error)
        yield
        return
    loop = asyncio.get_running_loop()
    known = _stamps(paths)
    waiting: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal known, waiting
        waiting = None
        stamps = _stamps(paths)
        if stamps != known:
            known = stamps
            on_change()

    def on_event() -> None:
        nonlocal waiting
        with contextlib.suppress(BlockingIOError):
            os.read(descriptor, _EVENT_BYTES)
        if waiting is not None:
            waiting.cancel()
        waiting = loop.call_later(SETTLE_SECONDS, look)

    loop.add_reader(descriptor, on_event)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        if waiting is not None:
            waiting.cancel()
        os.close(descriptor)


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    found: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            state = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((state.st_mtime_ns, state.st_ino, state.st_size))
    return found


def _watch(directories: Sequence[Path]) -> int:
    """A descriptor that is readable after something has changed. Raises `OSError`."""
    if sys.platform != "linux":
        raise OSError(0, "files are watched on Linux only")
    descriptor = _checked(_libc().inotify_init1(_NONBLOCK_CLOSED_ON_EXEC))
    try:
        for directory in directories:
            _checked(_libc().inotify_add_watch(descriptor, os.fsencode(directory), _MASK))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
