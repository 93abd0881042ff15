"""Servers with tokens and certificates: who may make which call, and what they see who may not."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ctr_ps.protos.errors import AccessError, UnknownCallerError
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.store import Missing
from ctr_ps.protos.wire import calls
from ctr_ps.protos.wire.calls import CALLS, END_MOVE, Call
from ctr_ps.protos.wire.heter import HETER_CALLS
from ctr_ps.protos.wire.requests import EndMove, PullSparse
from ctr_ps.protos.wire.security.access import Access
from ctr_ps.protos.wire.security.credentials import Credentials, open_channel
from ctr_ps.ps_server.rpc.health import why_not_serving
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.cluster.connect import wait_for_servers
from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines, GrpcTransport
from ctr_ps.ps_worker.extras.heter.heter_job import HeterService
from ctr_ps.ps_worker.extras.heter.inbox import Inbox, Joining
from tests.support.certificates import CertificateAuthority
from tests.support.cluster import Cluster, cluster
from tests.support.stores import INCARNATION, declare

TOKENS = {access: f"0123456789abcdef-{access}" for access in Access}
WRONG = "fedcba9876543210"
LIMIT_S = 10.0


@contextmanager
def protected(credentials: Credentials, num_workers: int = 1) -> Iterator[Cluster]:
    """Runs one server with credentials."""
    with cluster(num_servers=0) as servers:
        store = ParameterStore(num_workers=num_workers, wait_limit_s=LIMIT_S)
        servers.start_server(store, credentials=credentials)
        yield servers


def status_of(endpoint: str, credentials: Credentials, call: Call[Any, Any]) -> grpc.StatusCode:
    """Makes a call with an empty request; returns the status of its answer."""
    with open_channel(endpoint, credentials) as channel:
        method = channel.unary_unary(call.path)
        try:
            method(b"", timeout=LIMIT_S, metadata=credentials.metadata())
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def transport_to(endpoint: str, credentials: Credentials, **settings: Any) -> GrpcTransport:
    return GrpcTransport([endpoint], Deadlines(rpc_s=LIMIT_S), credentials=credentials, **settings)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("".join(f"{access} {token}\n" for access, token in TOKENS.items()))
    return path


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("certificates"))


REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def assert_access_counts(servers: Cluster, by_access: dict[Access, Credentials]) -> None:
    """Each call is refused to callers with less access than it needs, and to no other."""
    (endpoint,) = servers.endpoints
    before = servers.stores[0].status(), servers.stores[0].digest()
    needed = {call: call.access for call in CALLS.values()}
    needed[END_MOVE] = Access.ADMIN  # at the first server, for all
    for call in CALLS.values():
        for access, credentials in by_access.items():
            if access < needed[call]:
                found = status_of(endpoint, credentials, call)
                assert found is grpc.StatusCode.PERMISSION_DENIED, (call.name, access)
    assert (servers.stores[0].status(), servers.stores[0].digest()) == before
    for call in CALLS.values():
        found = status_of(endpoint, by_access[needed[call]], call)
        assert found not in REFUSED, call.name


def test_token_gives_access_to_each_call(token_file: Path) -> None:
    with protected(Credentials(token_file=str(token_file))) as servers:
        (endpoint,) = servers.endpoints
        before = servers.stores[0].digest()
        for call in CALLS.values():
            for credentials in (Credentials(), Credentials(token=WRONG)):
                found = status_of(endpoint, credentials, call)
                assert found is grpc.StatusCode.UNAUTHENTICATED, call.name
        assert servers.stores[0].digest() == before
        assert_access_counts(
            servers, {access: Credentials(token=token) for access, token in TOKENS.items()}
        )


def test_certificate_gives_access_to_each_call(authority: CertificateAuthority) -> None:
    of = {
        access: authority.credentials(str(access), common_name=f"ctr-ps-{access}.host-1")
        for access in Access
    }
    nobody = authority.credentials("nobody", common_name="guest")
    with protected(authority.credentials("server")) as servers:
        (endpoint,) = servers.endpoints
        for call in CALLS.values():
            found = status_of(endpoint, nobody, call)
            assert found is grpc.StatusCode.UNAUTHENTICATED, call.name
        assert_access_counts(servers, of)


def test_connection_without_a_valid_certificate_does_not_come_about(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    stranger = CertificateAuthority(tmp_path, "stranger")
    valid = authority.credentials("trainer", common_name="ctr-ps-trainer")
    cases = {
        "no TLS": Credentials(),
        "no certificate": Credentials(ca=valid.ca),
        "expired": authority.credentials("expired", common_name="ctr-ps-trainer", expired=True),
        "of a stranger": replace(
            stranger.credentials("stranger", common_name="ctr-ps-admin"), ca=valid.ca
        ),
        "trusts a stranger": replace(valid, ca=str(stranger.ca)),
        "another host": replace(valid, server_name="elsewhere.example"),
    }
    with protected(authority.credentials("server")) as servers:
        (endpoint,) = servers.endpoints
        assert status_of(endpoint, valid, calls.GET_STATUS) is grpc.StatusCode.OK
        for name, credentials in cases.items():
            found = status_of(endpoint, credentials, calls.GET_STATUS)
            assert found is grpc.StatusCode.UNAVAILABLE, name


def test_server_with_an_expired_certificate_is_not_believed(
    authority: CertificateAuthority,
) -> None:
    expired = authority.credentials("old-server", expired=True)
    with protected(expired) as servers:
        found = status_of(
            servers.endpoints[0],
            authority.credentials("trainer", common_name="ctr-ps-trainer"),
            calls.GET_STATUS,
        )
    assert found is grpc.StatusCode.UNAVAILABLE


def test_tls_with_tokens_asks_for_no_certificate_of_callers(
    authority: CertificateAuthority, token_file: Path
) -> None:
    server = replace(authority.credentials("server", mutual=False), token_file=str(token_file))
    trainer = Credentials(ca=str(authority.ca), token=TOKENS[Access.TRAINER])
    with protected(server) as servers:
        (endpoint,) = servers.endpoints
        assert status_of(endpoint, trainer, calls.GET_STATUS) is grpc.StatusCode.OK
        assert status_of(endpoint, trainer, calls.SAVE) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("by", ["token", "certificate"])
def test_heter_trainer_answers_trainers_alone(
    by: str, token_file: Path, authority: CertificateAuthority
) -> None:
    if by == "token":
        server = Credentials(token_file=str(token_file))
        callers = [Credentials(), *(Credentials(token=TOKENS[access]) for access in Access)]
    else:
        server = authority.credentials("heter")
        names = ("admin", "ctr-ps-reader", "ctr-ps-trainer", "ctr-ps-admin.host")
        callers = [authority.credentials(name, common_name=name) for name in names]
    joining = Joining[Any]([0], is_sync=False, max_joined=1)
    inbox = Inbox(joining, lambda _: None, barriers_passed=1, wait_limit_s=LIMIT_S)
    with HeterService("127.0.0.1:0", server) as service:
        service.start(inbox)
        endpoint = f"127.0.0.1:{service.port}"
        for call in HETER_CALLS.values():
            found = [status_of(endpoint, caller, call) for caller in callers]
            assert found[:2] == list(REFUSED)
            assert not {*found[2:]} & {*REFUSED}


def test_worker_is_told_what_its_credentials_lack(token_file: Path) -> None:
    with protected(Credentials(token_file=str(token_file))) as servers:
        (endpoint,) = servers.endpoints
        with (
            pytest.raises(UnknownCallerError, match=r"has no token.*set CTR_PS_TOKEN_FILE"),
            closing(transport_to(endpoint, Credentials())) as transport,
        ):
            wait_for_servers(transport, LIMIT_S)
        trainer = Credentials(token=TOKENS[Access.TRAINER])
        with closing(transport_to(endpoint, trainer)) as transport:
            wait_for_servers(transport, LIMIT_S)
            client = ClusterClient(transport)
            client.join(0, INCARNATION, terms={}).result()
            with pytest.raises(AccessError, match="EndMove needs the access 'admin'"):
                transport.call(0, END_MOVE, EndMove(token="", is_committed=True, epoch=2)).result()
            with pytest.raises(AccessError, match="Shrink needs the access 'admin'"):
                client.shrink(dry_run=True)


def test_worker_may_tell_another_server_than_the_first_how_a_move_ended(token_file: Path) -> None:
    with cluster(num_servers=0) as servers:
        store = ParameterStore(server_index=1, num_servers=2)
        endpoint = servers.start_server(store, credentials=Credentials(token_file=str(token_file)))
        for access in Access:
            found = status_of(endpoint, Credentials(token=TOKENS[access]), END_MOVE)
            assert (found in REFUSED) == (access < Access.TRAINER), access


def test_health_check_needs_no_token(token_file: Path) -> None:
    with protected(Credentials(token_file=str(token_file))) as servers:
        assert why_not_serving(servers.endpoints[0], LIMIT_S) == ""


def test_health_check_speaks_tls_by_the_environment(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with protected(authority.credentials("server", mutual=False)) as servers:
        assert why_not_serving(servers.endpoints[0], LIMIT_S).startswith("UNAVAILABLE")
        monkeypatch.setenv("CTR_PS_TLS_CA", str(authority.ca))
        assert why_not_serving(servers.endpoints[0], LIMIT_S) == ""


def test_each_call_in_flight_is_sent_again_with_a_token_that_was_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is otherwise sent once, as the renewal of a lease."""
    monkeypatch.setattr("ctr_ps.protos.wire.security.credentials.LOOK_S", 0.0)
    known, shown = tmp_path / "known", tmp_path / "shown"
    known.write_text(TOKENS[Access.READER])
    shown.write_text(TOKENS[Access.READER])
    with protected(Credentials(token_file=str(known))) as servers:
        caller = Credentials(token_file=str(shown))
        with closing(transport_to(servers.endpoints[0], caller)) as transport:
            transport.call(0, calls.GET_STATUS, None).result()
            known.write_text(WRONG)
            shown.write_text(WRONG)
            once = [{}, {}, {"ready_s": LIMIT_S}, {"ready_s": LIMIT_S}]
            answers = [transport.call(0, calls.GET_STATUS, None, **each) for each in once]

            for answer in answers:
                answer.result()

            known.write_text(TOKENS[Access.READER])
            with pytest.raises(UnknownCallerError, match="does not know the token"):
                transport.call(0, calls.GET_STATUS, None).result()


