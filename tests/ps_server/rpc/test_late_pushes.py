"""Pushes that were admitted, and go on when their process has its place no more."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import PlaceLostError, ProtocolError
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.store import Lease, Member, Version, WorkerLoss
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_server.engine.engine import Engine, EngineSettings
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.journal import state_records
from tests.support.stores import in_process, push_id
from tests.support.update_logs import begun_log, recovered

OLD, NEW = Member(0, 11), Member(0, 22)
WAIT = Lease(seconds=3.0, on_worker_loss=WorkerLoss.WAIT)


def join(handlers: Handlers, member: Member, lease: Lease | None = None) -> None:
    handlers.start(calls.JOIN, requests.Join(member=member, terms={}, lease=lease)).result()


def push(
    handlers: Handlers, member: Member, sequence: int, *, at: Version | None = None
) -> Version:
    request = requests.PushGrad(
        chunk=PushChunk([], []),
        push_id=replace(push_id(member.worker, sequence), incarnation=member.incarnation),
        at=at,
        shard_map_epoch=FIRST_EPOCH,
    )
    return handlers.start(calls.PUSH_GRAD, request).result()


def next_job_pushes_twice(handlers: Handlers) -> None:
    handlers.engine.begin_job()
    join(handlers, NEW)
    push(handlers, NEW, 0)
    push(handlers, NEW, 1)


def once_admitted(handlers: Handlers, happens: Callable[[Handlers], None]) -> None:
    """Has something happen when the next push was admitted, before it looks at the job."""
    engine = handlers.engine
    proper = engine.push_chunk

    def push_chunk(*chunk: Any, **named: Any) -> Any:
        engine.push_chunk = proper
        happens(handlers)
        return proper(*chunk, **named)

    engine.push_chunk = push_chunk


def once_taken(handlers: Handlers, happens: Callable[[Handlers], None]) -> None:
    """Has something happen when the next push was taken, before it is entered."""
    pushes = handlers.engine.job.pushes
    proper = pushes.take

    def take(*chunk: Any) -> Any:
        pushes.take = proper
        taken = proper(*chunk)
        happens(handlers)
        return taken

    pushes.take = take


def test_push_of_the_last_job_does_not_enter_the_next_one() -> None:
    """Else the pushes of the process in the next job would be forgotten, and be applied again."""
    handlers = Handlers(Engine(EngineSettings()))
    join(handlers, OLD)
    push(handlers, OLD, 0)

    once_admitted(handlers, next_job_pushes_twice)
    with pytest.raises(PlaceLostError):
        push(handlers, OLD, 1)

    assert push(handlers, NEW, 1) == 2, "it is applied already"


def test_push_that_the_last_job_took_is_counted_there() -> None:
    handlers = Handlers(Engine(EngineSettings()))
    join(handlers, OLD)
    push(handlers, OLD, 0)
    last_job = handlers.engine.job

    once_taken(handlers, next_job_pushes_twice)
    push(handlers, OLD, 1)

    assert last_job.applied().version == 2
    assert handlers.engine.status().version == 2
    assert push(handlers, NEW, 1) == 2, "it is applied already"


def another_would_come(handlers: Handlers) -> None:
    handlers.engine.pass_time(WAIT.seconds)
    with suppress(ProtocolError):
        join(handlers, NEW, WAIT)


def test_push_that_is_under_way_as_a_lease_ends_is_the_same_after_a_restart(tmp_path: Path) -> None:
    """It is written before it enters: one that is refused then would be applied by the recovery."""
    store = in_process()
    handlers, log = begun_log(tmp_path, store)
    join(handlers, OLD, WAIT)
    once_admitted(handlers, another_would_come)
    with suppress(PlaceLostError):
        push(handlers, OLD, 0)

    another_would_come(handlers)
    log.close()
    restarted = in_process()
    recovered(tmp_path, restarted)

    assert restarted.status().progress == store.status().progress
    assert restarted.status().version == store.status().version == 1
    for each in (store, restarted):
        each.engine.job.require_place(NEW)


@pytest.mark.parametrize("rule", [WorkerLoss.WAIT, WorkerLoss.CONTINUE])
def test_part_of_a_step_counts_after_a_restart_though_its_process_is_lost(
    rule: WorkerLoss, tmp_path: Path
) -> None:
    """The process in its place repeats the part, and is told that it is there."""
    lease = replace(WAIT, on_worker_loss=rule)
    lost, other = Member(1, 11), Member(1, 22)
    store = in_process(num_workers=2)
    handlers, log = begun_log(tmp_path, store)
    join(handlers, OLD, lease)
    join(handlers, lost, lease)
    push(handlers, lost, 0, at=0)
    handlers.engine.job.end_lease(1)
    handlers.engine.pass_time(0.25)
    if rule is WorkerLoss.WAIT:
        join(handlers, other, lease)
        push(handlers, other, 0, at=0)
    log.begin_segment(state_records(store.engine.state(), handlers.completed(), base=""))
    log.close()

    restarted = in_process(num_workers=2)
    push(recovered(tmp_path, restarted), OLD, 0, at=0)

    assert restarted.status().version == 1
    assert restarted.status().examples == {0: 1, 1: 1}
    assert restarted.status().progress[1].incarnation == lost.incarnation
