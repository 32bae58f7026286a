"""The last resort against processes left behind: ends a process group when the supervisor is gone.

    python -I -S guard.py GROUP

Standard input is a pipe that only the supervisor holds. It ends when the supervisor dies, however that happens, and
also when the worker hangs with the interpreter locked and could not notice by itself. Standard library only: it
starts in milliseconds and stays small.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    # Ctrl+C and `docker stop` reach every process; this one must outlive the supervisor.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(sys.argv[1]), signal.SIGKILL)


if __name__ == "__main__":
    main()
