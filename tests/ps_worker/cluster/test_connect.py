"""Waiting for servers that are not up yet, on a transport and a clock of the test."""

import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from ctr_ps.protos.errors import ProtocolError, RecoveringError, TransportError
from ctr_ps.protos.format import FORMAT
from ctr_ps.protos.placement import NO_SERVER, NUM_PLACES, ShardMap
from ctr_ps.protos.store import ServerStatus, Staleness, StoreStatus
from ctr_ps.protos.store.moves import MapState
from ctr_ps.protos.wire.calls import END_MOVE, GET_MAP, GET_STATUS, Call
from ctr_ps.protos.wire.requests import EndMove
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.connect import FIRST_LOOK_S, LOOK_S, connect, wait_for_servers
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from tests.support.certificates import CertificateAuthority
from tests.support.cluster import cluster
from tests.support.local_transport import Answer
from tests.support.processes import free_port

STATUS = StoreStatus(
    version=0, tables={}, examples={}, left=frozenset(), staleness=Staleness(), progress={}
)
UNMOVED = {
    "server": 0,
    "members": "1 worker",
    "move": "",
    "last_move": "",
    "tables": [],
    "blocks": [],
    "rows": [],
}


class Servers:
    """Server `i` answers from time `up_at[i]` on; a look at one that does not passes the time."""

    def __init__(
        self,
        up_at: list[float],
        identities: list[tuple[int, int]] | None = None,
        format: int = FORMAT,
    ) -> None:
        self.endpoints = [f"ps-{server}:1" for server in range(len(up_at))]
        self.shard_map = self.newest = ShardMap.of(len(up_at), self.endpoints)
        self.now = 0.0
        self.looks: list[tuple[int, float]] = []
        self.num_failures = 0
        self._up_at, self._format = up_at, format
        self._identities = identities or [(server, len(up_at)) for server in range(len(up_at))]

    def call(
        self, server: int, call: Call[None, Any], _: None, *, ready_s: float | None = None
    ) -> Answer[ServerStatus | MapState]:
        if ready_s and call is GET_STATUS:
            self.looks.append((server, ready_s))
        until = self.now + (ready_s or 0.0)

        def answer() -> ServerStatus | MapState:
            if self._up_at[server] > until:
                self.now = max(self.now, until)
                raise TransportError(f"{self.endpoints[server]} refused")
            self.now = max(self.now, self._up_at[server])
            return self.says(server, call)

        return Answer(answer)

    def says(self, server: int, call: Call[None, Any]) -> ServerStatus | MapState:
        if call is GET_STATUS:
            return ServerStatus(
                STATUS,
                *self._identities[server],
                shard_map_epoch=self.newest.epoch,
                format=self._format,
            )
        assert call is GET_MAP
        return MapState(shard_map=self.newest, **UNMOVED)

    def use(self, shard_map: ShardMap) -> None:
        self.shard_map = shard_map

    def fail(self, server: int, call: Call[None, Any]) -> ServerStatus:
        self.num_failures += call is GET_STATUS
        raise TransportError(f"{self.endpoints[server]} is no server")

    def wait(self, limit_s: float) -> None:
        wait_for_servers(self, limit_s, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


class Recovering(Servers):
    """A server that makes a shard or call a second until it serves, or none."""

    def __init__(self, until: float, progress: int | None = None) -> None:
        super().__init__([until])
        self._progress = progress

    def call(
        self, server: int, call: Call[None, Any], _: None, *, ready_s: float
    ) -> Answer[ServerStatus | MapState]:
        def answer() -> ServerStatus | MapState:
            if self.now < self._up_at[server]:
                done = int(self.now) if self._progress is None else self._progress
                raise RecoveringError("recovering", progress=done)
            return self.says(server, call)

        return Answer(answer)


def test_server_that_recovers_is_waited_for_while_it_makes_progress() -> None:
    servers = Recovering(until=60.0)
    servers.wait(limit_s=5.0)
    assert servers.now >= 60.0

    with pytest.raises(TransportError, match=r"did not answer within 5 s.*recovering"):
        Recovering(until=60.0, progress=7).wait(limit_s=5.0)


def test_server_of_a_format_two_further_is_refused_by_name() -> None:
    Servers([0.0], format=FORMAT + 1).wait(limit_s=5.0)

    told = f"^server ps-0:1 has format {FORMAT + 2} of .* but this process has format {FORMAT}, "
    with pytest.raises(ProtocolError, match=told):
        Servers([0.0], format=FORMAT + 2).wait(limit_s=5.0)


def test_servers_that_are_up_are_asked_once_and_nothing_is_said(caplog):
    servers = Servers([0.0, 0.0])

    with caplog.at_level(logging.INFO):
        servers.wait(60.0)

    assert servers.looks == [(0, FIRST_LOOK_S), (1, FIRST_LOOK_S)]
    assert caplog.messages == []


def test_missing_servers_are_named_at_once_and_then_every_ten_seconds(caplog):
    servers = Servers([0.0, 15.0, 5.0])

    with caplog.at_level(logging.INFO):
        servers.wait(60.0)

    assert caplog.messages == [
        "waiting for servers missing=ps-1:1,ps-2:1 of=3: ps-2:1 refused",
        "waiting for servers missing=ps-1:1 of=3: ps-1:1 refused",
    ]
    assert servers.looks[3:] == [(1, LOOK_S), (2, LOOK_S), (1, LOOK_S)]
    assert servers.now == 15.0


def test_servers_of_a_newer_map_are_waited_for_in_place_of_the_list() -> None:
    """Of the three in the list, the second has left the cluster, and another was added."""
    servers = Servers([0.0, 1e9, 0.0, 5.0])
    servers.shard_map = ShardMap.of(3, servers.endpoints[:3])
    owners = tuple([0, 2, 3, 0] * 256)
    servers.newest = ShardMap(2, (0, 2, 3), owners, ("ps-0:1", "ps-2:1", "ps-3:1"))

    servers.wait(60.0)

    assert servers.shard_map is servers.newest
    assert servers.now == 5.0


@pytest.mark.parametrize("up_at", [0.0, 5.0], ids=["first-is-there", "first-comes-later"])
def test_server_of_the_list_that_waits_to_be_added_again_is_not_asked_for(up_at: float) -> None:
    servers = Servers([up_at, 0.0], [(0, 1), (NO_SERVER, 1)])
    servers.newest = ShardMap(3, (0,), (0,) * NUM_PLACES, ("ps-0:1",))

    servers.wait(60.0)

    assert servers.shard_map is servers.newest
    assert servers.now == up_at


def test_server_of_the_list_that_waits_to_be_added_at_first_is_told_as_that() -> None:
    servers = Servers([0.0, 0.0], [(0, 2), (NO_SERVER, 1)])

    with pytest.raises(ProtocolError, match=r"^ps-1:1 waits to be added, but server 1 of 2 in "):
        servers.wait(60.0)


def test_server_that_was_added_and_started_empty_is_waited_for_as_one_that_is_away(caplog) -> None:
    """Stopped, and started with its update log, it is the one of the map again."""
    servers = Servers([0.0, 0.0], [(0, 2), (NO_SERVER, 1)])
    servers.newest = replace(servers.shard_map, epoch=2)
    sleep = servers._sleep

    def started_again(seconds: float) -> None:
        sleep(seconds)
        if servers.now > 5.0:
            servers._identities[1] = (1, 2)

    servers._sleep = started_again
    with caplog.at_level(logging.INFO):
        servers.wait(60.0)

    assert 5.0 < servers.now < 20.0
    assert (
        "ps-1:1 started empty, and waits to be added: stop it, and start it with its" in caplog.text
    )


def test_server_that_was_added_and_away_at_the_end_of_that_move_is_told() -> None:
    """It is restarted after the servers that were there have been asked."""
    servers = Servers([0.0, 3.0], [(0, 1), (NO_SERVER, 1)])
    servers.shard_map = ShardMap.of(1, servers.endpoints[:1])
    servers.newest = ShardMap(2, (0, 1), (0, 1) * (NUM_PLACES // 2), tuple(servers.endpoints))
    call, says, told = servers.call, servers.says, []

    def told_too(server: int, of: Call[None, Any], argument: Any, **ready: Any) -> Answer[Any]:
        if of is not END_MOVE:
            return call(server, of, None, **ready)
        told.append((server, argument))
        servers._identities[1] = (1, 2)
        return Answer(lambda: None)

    def says_move(server: int, of: Call[None, Any]) -> ServerStatus | MapState:
        answer = says(server, of)
        if of is not GET_MAP:
            return answer
        return replace(answer, **({"server": None, "move": "X"} if server else {"last_move": "X"}))

    servers.call, servers.says = told_too, says_move
    servers.wait(60.0)

    assert told == [(1, EndMove(token="X", is_committed=True))]


def test_first_server_that_is_away_is_waited_for_within_the_limit_where_another_is_to_be_told() -> (
    None
):
    servers = Servers([0.0, 0.0], [(0, 2), (NO_SERVER, 1)])
    servers.newest = replace(servers.shard_map, epoch=2)
    call, asked = servers.call, []

    def away(server: int, of: Call[None, Any], _: None, *, ready_s: float | None = None) -> Any:
        if server or of is not GET_MAP:
            return call(server, of, None, ready_s=ready_s)
        asked.append(ready_s)
        if len(asked) < 3:
            return call(server, of, None, ready_s=ready_s)

        def never() -> None:
            servers.now += 1000.0 if ready_s is None else ready_s
            raise TransportError("ps-0:1 refused")

        return Answer(never)

    servers.call = away
    with pytest.raises(TransportError, match="did not answer within 25 s"):
        servers.wait(25.0)
    assert servers.now < 40.0


def test_time_for_which_this_process_was_stopped_is_not_waited() -> None:
    servers = Servers([100.0])
    call = servers.call

    def away() -> ServerStatus:
        servers.now, servers.call = 150.0, call  # the process goes on
        raise TransportError("ps-0:1 refused")

    servers.call = lambda *_, **__: Answer(away)
    servers.wait(60.0)

    assert servers.now == 150.0


def test_first_server_that_is_away_again_is_waited_for() -> None:
    servers = Servers([0.0, 9.0])

    def says(server: int, call: Call[None, Any]) -> ServerStatus | MapState:
        if call is GET_MAP and servers.now < 5.0:
            raise TransportError("ps-0:1 refused")
        return Servers.says(servers, server, call)

    servers.says = says
    servers.wait(60.0)

    assert servers.now == 9.0


def test_servers_that_never_come_are_listed_when_the_time_is_up():
    servers = Servers([0.0, 1e9, 1e9])

    with pytest.raises(
        TransportError,
        match=r"servers ps-1:1, ps-2:1 did not answer within 25 s: .* Last failure: ps-2:1 refused",
    ):
        servers.wait(25.0)

    assert servers.now == pytest.approx(25.0)


def test_something_else_that_answers_is_not_asked_without_pause(caplog):
    servers = Servers([0.0])
    servers.says = servers.fail

    with caplog.at_level(logging.INFO), pytest.raises(TransportError, match="is no server"):
        servers.wait(25.0)

    assert servers.num_failures <= 26 + 4, "and once for each message"
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("identity", [(1, 2), (0, 3)], ids=["other-place", "other-number"])
def test_server_that_is_not_the_one_of_the_list_is_refused(identity):
    servers = Servers([0.0, 0.0], [identity, (1, 2)])

    with pytest.raises(
        ProtocolError, match=rf"ps-0:1 is server {identity[0]} of {identity[1]}, but"
    ):
        servers.wait(60.0)


@pytest.mark.parametrize(
    ("has_certificate", "has_ca", "why"),
    [(True, False, "Socket closed"), (False, True, "WRONG_VERSION_NUMBER")],
    ids=["tls-asked-plainly", "plain-asked-by-tls"],
)
def test_tls_on_one_side_is_told_while_it_waits_and_when_it_gives_up(
    caplog, tmp_path, has_certificate, has_ca, why
) -> None:
    authority = CertificateAuthority(tmp_path)
    theirs = authority.credentials("server", mutual=False) if has_certificate else Credentials()
    ours = Credentials(ca=str(authority.ca)) if has_ca else Credentials()

    with cluster(num_servers=0) as servers, caplog.at_level(logging.INFO):
        servers.start_server(ParameterStore(num_workers=1), credentials=theirs)
        transport = GrpcTransport(servers.endpoints, credentials=ours)
        with pytest.raises(TransportError) as ended:
            wait_for_servers(transport, 1.5)
        transport.close()

    hint = r"does only one side use TLS \(CTR_PS_TLS_CA\)"
    waiting = next(each for each in caplog.messages if each.startswith("waiting for servers"))
    for said in (waiting, str(ended.value)):
        assert re.search(f"({why}|reset).*{hint}", said), said


def test_server_that_is_not_there_is_told_as_that(caplog) -> None:
    with free_port() as port:
        pass
    transport = GrpcTransport([f"127.0.0.1:{port}"])

    with caplog.at_level(logging.INFO), pytest.raises(TransportError, match="Connection refused"):
        wait_for_servers(transport, 1.5)
    transport.close()

    assert "Connection refused" in caplog.messages[0]
    assert "TLS" not in caplog.messages[0]


def test_client_sends_calls_again_for_as_long_as_it_was_told() -> None:
    with cluster() as servers, connect(servers.endpoints, retry_s=0.1) as client:
        servers.stop_server(0)

        with pytest.raises(TransportError, match=r"tried \d+ times in 0\.1 s"):
            client.status()
