"""Processes to be killed while they save: forked from one that has everything imported and compiled.

A line of JSON on its standard input forks a process, whose number is the answer on its standard output:

    {"role": "server", "port": 1234}
    {"role": "worker", "port": 1234, "url": "...", "first": 7, "log": "..."}

A server is that of `ps-server`. A worker pushes in one thread and saves in another: saves are numbered in an
attachment, from `first` on, and a line of the log confirms each.
"""

import ctypes
import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path

from ctr_ps.deploy.tether import PR_SET_PDEATHSIG

NUMBER = "number"


def serve(port: int) -> None:
    from ctr_ps.protos.role import ServerRole
    from ctr_ps.ps_server.rpc.run import run_server
    from ctr_ps.ps_server.settings import ServerSettings

    role = ServerRole(endpoints=(f"127.0.0.1:{port}",), server_index=0, num_workers=1)
    run_server(role, ServerSettings(stay=True))


def work(port: int, url: str, first: int, log: str) -> None:
    from ctr_ps.protos.store import SaveRequest
    from ctr_ps.ps_worker.cluster.connect import connect
    from tests.support.stores import INCARNATION, declare, push_id, random_gradients

    with connect([f"127.0.0.1:{port}"], connect_timeout_s=30) as store:
        store.join(
            0, INCARNATION, terms={}
        ).result()  # the same after each kill: this worker may come back
        declare(store)

        def push() -> None:
            for sequence in itertools.count():
                store.push_grad(random_gradients(sequence), push_id(sequence=sequence)).result()

        threading.Thread(target=push, daemon=True).start()
        with Path(log).open("a", buffering=1) as lines:
            for number in itertools.count(first):
                attachments = {NUMBER: str(number).encode()}
                store.save(SaveRequest(url=url, attachments=attachments))
                lines.write(f"{number}\n")


def main() -> None:
    import s3fs  # noqa: F401 (as most of what follows, here once instead of in each fork)

    import ctr_ps.ps_worker.cluster.connect  # noqa: F401
    from ctr_ps.ps_server.precompile import KERNELS

    KERNELS.prepare_all()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that were killed
    for line in sys.stdin:
        task = json.loads(line)
        role = {"server": serve, "worker": work}[task.pop("role")]
        if not (process := os.fork()):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # they work on for ever
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            role(**task)
            os._exit(1)
        print(process, flush=True)


if __name__ == "__main__":
    main()
