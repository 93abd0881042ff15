"""The queue of files behind the calls of workers: at once, again, and after a restart from the update log."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import LogError, ProtocolError
from ctr_ps.protos.futures import Future, WaitingFuture
from ctr_ps.protos.store import Lease, Member, ReduceOp, TakenFile, WorkerLoss
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.journal import state_records
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import member
from tests.support.update_logs import begun_log, recovered

NUM_FILES = 6
SOON_S, LATER_S = 0.2, 5.0
LEASE = Lease(seconds=1.0, on_worker_loss=WorkerLoss.CONTINUE)


def store_of(num_workers: int = 2, num_at_start: int | None = None) -> ParameterStore:
    return ParameterStore(num_workers=num_workers, num_at_start=num_at_start)


def join(handlers: Handlers, who: Member) -> int:
    """Returns how many barriers were passed in its place."""
    request = requests.Join(member=who, terms={}, lease=LEASE)
    return handlers.start(calls.JOIN, request).result().barriers_passed


def ask(
    handlers: Handlers, worker: int, received: int, *, waits: bool = False, incarnation: int = 0
) -> Future[TakenFile]:
    who = Member(worker, incarnation) if incarnation else member(worker)
    request = requests.TakeFile(
        member=who, pass_number=1, num_files=NUM_FILES, received=received, waits=waits
    )
    return handlers.start(calls.TAKE_FILE, request)


def is_pending(answer: Future[Any]) -> bool:
    return isinstance(answer, WaitingFuture) and not answer.done()


def take(handlers: Handlers, worker: int, received: int) -> int | None:
    return ask(handlers, worker, received).result().file


def leave(handlers: Handlers, worker: int) -> None:
    handlers.start(calls.LEAVE, requests.Leave(member=member(worker), step=0)).result()


def all_reduce(handlers: Handlers, who: Member, number: int, value: float) -> Future[object]:
    request = requests.AllReduce(
        name=f"sum-{number}",
        member=who,
        values=np.array([value]),
        op=ReduceOp.SUM,
        step=0,
        number=number,
    )
    return handlers.start(calls.ALL_REDUCE, request)


def test_who_waits_is_told_when_another_gives_back_a_file_or_the_pass_is_over() -> None:
    handlers = Handlers(store_of().engine)
    for worker in range(2):
        join(handlers, member(worker))
    assert [take(handlers, 0, 0), take(handlers, 1, 0)] == [0, 1]
    for received in range(1, 5):
        take(handlers, 0, received)
    assert ask(handlers, 0, 5).result() == TakenFile()

    waiting = ask(handlers, 0, 5, waits=True)
    assert is_pending(waiting)
    leave(handlers, 1)
    assert waiting.result() == TakenFile()
    assert ask(handlers, 0, 5).result() == TakenFile(file=1, was_taken=True)

    assert ask(handlers, 0, 6, waits=True).result() == TakenFile(is_over=True)
    with pytest.raises(ProtocolError, match="worker 1 asked for a file, but has left"):
        take(handlers, 1, 0)


def test_files_of_a_lost_worker_are_free_where_others_go_on_without_it() -> None:
    handlers = Handlers(store_of().engine)
    for worker in range(2):
        join(handlers, member(worker))
    take(handlers, 1, 0)
    handlers.engine.pass_time(0.5)
    take(handlers, 0, 0)

    handlers.engine.pass_time(0.6)

    assert [take(handlers, 0, received) for received in (0, 1, 2)] == [1, 0, 2]


@pytest.mark.parametrize("in_new_segment", [False, True])
def test_a_restarted_server_has_the_same_queue(in_new_segment: bool, tmp_path: Path) -> None:
    handlers, log = begun_log(tmp_path, store := store_of())
    for worker in range(2):
        join(handlers, member(worker))
    assert [take(handlers, 0, 0), take(handlers, 1, 0), take(handlers, 1, 1)] == [0, 1, 2]
    ask(handlers, 1, 2, waits=True)
    take(handlers, 1, 2)
    leave(handlers, 1)
    if in_new_segment:
        log.begin_segment(state_records(store.engine.state(), handlers.completed(), base=""))
    log.close()

    handlers = recovered(tmp_path, store_of())

    assert [take(handlers, 0, received) for received in (0, 1, 2)] == [0, 3, 4]


@pytest.mark.parametrize("second", ["takes, too", "leaves", "is lost"])
def test_calls_at_once_are_logged_in_the_order_in_which_files_are_dealt(
    second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a recovery would deal a file to another worker than the one that trains it."""
    handlers, log = begun_log(tmp_path, store_of())
    for worker in range(2):
        join(handlers, member(worker))
    take(handlers, 1, 0)
    handlers.engine.pass_time(LEASE.seconds / 2)
    ask(handlers, 0, 0)
    is_first, is_written = threading.Event(), threading.Event()
    written = handlers.engine.journal.written

    @contextmanager
    def after_the_other(kind: str, payload: bytes) -> Iterator[None]:
        """Has the first call carried out after the second, unless that may not be written before."""
        with written(kind, payload):
            if is_first.is_set():
                is_written.set()
                yield
                return
            is_first.set()
            is_written.wait(SOON_S)
            yield

    others: dict[str, Callable[[], object]] = {
        "takes, too": lambda: take(handlers, 1, 1),
        "leaves": lambda: leave(handlers, 1),
        "is lost": lambda: handlers.engine.pass_time(LEASE.seconds / 2),
    }
    monkeypatch.setattr(handlers.engine.journal, "written", after_the_other)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(take, handlers, 0, 1)
        assert is_first.wait(LATER_S)
        pool.submit(others[second]).result()
        first.result()
    monkeypatch.undo()
    state = handlers.engine.job.state().files
    log.close()

    assert recovered(tmp_path, store_of()).engine.job.state().files == state


