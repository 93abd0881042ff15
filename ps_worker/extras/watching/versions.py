"""Versions of servers, as lines of JSON: what `ps-launch --chaos` sees of a run's steps.

    python -m ctr_ps.ps_worker.extras.watching.versions 127.0.0.1:7164,127.0.0.1:7165
    [12, 12]
    [13, null]

A line ten times a second; null: the server does not answer. It ends when nobody reads it.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable

from ctr_ps.protos.store import ServerStatus, Version
from ctr_ps.ps_worker.extras.watching.servers import ANSWER_S, Servers

LOOK_S = 0.1


def versions_of(servers: Servers, answer_s: float = ANSWER_S) -> list[Version | None]:
    """Returns the version of each server; None: it does not answer."""
    return [
        status.store.version if isinstance(status, ServerStatus) else None
        for status in servers.look(answer_s)
    ]


def watch(
    servers: Servers,
    write: Callable[[str], object],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Writes a line for each look, until nobody reads them."""
    with contextlib.suppress(BrokenPipeError):
        while True:
            write(f"{json.dumps(versions_of(servers))}\n")
            sleep(LOOK_S)


def main() -> None:
    """Watches the servers that the first argument lists."""
    with Servers(sys.argv[1].split(",")) as servers:
        watch(servers, lambda line: print(line, end="", flush=True))


if __name__ == "__main__":
    main()
