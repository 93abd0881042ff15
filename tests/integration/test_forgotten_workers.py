"""A server that was killed and started again empty in the middle of a job: all others are told at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ctr_ps.protos.errors import AbortedError, NotJoinedError, TransportError
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.run.run import Run
from tests.support.cluster import Cluster, cluster
from tests.support.training import job, small_model, worker_run

LIMIT_S = 20.0
LONG_LEASE_S, SHORT_LEASE_S = 60.0, 3.0
"""With the short one the worker learns it by the next renewal, with the long one by its next call."""

TOLD = r"worker 0 aborted the job: NotJoinedError: .*has not joined this job: if this server was restarted"


@pytest.mark.parametrize("forgetful", [0, 1])
@pytest.mark.parametrize("lease_s", [LONG_LEASE_S, SHORT_LEASE_S])
def test_worker_that_one_server_has_forgotten_ends_the_job_on_the_other(
    forgetful: int, lease_s: float
) -> None:
    with running_worker(lease_s) as (servers, worker):
        other = servers.stores[1 - forgetful]
        waiting = other.barrier("end", 1, step=0)
        restart_empty(servers, forgetful)

        with pytest.raises(NotJoinedError):
            go_on(worker, until_refused=lease_s == SHORT_LEASE_S)

        with pytest.raises(AbortedError, match=TOLD):
            waiting.result()


def test_error_of_a_worker_is_told_though_a_server_is_away() -> None:
    with running_worker(LONG_LEASE_S) as (servers, worker):
        waiting = servers.stores[1].barrier("end", 1, step=0)
        servers.stop_server(0)

        with pytest.raises(OSError, match="disk"), worker:
            raise OSError("the disk is gone")

        with pytest.raises(AbortedError, match="worker 0 aborted the job: OSError: the disk"):
            waiting.result()


def test_abort_that_reached_one_server_alone_ends_the_job_on_all() -> None:
    """By a worker that waits at another one, and hears of it when it renews its lease."""
    with running_worker(SHORT_LEASE_S) as (servers, worker):
        with pytest.raises(AbortedError, match="worker 1 aborted the job: OSError: the disk"):
            wait_at_the_first_server(
                worker, lambda: servers.stores[1].abort(1, "OSError: the disk")
            )

        with pytest.raises(AbortedError, match="worker 1 aborted the job: OSError: the disk"):
            servers.stores[0].wait_version(1).result()


def test_server_that_stays_away_ends_the_job_on_the_others(monkeypatch) -> None:
    monkeypatch.setattr("ctr_ps.ps_worker.cluster.grpc_transport.BUDGET_S", 1.0)
    with running_worker(SHORT_LEASE_S) as (servers, worker):
        with pytest.raises(TransportError, match=r"Renew to server .*tried \d+ times in 1 s"):
            wait_at_the_first_server(worker, lambda: servers.stop_server(1))

        with pytest.raises(AbortedError, match="worker 0 aborted the job: TransportError: Renew"):
            servers.stores[0].wait_version(1).result()


def wait_at_the_first_server(worker: Run, meanwhile: Callable[[], object]) -> None:
    """Has a worker wait for what only the first server would tell it, when something happens to another."""
    with worker:
        clock = worker.store.advance(0, 1, at_least=1)
        meanwhile()
        clock.result()


@contextmanager
def running_worker(lease_s: float) -> Iterator[tuple[Cluster, Run]]:
    """Two servers, and worker 0 of two that has joined."""
    with cluster(num_servers=2, num_workers=2, wait_limit_s=LIMIT_S) as servers:
        settings = job("async", f"cluster.lease_s={lease_s}")
        store = servers.client(joins=False)
        yield (
            servers,
            worker_run(
                store, small_model(), settings, worker=0, num_workers=2, is_in_process=False
            ),
        )


def go_on(worker: Run, *, until_refused: bool) -> None:
    """Has a worker call the servers, at once or when its lease is refused."""
    with worker:
        if until_refused:
            worker._membership._renewal._thread.join(LIMIT_S)
        worker.shrink()


def restart_empty(servers: Cluster, index: int) -> None:
    servers.stop_server(index)
    servers.stores[index] = ParameterStore(num_workers=2, server_index=index, num_servers=2)
    servers.start_again(index)
