"""The status of servers, of whichever answer. It joins no job, so it may come and go.

As a program, what `ps-launch --chaos` sees of a run's steps: the versions of servers as lines of JSON.

    python -m ctr_ps.ps_worker.extras.watching.servers 127.0.0.1:7164,127.0.0.1:7165
    [12, 12]
    [13, null]

A line ten times a second; null: the server does not answer. It ends when nobody reads it.
"""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import grpc

from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.store import ServerStatus, Version
from ctr_ps.protos.wire.calls import GET_STATUS, SERVICE
from ctr_ps.protos.wire.channel import CHANNEL_OPTIONS
from ctr_ps.protos.wire.grpc_status import error_of
from ctr_ps.protos.wire.security.credentials import Credentials, open_channel

ANSWER_S = 1.0
LOOK_S = 0.1

_OPTIONS = {
    **dict(CHANNEL_OPTIONS),
    # The time until a server that was started again is seen counts as the time that it was away.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 100,
}


class Servers(AbstractContextManager["Servers"]):
    """Servers to look at, until the end of a `with`. For one thread."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        """Opens a channel to each server, whether it answers or not; raises UsageError for credentials."""
        self.endpoints = tuple(endpoints)
        credentials = Credentials.from_environment()
        credentials.metadata()  # raises where there is no token
        self._credentials = credentials
        self._channels = [
            open_channel(endpoint, credentials, list(_OPTIONS.items())) for endpoint in endpoints
        ]
        self._methods = [
            channel.unary_unary(f"/{SERVICE}/{GET_STATUS.name}") for channel in self._channels
        ]

    def look(self, answer_s: float = ANSWER_S) -> list[ServerStatus | CtrPsError]:
        """Returns the status of each server, or why it has none to show within `answer_s` seconds."""
        request = GET_STATUS.request.encode(None)
        metadata = self._credentials.metadata()  # its file may have another token by now
        calls = [
            method.future(request, timeout=answer_s, metadata=metadata) for method in self._methods
        ]
        found: list[ServerStatus | CtrPsError] = []
        for endpoint, call in zip(self.endpoints, calls, strict=True):
            try:
                found.append(GET_STATUS.answer.decode(call.result()))
            except grpc.RpcError as failure:
                found.append(error_of(failure, endpoint, GET_STATUS.name))
            except CtrPsError as error:  # of decoding
                found.append(error)
        return found

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()


def versions_of(servers: Servers, answer_s: float = ANSWER_S) -> list[Version | None]:
    """Returns the version of each server; None: it does not answer."""
    return [
        status.store.version if isinstance(status, ServerStatus) else None
        for status in servers.look(answer_s)
    ]


def main() -> None:
    """Writes the versions of the servers that the first argument lists, until nobody reads them."""
    with Servers(sys.argv[1].split(",")) as servers, contextlib.suppress(BrokenPipeError):
        while True:
            print(json.dumps(versions_of(servers)), flush=True)
            time.sleep(LOOK_S)


if __name__ == "__main__":
    main()