class Load:
    """Threads that pull all the time, now and then over a new connection; any error is kept.

    Attributes:
        opening: Held while a new client reads its files: two that do not belong together are an error at a
            start, where a client that has a connection keeps it.
    """

    def __init__(self, endpoint: str, credentials: Credentials) -> None:
        self._endpoint = endpoint
        self._credentials = credentials
        self._is_over = threading.Event()
        self._pulls = threading.Condition()
        self.opening = threading.Lock()
        self.num_pulls = 0
        self.errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=[pulls_a_connection])
            for pulls_a_connection in (5, 10**9)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def wait_for_more(self, pulls: int = 20) -> None:
        """Waits for pulls that begin from now on."""
        with self._pulls:
            target = self.num_pulls + pulls
            self._pulls.wait_for(lambda: self.num_pulls >= target or self.errors, LIMIT_S)

    def _run(self, pulls_a_connection: int) -> None:
        try:
            while not self._is_over.is_set():
                with self.opening:
                    transport = transport_to(self._endpoint, self._credentials)
                with closing(transport):
                    self._pull(transport, pulls_a_connection)
        except Exception as error:
            self.errors.append(error)

    def _pull(self, transport: GrpcTransport, number: int) -> None:
        request = PullSparse(
            keys={"deep": np.arange(10, dtype=np.uint64)},
            missing=Missing.INITIAL,
            shard_map_epoch=FIRST_EPOCH,
        )
        for _ in range(number):
            if self._is_over.is_set():
                return
            transport.call(0, calls.PULL_SPARSE, request).result()
            with self._pulls:
                self.num_pulls += 1
                self._pulls.notify_all()


