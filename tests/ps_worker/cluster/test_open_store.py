"""A run's store is in its process or on servers, as its role says."""

from contextlib import nullcontext

import pytest

from ctr_ps.protos.errors import AbortedError, ProtocolError, TransportError
from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.role import WorkerRole
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster import connect
from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines
from ctr_ps.ps_worker.cluster.open_store import LOCAL, open_store
from ctr_ps.ps_worker.job.sections import ClusterSection
from tests.support.cluster import cluster
from tests.support.commands import printed_by

IN_PROCESS = """
import sys
from ctr_ps.ps_worker.cluster.open_store import LOCAL, open_store
from ctr_ps.ps_worker.job.sections import ClusterSection
with open_store(LOCAL, ClusterSection()):
    print("grpc" in sys.modules)
"""


def test_store_of_a_role_without_servers_is_in_process() -> None:
    assert LOCAL.is_in_process
    with open_store(LOCAL, ClusterSection(wait_timeout_s=7.0)) as store:
        assert isinstance(store, ParameterStore)
        assert store.engine.members.total == 1
        waiting = store.wait_version(1)

    assert isinstance(waiting, WaitingFuture)
    assert waiting.limit_s == 7.0


def test_servers_are_waited_for_as_long_as_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(
        connect,
        "connect",
        lambda *servers, **limits: told.append((servers, limits)) or nullcontext(),
    )
    role = WorkerRole(endpoints=("ps-0:1",), worker_index=0, num_workers=1)
    limits = ClusterSection(
        connect_timeout_s=5.0, rpc_timeout_s=6.0, wait_timeout_s=7.0, retry_s=8.0
    )

    with open_store(role, limits):
        pass

    deadlines = Deadlines(rpc_s=6.0, wait_s=7.0)
    assert told == [
        (
            (role.endpoints,),
            {
                "connect_timeout_s": 5.0,
                "deadlines": deadlines,
                "retry_s": 8.0,
                "stream": True,
            },
        )
    ]


def test_store_in_process_needs_no_grpc() -> None:
    assert printed_by(IN_PROCESS).strip() == "False"


def test_store_of_a_role_with_servers_is_theirs_until_the_context_ends() -> None:
    with cluster(num_servers=2) as servers:
        role = WorkerRole(endpoints=tuple(servers.endpoints), worker_index=0, num_workers=1)
        assert not role.is_in_process

        with open_store(role, ClusterSection()) as store:
            assert store.status().version == 0

        with pytest.raises(TransportError, match="this client is closed"):
            store.status()


@pytest.mark.parametrize(("listed", "told"), [((1, 0), (0, 1)), ((0,), (0,)), ((0, 1, 2), (0, 1))])
def test_worker_with_a_wrong_list_of_servers_tells_the_others(
    listed: tuple[int, ...], told: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each server of its list; the others relay it to the rest (tests/integration)."""
    monkeypatch.setattr(connect, "START_S", 0.5)
    with cluster(num_servers=2, num_workers=2) as servers:
        endpoints = [*servers.endpoints, "127.0.0.1:1"]
        role = WorkerRole(
            endpoints=tuple(endpoints[each] for each in listed), worker_index=1, num_workers=2
        )
        waiting = {each: servers.stores[each].barrier("start", 0, step=0) for each in told}

        with (
            pytest.raises(ProtocolError, match="give all processes the same list"),
            open_store(role, ClusterSection()),
        ):
            pass

        why = (
            rf"worker 1 aborted the job: ProtocolError: \S+ is server \d of 2, but server \d of "
            rf"{len(listed)} in this worker's list"
        )
        for each in waiting.values():
            with pytest.raises(AbortedError, match=why):
                each.result()
