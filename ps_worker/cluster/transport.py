"""The client's seam: calls to one server at a time.

`ps_worker.cluster.grpc_transport.GrpcTransport` is a transport over the network; tests have others.
"""

from typing import Protocol, TypeVar

from ctr_ps.protos.futures import Answer
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.wire.calls import Call

Q = TypeVar("Q")
A = TypeVar("A")


class Transport(Protocol):
    """Calls to the servers of a shard map, by their indices. Thread-safe."""

    shard_map: ShardMap  # with the endpoints of its servers
    # a server that went away is worth waiting for: restarted, it goes on where it was
    servers_recover: bool
    retries: int  # calls that were sent again

    def call(
        self, server: int, call: Call[Q, A], argument: Q, *, ready_s: float | None = None
    ) -> Answer[A]:
        """Starts a call; it is on its way, and its argument may be reused, when this returns.

        The answer raises what the server raised, or TransportError if the server cannot be reached or does
        not answer in time. It is sent again until then, whether or not anybody waits for its answer.

        With `ready_s`, a server that is not there yet is waited for during so many seconds of the call. None:
        such a server is an error at once, and the call's own deadline counts. 0: it is one, too, which says
        why, where one that was waited for says only that the time ran out; the call is not sent again.
        """
        ...

    def use(self, shard_map: ShardMap) -> None:
        """Has the servers of a newer map from now on."""
        ...

    def close(self) -> None:
        """Ends all calls that are on their way, and the connections."""
        ...


def call_all(
    transport: Transport, call: Call[Q, A], argument: Q, *, ready_s: float | None = None
) -> list[Answer[A]]:
    """Starts a call to every server; see `Transport.call`."""
    return [
        transport.call(server, call, argument, ready_s=ready_s)
        for server in transport.shard_map.servers
    ]
