"""A child dies with its parent, also when it is stopped; and how it has died is known."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.launch.process import SECRET_VARIABLES, child_environment, how_it_ended, kill

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from services.launch.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(60)
''', str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_children_inherit_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "secret")
    assert {"STAGEMESH_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN"} <= SECRET_VARIABLES
    assert "secret" not in child_environment().values()


def wait_until_gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_stopped_child_dies_with_its_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()
    assert wait_until_gone(child, 5.0)


def test_a_child_whose_parent_is_gone_already_leaves() -> None:
    code = "from services.launch.process import die_with_parent; die_with_parent(1); print('here')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30
    )
    assert (done.returncode, done.stdout) == (1, "")


TIMEOUT_SECONDS = 20.0


async def test_a_kill_leaves_the_exit_code_to_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child has ended by itself, and the loop does not know yet."""
    waitpid, killed = os.waitpid, threading.Event()

    def late(pid: int, options: int) -> tuple[int, int]:
        killed.wait(TIMEOUT_SECONDS)
        return waitpid(pid, options)

    # What the loop asks; `subprocess` has bound its own before.
    monkeypatch.setattr(os, "waitpid", late)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(7)")
    wait_until_gone(child.pid, TIMEOUT_SECONDS)  # Without a turn of the loop.
    kill(child)
    killed.set()
    code = await asyncio.wait_for(child.wait(), TIMEOUT_SECONDS)
    assert how_it_ended(code) == "exited with 7"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with 0"),
        (-signal.SIGKILL, "was ended by SIGKILL"),
        (-(signal.SIGRTMIN + 1), f"was ended by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_how_it_ended(code: int, words: str) -> None:
    assert how_it_ended(code) == words


async def test_a_kill_ends_a_child_and_does_nothing_to_one_that_is_gone() -> None:
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    child = await asyncio.create_subprocess_exec(*command)
    kill(None)
    kill(child)
    kill(child)
    code = await asyncio.wait_for(child.wait(), TIMEOUT_SECONDS)
    kill(child)
    assert how_it_ended(code) == "was ended by SIGKILL"
