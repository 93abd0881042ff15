"""A process that appends to an update log until it is killed.

    python -m tests.support.append_target FOLDER SYNC

Two threads append records "<thread>:<number>" with a payload; a third begins segments. Each line of the
standard output is an acknowledged record.
"""

import os
import sys
import threading

from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.durability.update_log import LogSync, UpdateLog

THREADS = 2
SIZES = (0, 10, 100_000, 3)


def main(folder: str, sync: str) -> None:
    log = UpdateLog.create(read_log(folder), sync=LogSync(sync))

    def append(thread: int) -> None:
        number = 0
        while True:
            payload = f"{thread}:{number} ".encode() + bytes(SIZES[number % len(SIZES)])
            log.append("push", payload).result()
            os.write(1, f"{thread}:{number}\n".encode())  # one write: the threads share the pipe
            number += 1

    for thread in range(THREADS):
        threading.Thread(target=append, args=(thread,), daemon=True).start()
    while True:
        log.begin_segment([Record("state", b"head")])


if __name__ == "__main__":
    main(*sys.argv[1:])
