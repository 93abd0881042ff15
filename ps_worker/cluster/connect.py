"""A client of a cluster whose servers may not be up yet."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from ctr_ps.protos.errors import (
    CtrPsError,
    ProtocolError,
    RecoveringError,
    TransportError,
    UsageError,
)
from ctr_ps.protos.format import require_format
from ctr_ps.protos.placement import FIRST_EPOCH, NO_SERVER, STARTED_EMPTY, ShardMap
from ctr_ps.protos.role import HeterRole, WorkerRole
from ctr_ps.protos.store import Member
from ctr_ps.protos.wire.calls import GET_MAP, GET_STATUS
from ctr_ps.protos.wire.requests import Join
from ctr_ps.protos.wire.security.credentials import TLS_CA
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.grpc_transport import ASLEEP_S, Deadlines, GrpcTransport
from ctr_ps.ps_worker.cluster.joined_worker import ABORT_S, abort_on_each
from ctr_ps.ps_worker.cluster.placement import settle
from ctr_ps.ps_worker.cluster.transport import Transport

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 1.0
LOOK_S = 10.0
_SHORTEST_LOOK_S = 0.1
START_S = 10.0
"""For servers that are started together with a worker that ends: they serve some seconds later."""
_SIGNS_OF_TLS = ("WRONG_VERSION_NUMBER", "Socket closed", "Connection reset")


def connect(
    endpoints: Sequence[str],
    *,
    connect_timeout_s: float = 300.0,
    deadlines: Deadlines | None = None,
    retry_s: float | None = None,
    stream: bool = True,
) -> ClusterClient:
    """Returns a client once all servers answer; see `GrpcTransport`, and `wait_for_servers` for errors.

    `endpoints` are in the order that all processes of the job share.
    """
    transport = GrpcTransport(endpoints, deadlines, retry_s=retry_s, stream=stream)
    try:
        wait_for_servers(transport, connect_timeout_s)
    except CtrPsError:
        transport.close()
        raise
    return ClusterClient(transport)


def abort_unjoined(role: WorkerRole | HeterRole, error: BaseException) -> None:
    """Ends the job by an error of a worker that has not joined, if the servers answer soon.

    It joins to do so, on each of its servers by itself: its list of them may be what is wrong.
    """
    name = role.members.name(role.worker_index)
    # At once: servers that are not there are waited for first.
    logger.error("%s ends with an error, which ends the job: %s", name, error)
    member = Member(role.worker_index, secrets.randbits(63))
    join = Join(member=member, terms=role.members.terms)
    deadlines = Deadlines(rpc_s=ABORT_S, wait_s=0.0)
    try:
        with closing(GrpcTransport(role.endpoints, deadlines, retry_s=0.0)) as transport:
            abort_on_each(transport, join, error, ready_s=START_S)
    except UsageError as failure:  # its credentials
        logger.warning("other workers could not be told of the error: %s", failure)


def wait_for_servers(
    transport: Transport,
    limit_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all servers answer, and says at once and then every ten seconds which do not yet.

    Raises:
        TransportError: If some do not answer within `limit_s` of the start, or of the last progress of one
            that recovers; lists them.
        ProtocolError: If a server is not the one that its place in the list says, or has another format.
    """
    next_log = now = clock()
    waited_s = 0.0
    missing: Sequence[int] = transport.shard_map.servers
    look_s = FIRST_LOOK_S
    progress: dict[int, int] = {}
    while True:
        looked = clock()
        wait_s = min(look_s, max(limit_s - waited_s - (looked - now), _SHORTEST_LOOK_S))
        failures, newest = _look(transport, missing, wait_s)
        before, now = now, clock()
        # Longer, and this process was stopped.
        at_most = FIRST_LOOK_S + wait_s + ASLEEP_S
        waited_s += min(now - before, at_most)
        if newest is not None and newest.epoch > transport.shard_map.epoch:
            transport.use(newest)
            settle(transport)
            missing = newest.servers
            continue
        if not failures:
            return
        missing, look_s = sorted(failures), LOOK_S
        for server, failure in failures.items():
            if isinstance(failure, RecoveringError) and failure.progress > progress.get(server, -1):
                progress[server], waited_s = failure.progress, min(now - looked, at_most)
        shard_map = transport.shard_map
        names = [shard_map.endpoint_of(server) for server in missing]
        if waited_s >= limit_s:
            raise TransportError(
                f"servers {', '.join(names)} did not answer within {limit_s:g} s: are they running, and is "
                f"the list of endpoints right? Last failure: {_why(transport, missing[-1], failures)}"
            )
        if clock() >= next_log:
            next_log = clock() + LOOK_S
            logger.info(
                "waiting for servers missing=%s of=%d: %s",
                ",".join(names),
                shard_map.num_servers,
                _why(transport, missing[-1], failures),
            )
        # A look takes its time while nothing listens, but none where something else than a server does.
        sleep(max(looked + FIRST_LOOK_S - clock(), 0.0))


def _look(
    transport: Transport, servers: Sequence[int], wait_s: float
) -> tuple[dict[int, TransportError], ShardMap | None]:
    """Asks servers who they are; returns those that did not answer within `wait_s`, and the first one's map.

    They are judged by that map: a machine of the list may have left, and wait to be added again. Without it,
    one that does not fit counts as one that did not answer.

    Raises ProtocolError if one is not the server that its place in the map says, or has another format.
    """
    calls = {server: transport.call(server, GET_STATUS, None, ready_s=wait_s) for server in servers}
    failures: dict[int, TransportError] = {}
    shard_map = transport.shard_map
    newest = None
    try:
        newest = transport.call(0, GET_MAP, None, ready_s=wait_s).result().shard_map
    except TransportError as failure:
        failures[0] = failure
    if newest is not None and newest.epoch > shard_map.epoch:
        return {}, newest
    for server, call in calls.items():
        try:
            status = call.result()
            is_moved = newest is not None and shard_map.epoch > FIRST_EPOCH
            if is_moved and status.server_index == NO_SERVER:
                settle(transport, ready_s=wait_s)  # it was away when the move ended that added it
                status = transport.call(server, GET_STATUS, None, ready_s=wait_s).result()
                if status.server_index == NO_SERVER:
                    raise TransportError(f"{shard_map.endpoint_of(server)} {STARTED_EMPTY}")
        except TransportError as failure:
            failures[server] = failure
            continue
        require_format(status.format, f"server {shard_map.endpoint_of(server)}")
        if status.server_index != server or (
            shard_map.epoch == FIRST_EPOCH == status.shard_map_epoch
            and status.num_servers != shard_map.num_servers
        ):
            is_spare = status.server_index == NO_SERVER
            other = f"is server {status.server_index} of {status.num_servers}"
            why = (
                f"{shard_map.endpoint_of(server)} {'waits to be added' if is_spare else other}, but "
                f"server {server} of {shard_map.num_servers} in this worker's list: give all processes the "
                "same list of servers"
            )
            if newest is not None:
                raise ProtocolError(why)
            failures[server] = TransportError(why)
    return failures, newest


def _why(transport: Transport, server: int, failures: Mapping[int, TransportError]) -> str:
    """Returns why a server does not answer, or is not the one that is waited for."""
    try:
        transport.call(server, GET_STATUS, None, ready_s=0).result()
    except CtrPsError as failure:
        why = str(failure)
    else:
        return f"{failures[server]} (it answers now)"
    if any(sign in why for sign in _SIGNS_OF_TLS):
        return f"{why}; does only one side use TLS ({TLS_CA})?"
    return why
