"""Hears of changed files by an event, not by looking: inotify(7). Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import struct
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
_FILES = 0x8 | 0x40 | 0x80 | 0x100 | 0x200
_DIRECTORY_GONE = 0x400 | 0x800
"""The directory itself was deleted or moved: the watch stays with what is no longer at its path."""
_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, bytes of the name behind it (inotify(7))."""
_WATCH_AGAIN_SECONDS = 1.0
"""Between looks for a directory that is gone: of what is not there, no event can come."""

Stamps = list[tuple[int, int, int] | None]
"""When each file was written, which one it is, and its size; None for one that is not there."""


@contextlib.contextmanager
def watching(
    paths: Sequence[Path], on_change: Callable[[], None], since: Stamps | None = None
) -> Iterator[None]:
    """Calls `on_change` in the running event loop after one of the files has changed; at once
    where they are no longer as they were at `since`, of `stamps`.

    The directories are watched, so that a file may be replaced, also by way of a symbolic link
    in its directory, and so may a directory. Where that cannot be done, a line in the log says
    that a restart is needed.
    """
    directories = sorted({path.parent for path in paths})
    watch: _Watch | None = None
    try:
        descriptor = _watch(directories)
    except OSError as error:
        names = ", ".join(map(str, paths))
        log.warning("changes of %s need a restart: %s", names, error.strerror or error)
    else:
        watch = _Watch(paths, directories, on_change, descriptor)
    try:
        # After the watch is set: what changes from here on is an event.
        if since is not None and stamps(paths) != since:
            on_change()
        yield
    finally:
        if watch is not None:
            watch.close()


class _Watch:
    """The watch of some directories, for some files in them."""

    def __init__(
        self,
        paths: Sequence[Path],
        directories: Sequence[Path],
        on_change: Callable[[], None],
        descriptor: int,
    ) -> None:
        self._paths, self._directories, self._on_change = paths, directories, on_change
        self._loop = asyncio.get_running_loop()
        self._known = stamps(paths)
        self._waiting: asyncio.TimerHandle | None = None
        self._is_lost = False
        self._descriptor = descriptor
        self._loop.add_reader(descriptor, self._on_event)

    def _on_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if _tells_of_a_lost_directory(os.read(self._descriptor, _EVENT_BYTES)):
                self._is_lost = True
        self._look_in(SETTLE_SECONDS)

    def _look_in(self, seconds: float) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._waiting = None
        if self._is_lost:
            self._watch_again()
        now = stamps(self._paths)
        if now != self._known:
            self._known = now
            self._on_change()

    def _watch_again(self) -> None:
        where = ", ".join(map(str, self._directories))
        try:
            descriptor = _watch(self._directories)
        except OSError as error:
            log.warning("%s is not watched for changes now: %s", where, error.strerror or error)
            self._look_in(_WATCH_AGAIN_SECONDS)
            return
        self._is_lost = False
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._loop.add_reader(descriptor, self._on_event)
        log.info("%s was replaced and is watched again", where)

    def close(self) -> None:
        """Ends the watch."""
        self._loop.remove_reader(self._descriptor)
        if self._waiting is not None:
            self._waiting.cancel()
        os.close(self._descriptor)


def _tells_of_a_lost_directory(events: bytes) -> bool:
    at = 0
    while at < len(events):
        _, mask, _, name_bytes = _EVENT.unpack_from(events, at)
        if mask & _DIRECTORY_GONE:
            return True
        at += _EVENT.size + name_bytes
    return False


def stamps(paths: Sequence[Path]) -> Stamps:
    """The state of files, to be taken before they are read."""
    found: Stamps = []
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
            _checked(
                _libc().inotify_add_watch(
                    descriptor, os.fsencode(directory), _FILES | _DIRECTORY_GONE
                )
            )
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
