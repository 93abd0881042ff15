"""A worker's lease: renewed again and again until a server refuses it, or is gone."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ctr_ps.protos.errors import (
    AbortedError,
    CheckpointError,
    CtrPsError,
    DataError,
    JobError,
    PlaceLostError,
    TransportError,
)
from ctr_ps.protos.role import WorkerRole
from ctr_ps.protos.store import Lease, WorkerLoss
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_server.settings import ServerSettings
from ctr_ps.ps_worker.cluster import connect
from ctr_ps.ps_worker.cluster.open_store import LOCAL
from ctr_ps.ps_worker.run.membership import (
    LeaseRenewal,
    abort_before_joining,
    job_ends_by_errors,
)
from tests.support.cluster import cluster

LIMIT_S = 10.0


class Renewed:
    """What a lease is renewed at: counts, and fails as it is told to."""

    def __init__(self, *errors: CtrPsError | None) -> None:
        self._errors = list(errors)
        self._changed = threading.Condition()
        self.workers: list[int] = []
        self.is_connected = True
        self.has_given_up = False

    def renew(self, worker: int, *, is_last: bool = False) -> None:
        with self._changed:
            self.workers.append(worker)
            self.has_given_up = is_last
            self._changed.notify_all()
        if self._errors and (error := self._errors.pop(0)) is not None:
            raise error

    def disconnect(self) -> None:
        self.is_connected = False

    def wait_for(self, number: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.workers) >= number, LIMIT_S)


def lease_of(seconds: float) -> Lease:
    return Lease(seconds=seconds, on_worker_loss=WorkerLoss.FAIL)


@contextmanager
def renewal(store: Renewed, lease_s: float = 0.003) -> Iterator[LeaseRenewal]:
    lease = LeaseRenewal(store, 3, lease_of(lease_s))  # type: ignore[arg-type]
    try:
        yield lease
    finally:
        lease.close()
        lease._thread.join(LIMIT_S)


def has_ended(lease: LeaseRenewal) -> bool:
    lease._thread.join(LIMIT_S)
    return not lease._thread.is_alive()


def test_lease_is_renewed_again_and_again() -> None:
    store = Renewed()

    with renewal(store):
        assert store.wait_for(3)

    assert set(store.workers) == {3}


@pytest.mark.parametrize(
    ("takes_s", "pauses"),
    [
        (0.0, [2.0, 2.0, 2.0]),
        (0.5, [2.0, 1.5, 1.5]),
        (2.0, [2.0, 0.0, 0.0]),
        (5.0, [2.0, 0.0, 0.0]),
    ],
)
def test_lease_is_renewed_three_times_in_its_time_however_long_that_takes(
    takes_s: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[float | None] = []
    now = [0.0]

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            paused.append(timeout)
            return len(paused) > 2

    class Slow(Renewed):
        def renew(self, worker: int) -> None:
            now[0] += takes_s
            super().renew(worker)

    store = Slow()
    threads = SimpleNamespace(Event=Event, Thread=NowThread)
    monkeypatch.setattr("ctr_ps.ps_worker.run.membership.threading", threads)
    monkeypatch.setattr(
        "ctr_ps.ps_worker.run.membership.time", SimpleNamespace(monotonic=lambda: now[0])
    )
    LeaseRenewal(store, 3, lease_of(6.0))  # type: ignore[arg-type]

    assert paused == pauses
    assert store.workers == [3, 3]


class NowThread:
    """A thread that runs where it is started."""

    def __init__(self, *, target: Callable[[], None], **_: object) -> None:
        self.start = target


@pytest.mark.parametrize("lease_s", [6.0, 30.0, 3600.0])
def test_renewals_are_in_time_for_the_lease_and_for_the_word_of_an_abort(lease_s: float) -> None:
    renewal_s = lease_of(lease_s).renewal_s

    assert renewal_s <= lease_s / 3
    assert 2 * renewal_s <= ServerSettings().linger_s


@pytest.mark.parametrize(
    "error",
    [
        PlaceLostError("worker 3 is another process by now"),
        AbortedError("worker 1 aborted the job"),
        TransportError("ps-0:1 is away (tried 60 times in 30 s)"),
    ],
)
def test_renewal_ends_when_a_server_refuses_it_or_is_gone(error, caplog) -> None:
    store = Renewed(None, error)

    with renewal(store) as lease:
        assert store.wait_for(2)
        assert has_ended(lease)

    assert store.workers == [3, 3]
    assert lease.refusal is error
    assert not store.is_connected
    assert f"lease refused: {error}" in caplog.text


def test_lease_is_given_up_after_its_last_renewal(caplog) -> None:
    store = Renewed()

    with renewal(store) as lease:
        assert store.wait_for(2)
        assert not store.has_given_up
        lease.give_up()
        renewals = len(store.workers)
        assert has_ended(lease)

    assert store.has_given_up
    assert len(store.workers) == renewals


def test_lease_that_servers_do_not_hear_of_runs_out(caplog) -> None:
    store = Renewed(TransportError("ps-0:1 is away"))

    with renewal(store, lease_s=3600.0) as lease:
        lease.give_up()

    assert "could not give up the lease, which will expire: ps-0:1 is away" in caplog.text


def test_closing_ends_a_long_pause() -> None:
    store = Renewed()

    with renewal(store, lease_s=3600.0) as lease:
        lease.close()
        assert has_ended(lease)

    assert store.workers == []


def role_of(endpoints: list[str], worker: int = 1) -> WorkerRole:
    return WorkerRole(endpoints=tuple(endpoints), worker_index=worker, num_workers=2)


def fail(role: WorkerRole, error: Exception) -> None:
    with job_ends_by_errors(role):
        raise error


@pytest.mark.parametrize(
    ("error", "comes_again"),
    [
        (DataError("no files"), True),
        (CheckpointError("no files"), False),
        (OSError("no files"), False),
    ],
)
def test_error_before_joining_ends_the_job_on_all_servers(
    error: Exception, comes_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told whether it comes again, by which they decide on their update logs."""
    told_of: list[bool] = []
    abort = Engine.abort

    def note(engine: Engine, worker: int, reason: str, *, comes_again: bool) -> None:
        told_of.append(comes_again)
        abort(engine, worker, reason, comes_again=comes_again)

    monkeypatch.setattr(Engine, "abort", note)
    with cluster(num_servers=2, num_workers=2) as servers:
        waiting = [store.barrier("start", 0, step=0) for store in servers.stores]

        with pytest.raises(type(error), match="no files"):
            fail(role_of(servers.endpoints), error)

        told = f"worker 1 aborted the job: {type(error).__name__}: no files"
        for each in waiting:
            with pytest.raises(AbortedError, match=told):
                each.result()
    assert told_of == [comes_again] * 2


