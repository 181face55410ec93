"""Entry point of a rank process, started by exec by its stage worker.

Three threads: the reader takes commands off the socket and posts a step's
receives at once; the main loop applies what is queued, in order; the heartbeat
says every second that the process is not frozen. When the socket closes, the
worker is gone and the process leaves.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from services.launch.process import TIMER_SLACK_SECONDS, allow_late_timers, die_with_parent
from services.telemetry.logging import setup_logging
from stage_worker.rank_arguments import RankArguments, process_name

HEARTBEAT_SECONDS = 1.0
EXIT_WORKER_GONE = 3


def main() -> None:
    """Runs a rank until its worker stops it or goes away; does not return."""
    arguments = RankArguments.parse(sys.argv[1:])
    die_with_parent(arguments.parent_pid)
    allow_late_timers(TIMER_SLACK_SECONDS)
    setup_logging(process=process_name(arguments.place))
    # Torch sizes its thread pool from this when it is imported, hence the late import.
    os.environ["OMP_NUM_THREADS"] = str(arguments.num_threads)
    from stage_worker.rank_loop import RankLoop

    loop = RankLoop(arguments, socket.socket(fileno=arguments.fd))

    def read() -> None:
        try:
            loop.read_commands()
        finally:
            # The main loop may wait for a neighbour and could not leave by itself.
            os._exit(EXIT_WORKER_GONE)

    def beat() -> None:
        while True:
            loop.send_alive()
            time.sleep(HEARTBEAT_SECONDS)

    loop.send_hello()
    for thread in (read, beat):
        threading.Thread(target=thread, name=thread.__name__, daemon=True).start()
    loop.run()
    # Not sys.exit: threads of a collective library may wait for peers that are gone.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
