"""Progress of workers: what is whole, whatever the order in which pushes are applied."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import FILE, PushId, WorkerProgress
from ctr_ps.ps_server.coordination.push_ledger import (
    MAX_AHEAD,
    PushLedger,
    PushState,
    require_plausible,
)

WORKERS = Members(4)


def push_id(sequence: int, *, worker: int = 0, incarnation: int = 1, first_step: int = 0) -> PushId:
    step = first_step + sequence + 1
    return PushId(
        worker=worker,
        incarnation=incarnation,
        sequence=sequence,
        step=step,
        examples=1,
        batches=1,
        pulled=0,
        position=f"after {step}",
    )


def apply(ledger: PushLedger, push: PushId) -> None:
    ledger.begin(push)
    ledger.note(push)


def steps(ledger: PushLedger) -> dict[int, int]:
    return {worker: progress.step for worker, progress in ledger.progress().items()}


@given(order=st.permutations(range(6)))
def test_progress_is_the_last_push_before_the_first_gap(order: list[int]) -> None:
    ledger = PushLedger(WORKERS)
    applied: set[int] = set()

    for sequence in order:
        apply(ledger, push_id(sequence))
        applied.add(sequence)

        whole = next(number for number in range(7) if number not in applied)
        assert steps(ledger) == ({0: whole} if whole else {})


def test_progress_is_what_the_push_id_says() -> None:
    ledger = PushLedger(WORKERS)

    apply(ledger, push_id(0, worker=3, incarnation=9, first_step=20))

    assert ledger.progress() == {
        3: WorkerProgress(incarnation=9, sequence=0, step=21, position="after 21")
    }


def test_worker_that_comes_again_begins_with_push_0() -> None:
    ledger = PushLedger(WORKERS)
    apply(ledger, push_id(0))
    apply(ledger, push_id(2))

    apply(ledger, push_id(1, incarnation=2, first_step=1))

    assert steps(ledger) == {0: 1}
    apply(ledger, push_id(0, incarnation=2, first_step=1))
    assert steps(ledger) == {0: 3}


def test_restored_progress_holds_until_the_first_push() -> None:
    before, ledger = PushLedger(WORKERS), PushLedger(WORKERS)
    apply(before, push_id(0, worker=0))
    apply(before, push_id(0, worker=1))

    ledger.restore(before.progress())
    apply(ledger, push_id(1, worker=0, incarnation=2, first_step=1))

    assert steps(ledger) == {0: 1, 1: 1}
    apply(ledger, push_id(0, worker=0, incarnation=2, first_step=1))
    assert steps(ledger) == {0: 3, 1: 1}


def test_push_is_applied_once() -> None:
    ledger = PushLedger(WORKERS)

    assert ledger.begin(push_id(0)) is PushState.NEW
    assert ledger.begin(push_id(0)) is PushState.APPLYING
    ledger.note(push_id(0))
    assert ledger.begin(push_id(0)) is PushState.APPLIED
    assert ledger.duplicates == 2


def test_push_far_beyond_a_gap_is_refused() -> None:
    ledger = PushLedger(WORKERS)
    apply(ledger, push_id(0))

    with pytest.raises(ProtocolError, match="but push 1 did not"):
        ledger.begin(push_id(1 + MAX_AHEAD))


def test_ledger_is_restored() -> None:
    before, after = PushLedger(WORKERS), PushLedger(WORKERS)
    for sequence in (0, 1, 4):
        apply(before, push_id(sequence))

    after.restore(before.progress())
    after.restore_applied(before.applied())

    assert [after.state(push_id(i)) is PushState.APPLIED for i in range(5)] == [1, 1, 0, 0, 1]
    assert after.progress() == before.progress()
    apply(after, push_id(2))
    apply(after, push_id(3))
    assert steps(after) == {0: 5}, "push 4 was not forgotten"


def positions(ledger: PushLedger, worker: int = 0) -> dict[str, str]:
    return dict(ledger.progress()[worker].partitions)


@given(order=st.permutations(range(5)))
def test_places_in_partitions_are_those_of_the_pushes_before_the_first_gap(
    order: list[int],
) -> None:
    ledger = PushLedger(WORKERS)
    applied: set[int] = set()
    told = [{"a": "1", "b": ""}, {"a": "2"}, {}, {"b": "7 +1", "c": ""}, {"a": "3", "b": "7"}]

    for sequence in order:
        apply(ledger, replace(push_id(sequence), partitions=told[sequence]))
        applied.add(sequence)

        whole = next(number for number in range(6) if number not in applied)
        expected = {name: at for each in told[:whole] for name, at in each.items()}
        assert not whole or positions(ledger) == expected


def test_the_first_push_of_a_process_has_the_places_of_all_partitions() -> None:
    """One that goes on elsewhere than a server is, as another server had less, is believed."""
    ledger = PushLedger(WORKERS)
    apply(ledger, replace(push_id(0), partitions={"a": "5", "b": "9"}))

    apply(ledger, replace(push_id(0, incarnation=2), partitions={"a": "4", "c": ""}))

    assert positions(ledger) == {"a": "4", "c": ""}


def test_a_resumed_run_has_the_places_of_its_checkpoint_until_it_pushes() -> None:
    ledger = PushLedger(WORKERS)
    earlier = WorkerProgress(
        incarnation=1,
        sequence=4,
        step=5,
        position="x",
        partitions={"a": "5"},
        sent=1,
        sent_partitions={"a": "6"},
    )

    ledger.restore({0: earlier})
    before = ledger.progress()[0]
    apply(ledger, replace(push_id(0, incarnation=2, first_step=5), partitions={"a": "5"}))
    apply(ledger, replace(push_id(1, incarnation=2, first_step=5), partitions={"b": "1"}))

    assert before == replace(earlier, sent=0, sent_partitions={})
    assert positions(ledger) == {"a": "5", "b": "1"}


@pytest.mark.parametrize(
    ("partitions", "fault"),
    [
        ({f"p/{k}": "0" for k in range(10_001)}, "reports 10001 partitions, expected up to 10000"),
        ({"p": "x" * 1025}, "a partition of more than 1024 characters"),
    ],
)
def test_implausible_partitions_are_refused(partitions: dict[str, str], fault: str) -> None:
    with pytest.raises(ProtocolError, match=fault):
        require_plausible("worker 0", replace(push_id(0), partitions=partitions))


def test_places_in_files_of_a_queue_stay_when_another_process_has_the_place() -> None:
    """It trains other files, and servers differ in what they have of the first process."""
    ledger = PushLedger(Members(1))
    apply(ledger, replace(push_id(0), partitions={f"{FILE}0": "1 07", "a": "5"}))

    apply(ledger, replace(push_id(0, incarnation=2), partitions={f"{FILE}1": "1 02"}))

    assert ledger.progress()[0].partitions == {f"{FILE}0": "1 07", f"{FILE}1": "1 02"}
