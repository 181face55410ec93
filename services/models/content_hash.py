"""A hash of every byte of a model's weights, made once, beside other work.

Minutes for a large model, so it is for `doctor --deep` alone; at join the headers
and sizes of the files are compared (`services.topology.fingerprint`).
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

from services.errors import StagemeshError
from services.topology.checkpoint import inspect_checkpoint

CHUNK_BYTES = 4 << 20
"""Read at a time: the interpreter's lock is free while a piece of this size is hashed."""

STALL_SECONDS = 60.0
"""A disk that gives nothing for so long gives nothing."""

CLOSE_SECONDS = 0.25
"""Time for the thread to end: many chunks' of a disk that works, and short for an event loop."""


@dataclass(frozen=True, slots=True)
class FileHash:
    """One file of weights."""

    name: str
    sha256: str
    """Lower-case hex."""


@dataclass(frozen=True, slots=True)
class HashProgress:
    """How far the hash is."""

    hashed_bytes: int
    total_bytes: int
    files: tuple[FileHash, ...]
    """In order of name; empty until all are read."""
    error: str
    """Why there will be none; empty while nothing is wrong."""

    @property
    def is_over(self) -> bool:
        """Whether it is complete or will never be."""
        return bool(self.files or self.error)


class ContentHash:
    """Reads all weights of one model directory on a thread of its own, once."""

    def __init__(self, model_path: Path) -> None:
        self._path = model_path
        self._thread = threading.Thread(target=self._run, name="content-hash", daemon=True)
        self._stop = threading.Event()
        self._started = False
        # Written by the thread as a whole, so that a reader never sees half of it.
        self._progress = HashProgress(0, 0, (), "")

    def start(self) -> None:
        """Starts to read; does nothing the second time."""
        if not self._started:
            self._started = True
            self._thread.start()

    @property
    def progress(self) -> HashProgress:
        """How far it is now."""
        return self._progress

    def finish(self, stall_seconds: float = STALL_SECONDS) -> HashProgress:
        """Waits until it is over, or until nothing was read for `stall_seconds`."""
        self.start()
        hashed_bytes = -1
        while not self._progress.is_over and self._progress.hashed_bytes > hashed_bytes:
            hashed_bytes = self._progress.hashed_bytes
            self._thread.join(stall_seconds)
        if self._progress.is_over:
            return self._progress
        how = f"nothing was read for {stall_seconds:.0f} s"
        return HashProgress(hashed_bytes, self._progress.total_bytes, (), how)

    def close(self) -> None:
        """Ends it within one chunk, if it runs. Waits `CLOSE_SECONDS` at most: the thread of a
        disk that gives nothing is left, and does not keep the process."""
        self._stop.set()
        if self._started:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            files = inspect_checkpoint(self._path).files
            total = sum(file.size_bytes for file in files)
            self._progress = HashProgress(0, total, (), "")
            hashes = tuple(FileHash(file.name, self._hash(file.name, total)) for file in files)
        except (OSError, StagemeshError) as error:
            self._progress = HashProgress(0, 0, (), f"the weights cannot be read: {error}")
        else:
            done = self._progress.hashed_bytes
            self._progress = HashProgress(done, total, hashes, "")

    def _hash(self, name: str, total: int) -> str:
        state = hashlib.sha256()
        with (self._path / name).open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                if self._stop.is_set():
                    raise StagemeshError("it was ended before")
                state.update(chunk)
                hashed = self._progress.hashed_bytes + len(chunk)
                self._progress = HashProgress(hashed, total, (), "")
        return state.hexdigest()
