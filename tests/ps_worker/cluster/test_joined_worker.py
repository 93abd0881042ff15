"""A worker takes its place, and tells servers of the pushes that all of them have acknowledged."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import Acknowledged, Joined, Lease, WorkerLoss
from ctr_ps.protos.wire import requests
from ctr_ps.ps_worker.cluster import joined_worker
from ctr_ps.ps_worker.cluster.joined_worker import Acknowledgements, JoinedWorker, join_servers
from ctr_ps.ps_worker.cluster.placement import Placement
from tests.support.local_transport import Answer
from tests.support.stores import member, push_id

PAST = Joined(jobs_before=0, barriers_passed=1, has_update_log=True, version=53)


def test_servers_that_answered_at_other_times_are_asked_again() -> None:
    """One was away for long, while others trained."""

    class Servers:
        shard_map = ShardMap.of(2)

        def __init__(self) -> None:
            self.early = {1: replace(PAST, barriers_passed=0, version=0)}

        def call(self, server: int, *_: Any, **options: Any) -> Any:
            joined = self.early.pop(server, PAST)
            return Answer(lambda: joined)

    join = requests.Join(member=member(0), terms={})
    assert join_servers(Servers(), join).result() == PAST


@given(st.permutations(range(8)), st.integers(0, 8))
def test_pushes_count_up_to_the_first_that_is_not_acknowledged(
    order: list[int], num_acknowledged: int
) -> None:
    acknowledgements = Acknowledgements()
    acknowledged = order[:num_acknowledged]
    for sequence in acknowledged + acknowledged:  # an answer may be asked for twice
        acknowledgements.note(push_id(sequence=sequence), None)

    first_missing = min(set(range(9)) - set(acknowledged))
    assert acknowledgements.told() == Acknowledged(pushes=first_missing)


def test_parts_of_steps_count_by_their_step() -> None:
    acknowledgements = Acknowledgements()
    for at in (7, 8, 7):
        acknowledgements.note(push_id(sequence=at), at)

    assert acknowledgements.told() == Acknowledged(steps=9)


def test_place_is_confirmed_again_after_the_process_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would publish a checkpoint by an answer that is older than its lease."""
    asked: list[int] = []

    class Servers:
        shard_map = ShardMap.of(1)

        def call(self, server: int, *_: Any, **options: Any) -> Any:
            asked.append(server)
            return Answer(lambda: None)

    times = iter([0.0, 4.0, 4.0, 4.1])
    monkeypatch.setattr(joined_worker, "time", SimpleNamespace(monotonic=lambda: next(times)))
    lease = Lease(seconds=3.0, on_worker_loss=WorkerLoss.WAIT)
    servers = Servers()
    JoinedWorker(servers, Placement(servers, chunk_bytes=1), member(0), lease, 0).confirm_place()
    assert len(asked) == 2
