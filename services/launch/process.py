"""Children that die with their parent.

Two means, because neither covers everything: the kernel's parent-death signal
also reaches a stopped or hung child, but exists on Linux only; an inherited
pipe or socket that closes with the parent works everywhere, but needs a child
that still runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends.

    `parent_pid` is whom the parent says it is: when it died before this call,
    this process has another parent already and leaves at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
