"""Children that die with their parent.

Two means, because neither covers everything: the kernel's parent-death signal
also reaches a stopped or hung child, but exists on Linux only; an inherited
pipe or socket that closes with the parent works everywhere, but needs a child
that still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from functools import cache

from services.config import API_KEY_VARIABLE

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
TIMER_SLACK_SECONDS = 0.05
SECRET_VARIABLES = frozenset(
    (API_KEY_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN")
)
"""Keys of clients, of the Hub, and of a Ray cluster."""
EXIT_HEAD_LOST = 3
"""A stage worker's exit code where its head is gone: whoever has started it knows that another
would find none either."""


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends.

    `parent_pid` is whom the parent says it is: when it died before this call,
    this process has another parent already and leaves at once.
    """
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def child_environment() -> dict[str, str]:
    """This process's variables without its secrets: workers and ranks fetch nothing and ask
    nobody for a key, and what they inherit would be in every core dump."""
    return {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}


def kill(process: asyncio.subprocess.Process | None) -> None:
    """Ends a child at once; nothing where none was started or its end is known already.

    Not `Process.kill`: outside uvloop that polls the child, which takes the exit code of one that
    has just ended away from the event loop, and 255 is reported in its place.
    """
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """An exit code in words; negative for a signal, as `subprocess` has it."""
    if code >= 0:
        return f"exited with {code}"
    named = -code in {each.value for each in signal.Signals}  # Most real-time ones have no name.
    return f"was ended by {signal.Signals(-code).name if named else f'signal {-code}'}"


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds a process by a signal such as SIGSTOP; False where it cannot say.
    See proc_pid_stat(5)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may hold anything.
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def allow_late_timers(slack_seconds: float) -> None:
    """Lets the kernel end this thread's timed waits late, and those of threads it will start.

    Events still wake them at once. Gloo's loop asks for a wake-up every 10 ms for nothing,
    which is 0.4 % of a core per rank; with 50 ms of slack it is 0.1 % (measured on Linux 6).
    """
    if sys.platform == "linux":
        nanoseconds = int(slack_seconds * 1e9)
        _libc().prctl(_PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


@cache
def _libc() -> ctypes.CDLL:
    # Opening it takes longer than a call.
    return ctypes.CDLL(None, use_errno=True)