def test_certificates_and_tokens_are_exchanged_under_load_without_a_lost_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order that docs/security.md says: what is trusted first, then what is shown, then the rest."""
    old, new = (CertificateAuthority(tmp_path, name) for name in ("old", "new"))
    monkeypatch.setattr("ctr_ps.protos.wire.security.credentials.LOOK_S", 0.0)
    ca, known, shown = tmp_path / "ca", tmp_path / "known-tokens", tmp_path / "token"
    first, second = TOKENS[Access.READER], f"{WRONG}-the-next"

    def trust(*authorities: CertificateAuthority) -> None:
        ca.write_bytes(b"".join(each.ca.read_bytes() for each in authorities))

    trust(old)
    known.write_text(first)
    shown.write_text(first)
    server = old.credentials("server")
    server = replace(server, ca=str(ca), client_ca=str(ca), token_file=str(known))
    worker = replace(old.credentials("worker"), ca=str(ca), token_file=str(shown))
    steps = [
        lambda: (trust(old, new), known.write_text(f"{first}\n{second}\n")),
        lambda: (new.credentials("server"), new.credentials("worker"), shown.write_text(second)),
        lambda: (trust(new), known.write_text(second)),
    ]
    with protected(server) as servers:
        declare(servers.stores[0])
        with Load(servers.endpoints[0], worker) as load:
            for exchange in steps:
                load.wait_for_more()
                with load.opening:
                    exchange()
            load.wait_for_more()
        old_one = replace(old.credentials("old-one"), token=second)
        with_old_token = replace(worker, token_file="", token=first)

        assert load.errors == []
        assert load.num_pulls >= 80
        found = [
            status_of(servers.endpoints[0], credentials, calls.GET_STATUS)
            for credentials in (worker, old_one, with_old_token)
        ]
        assert found == [
            grpc.StatusCode.OK,
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.UNAUTHENTICATED,
        ]
