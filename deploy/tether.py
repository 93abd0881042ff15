"""Becomes another program that the kernel ends together with the process that started it.

    python tether.py PARENT_PID PROGRAM [ARGUMENT]...

Run as a file of its own, before the program: code between fork and exec (`preexec_fn`) is not safe
in a process with threads. The setting survives exec, holds for this one process and not for its
children, and exists on Linux only; elsewhere the program runs untethered.
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
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit(128 + signal.SIGKILL)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
