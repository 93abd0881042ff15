"""Versions of servers, as lines of JSON: what `ps-launch --chaos` sees of a run's steps.

    python -m ps_worker.cluster.versions 127.0.0.1:7164,127.0.0.1:7165
    [12, 12]
    [13, null]

A line ten times a second; null: the server does not answer. It ends when nobody reads it.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence

import grpc

from protos.store import ServerStatus, Version
from protos.wire.calls import GET_STATUS, SERVICE
from protos.wire.channel import CHANNEL_OPTIONS
from protos.wire.security.credentials import Credentials, open_channel

LOOK_S = 0.1
ANSWER_S = 1.0

_OPTIONS = {
    **dict(CHANNEL_OPTIONS),
    # The time until a server that was started again is seen counts as the time that it was away.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 100,
}


class Versions:
    """The versions of servers. For one thread; close it."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        """Opens a channel to each server, whether it answers or not."""
        credentials = Credentials.from_environment()
        self._metadata = credentials.metadata()
        self._channels = [
            open_channel(endpoint, credentials, list(_OPTIONS.items())) for endpoint in endpoints
        ]
        self._methods = [
            channel.unary_unary(
                f"/{SERVICE}/{GET_STATUS.name}",
                request_serializer=GET_STATUS.request.message.SerializeToString,
                response_deserializer=GET_STATUS.answer.message.FromString,
            )
            for channel in self._channels
        ]

    def look(self, answer_s: float = ANSWER_S) -> list[Version | None]:
        """Returns the version of each server; None: it does not answer within `answer_s` seconds."""
        request = GET_STATUS.request.encode(None)
        calls = [
            method.future(request, timeout=answer_s, metadata=self._metadata)
            for method in self._methods
        ]
        versions: list[Version | None] = []
        for call in calls:
            try:
                status: ServerStatus = GET_STATUS.answer.decode(call.result())
                versions.append(status.store.version)
            except grpc.RpcError:
                versions.append(None)
        return versions

    def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels:
            channel.close()


def watch(
    versions: Versions,
    write: Callable[[str], object],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Writes a line for each look, until nobody reads them."""
    with contextlib.suppress(BrokenPipeError):
        while True:
            write(f"{json.dumps(versions.look())}\n")
            sleep(LOOK_S)


def main() -> None:
    """Watches the servers that the first argument lists."""
    with contextlib.closing(Versions(sys.argv[1].split(","))) as versions:
        watch(versions, lambda line: print(line, end="", flush=True))


if __name__ == "__main__":
    main()
