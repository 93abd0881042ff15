"""Replaces itself by a program that the kernel kills when its parent dies (PR_SET_PDEATHSIG).

    python tether.py PARENT_PID PROGRAM [ARGUMENT]...

A program of its own, because code between fork and exec (`preexec_fn`) is not safe in a process with
threads. The setting survives exec and is not inherited by children. Linux only: elsewhere the program just
runs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Ties this process to its parent and replaces it by the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit(128 + signal.SIGKILL)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
