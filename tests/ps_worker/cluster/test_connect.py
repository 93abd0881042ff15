"""Waiting for servers that are not up yet, on a transport and a clock of the test."""

import logging

import pytest

from protos.errors import ProtocolError, TransportError
from protos.store import ServerStatus, Staleness, StoreStatus
from protos.wire.calls import GET_STATUS, Call
from ps_worker.cluster.connect import FIRST_LOOK_S, LOOK_S, connect, wait_for_servers
from tests.support.cluster import cluster
from tests.support.local_transport import Answer

STATUS = StoreStatus(
    version=0, tables={}, examples={}, left=frozenset(), staleness=Staleness(), progress={}
)


class Servers:
    """Server `i` answers from time `up_at[i]` on; a look at one that does not passes the time."""

    def __init__(self, up_at: list[float], identities: list[tuple[int, int]] | None = None) -> None:
        self.endpoints = [f"ps-{server}:1" for server in range(len(up_at))]
        self.now = 0.0
        self.looks: list[tuple[int, float]] = []
        self.num_failures = 0
        self._up_at = up_at
        self._identities = identities or [(server, len(up_at)) for server in range(len(up_at))]

    def call(
        self, server: int, call: Call[None, ServerStatus], _: None, *, ready_s: float
    ) -> Answer[ServerStatus]:
        assert call is GET_STATUS
        self.looks.append((server, ready_s))
        until = self.now + ready_s

        def answer() -> ServerStatus:
            if self._up_at[server] > until:
                self.now = max(self.now, until)
                raise TransportError(f"{self.endpoints[server]} refused")
            self.now = max(self.now, self._up_at[server])
            return ServerStatus(STATUS, *self._identities[server])

        return Answer(answer)

    def fail(self, server: int) -> ServerStatus:
        self.num_failures += 1
        raise TransportError(f"{self.endpoints[server]} is no server")

    def wait(self, limit_s: float) -> None:
        wait_for_servers(self, limit_s, clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


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
        "waiting for servers missing=ps-1:1,ps-2:1 of=3",
        "waiting for servers missing=ps-1:1 of=3",
    ]
    assert servers.looks[3:] == [(1, LOOK_S), (2, LOOK_S), (1, LOOK_S)]
    assert servers.now == 15.0


def test_servers_that_never_come_are_listed_when_the_time_is_up():
    servers = Servers([0.0, 1e9, 1e9])

    with pytest.raises(
        TransportError,
        match=r"no answer within 25 s from servers ps-1:1, ps-2:1: .* last failure: ps-2:1 refused",
    ):
        servers.wait(25.0)

    assert servers.now == pytest.approx(25.0)


def test_something_else_that_answers_is_not_asked_without_pause(caplog):
    servers = Servers([0.0])
    servers.call = lambda server, *_, ready_s: Answer(lambda: servers.fail(server))

    with caplog.at_level(logging.INFO), pytest.raises(TransportError, match="is no server"):
        servers.wait(25.0)

    assert servers.num_failures <= 26
    assert len(caplog.messages) == 3


@pytest.mark.parametrize("identity", [(1, 2), (0, 3)], ids=["other-place", "other-number"])
def test_server_that_is_not_the_one_of_the_list_is_refused(identity):
    servers = Servers([0.0, 0.0], [identity, (1, 2)])

    with pytest.raises(
        ProtocolError, match=rf"ps-0:1 is server {identity[0]} of {identity[1]}, but"
    ):
        servers.wait(60.0)


def test_client_sends_calls_again_for_as_long_as_it_was_told() -> None:
    with cluster() as servers, connect(servers.endpoints, retry_s=0.1) as client:
        servers.stop_server(0)

        with pytest.raises(TransportError, match=r"tried \d+ times in 0\.1 s"):
            client.status()