def test_wrong_job_is_wrong_for_all_and_told_to_no_server() -> None:
    with cluster(num_workers=2) as servers:
        with pytest.raises(JobError):
            fail(role_of(servers.endpoints), JobError("unknown key"))

        assert servers.stores[0].wait_version(0).result() == 0


def test_error_of_a_process_that_has_no_place_ends_no_job() -> None:
    with cluster(num_workers=2) as servers:
        servers.client()  # has joined as both workers

        with pytest.raises(DataError):
            fail(role_of(servers.endpoints), DataError("no files"))

        assert servers.stores[0].wait_version(0).result() == 0


def test_servers_that_do_not_come_are_waited_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connect, "START_S", 0.2)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, but nobody listens
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"

        with pytest.raises(DataError, match="no files"):
            fail(role_of([endpoint]), DataError("no files"))

    assert "worker 1 ends with an error, which ends the job: no files" in caplog.messages
    assert f"Join to server {endpoint} failed: DEADLINE_EXCEEDED" in caplog.messages[-1]


def test_error_without_a_cluster_is_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError):
        fail(LOCAL, DataError("no files"))

    assert caplog.messages == []


def test_an_error_of_a_worker_that_nobody_waits_for_ends_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(connect, "abort_unjoined", lambda role, _: ended.append(role.worker_index))

    for worker in range(3):
        role = WorkerRole(
            endpoints=("server:1",), worker_index=worker, num_workers=3, num_at_start=2
        )
        abort_before_joining(role, DataError("no file matches"))

    assert ended == [0, 1]
