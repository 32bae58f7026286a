"""Carries out a command when its parent is gone, however that happened: resumes what a watch has paused.

    python -I -S release.py COMMAND ARGUMENTS...

Standard input is a pipe that only the parent holds. Standard library only.
"""

import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
