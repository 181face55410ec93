"""On `PYTHONPATH` of a mesh: a process whose main thread hangs when it gets SIGUSR1.

Its other threads run on, so a rank beats and reads commands, and only its step never ends.
"""

import signal
import time

HANG = signal.SIGUSR1


def _hang(*_: object) -> None:
    while True:
        time.sleep(3600)


signal.signal(HANG, _hang)
