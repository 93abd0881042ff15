"""Errors of a worker before it has joined."""

import socket

import pytest

from ctr_ps.protos.errors import AbortedError, CheckpointError, DataError, JobError
from ctr_ps.protos.role import WorkerRole
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_worker.cluster import connect
from ctr_ps.ps_worker.cluster.open_store import LOCAL
from ctr_ps.ps_worker.run.membership import job_ends_by_errors
from tests.support.cluster import cluster


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

    assert "worker 1 ends, and with it the job: no files" in caplog.messages
    assert f"Join to server {endpoint} failed: DEADLINE_EXCEEDED" in caplog.messages[-1]


def test_error_without_a_cluster_is_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError):
        fail(LOCAL, DataError("no files"))

    assert caplog.messages == []