def test_process_that_takes_an_empty_place_comes_to_where_the_others_are(tmp_path: Path) -> None:
    handlers, log = begun_log(tmp_path, store_of(3, num_at_start=2))
    with closing(log):
        for worker in range(2):
            assert join(handlers, member(worker)) == 0
        for number in (1, 2):
            first = all_reduce(handlers, member(0), number, 1.0)
            second = all_reduce(handlers, member(1), number, 2.0)
            assert first.result() == second.result()

        assert join(handlers, member(2)) == 2
        assert all_reduce(handlers, member(2), 1, 4.0).result() == first.result()
        waiting = all_reduce(handlers, member(0), 3, 1.0)
        leave(handlers, 1)
        assert is_pending(waiting)  # for the one that came
        assert join(handlers, Member(1, 77)) == 2  # in the place of the one that left
        all_reduce(handlers, member(2), 3, 4.0)
        assert is_pending(waiting)
        other = all_reduce(handlers, Member(1, 77), 3, 8.0)
        assert waiting.result() == other.result()

    handlers = recovered(tmp_path, store_of(3, num_at_start=2))
    assert all_reduce(handlers, member(0), 3, 0.0).result() == waiting.result()
    assert handlers.engine.status().left == frozenset()


def test_a_job_does_not_wait_for_workers_that_never_came() -> None:
    handlers = Handlers(store_of(3, num_at_start=1).engine)
    join(handlers, member(0))

    assert not is_pending(all_reduce(handlers, member(0), 1, 1.0))
    assert ask(handlers, 0, 0).result() == TakenFile(file=0)
    leave(handlers, 0)

    assert handlers.engine.job.all_left()
    join(handlers, member(1))  # too late
    assert handlers.engine.job.all_left()


def test_a_server_with_other_places_does_not_go_on_from_a_log(tmp_path: Path) -> None:
    handlers, log = begun_log(tmp_path, store_of(3, num_at_start=2))
    join(handlers, member(0))
    log.close()

    with pytest.raises(LogError, match=r"for 2 to 3 workers, but this process is .* 3 workers"):
        recovered(tmp_path, store_of(3))
