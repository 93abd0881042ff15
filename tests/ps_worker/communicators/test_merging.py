import itertools
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.ps_worker.communicators.merging import GradientMerger
from ctr_ps.ps_worker.communicators.push_ids import PushIds
from ctr_ps.ps_worker.data.blocks import DataPosition
from tests.support.stores import member


def gradients(key: int, value: float, examples: int = 10) -> Gradients:
    return Gradients(
        sparse={
            "t": SparseGrad(
                np.array([key], np.uint64), np.full((1, 2), value, np.float32), examples
            )
        },
        dense={"dense": DenseGrad(np.full(3, value, np.float32), examples)},
    )


def merger(sparse: int = 1, dense: int = 1, max_delay_s: float = 1.0) -> GradientMerger:
    return GradientMerger(sparse_batches=sparse, dense_batches=dense, max_delay_s=max_delay_s)


@pytest.mark.parametrize(("sparse", "dense"), [(2, 3), (3, 2)])
def test_merger_is_full_with_the_batches_that_leave_together(sparse: int, dense: int) -> None:
    """Then the sender is woken, and no sooner, but for the first, from which the delay counts."""
    pending = merger(sparse=sparse, dense=dense)
    found = []
    for _ in range(2):
        pending.add(gradients(1, 1.0), 10, now=0.0, pulled=0)
        found.append(pending.is_full)

    assert found == [False, True]
    assert pending.take(now=0.0) is not None
    assert not pending.is_full


def test_what_waits_when_more_batches_are_merged_leaves_as_it_is() -> None:
    """A group that others follow takes no more steps, and would be waited for until it is due."""
    pending = merger(sparse=1, dense=1)
    for key in (1, 2):
        pending.add(gradients(key, 1.0), 10, now=0.0, pulled=0)
    pending.sparse_batches = pending.dense_batches = 3
    pending.add(gradients(3, 1.0), 10, now=0.0, pulled=0)

    assert pending.is_full
    first = pending.take(now=0.0)
    assert first is not None
    assert first.batches == first.dense_batches == 1
    assert not pending.is_full
    assert pending.take(now=0.0) is None
    pending.add(gradients(4, 1.0), 10, now=0.0, pulled=0)
    second = pending.take(now=0.0)
    assert second is not None
    assert second.batches == second.dense_batches == 3


def test_merged_gradient_is_the_sum_with_all_examples() -> None:
    pending = merger(sparse=2, dense=2)
    pending.add(gradients(1, 1.0, examples=10), 10, now=0.0, pulled=0)
    pending.add(gradients(1, 2.0, examples=30), 30, now=0.1, pulled=0)

    push = pending.take(now=0.2)

    assert push is not None
    merged = push.gradients()
    assert merged.sparse["t"].examples == merged.dense["dense"].examples == push.examples == 40
    assert merged.sparse["t"].values.tolist() == [[3.0, 3.0]]
    assert merged.dense["dense"].values.tolist() == [3.0, 3.0, 3.0]


def test_sparse_leaves_before_dense_when_dense_merges_longer() -> None:
    pending = merger(sparse=1, dense=2)

    pending.add(gradients(1, 1.0), 10, now=0.0, pulled=0)
    first = pending.take(now=0.0)
    pending.add(gradients(2, 1.0), 10, now=0.1, pulled=0)
    second = pending.take(now=0.1)

    assert first is not None
    assert second is not None
    assert (list(first.sparse), list(first.dense), first.examples) == (["t"], [], 10)
    assert (list(second.sparse), list(second.dense), second.examples) == (["t"], ["dense"], 10)
    assert second.dense["dense"].examples == 20


def test_each_example_is_counted_once() -> None:
    pending = merger(sparse=2, dense=3)
    counted = 0
    for step in range(7):
        pending.add(gradients(step, 1.0), 10, now=float(step) / 100, pulled=0)
        while (push := pending.take(now=float(step) / 100)) is not None:
            counted += push.examples
    while (push := pending.take(now=0.07, everything=True)) is not None:
        counted += push.examples

    assert counted == 70
    assert pending.due() is None


def test_gradient_is_due_after_the_longest_delay() -> None:
    pending = merger(sparse=100, dense=100, max_delay_s=0.5)
    pending.add(gradients(1, 1.0), 10, now=2.0, pulled=0)

    assert pending.due() == 2.5
    assert pending.take(now=2.4) is None
    assert pending.take(now=2.5) is not None


@pytest.mark.parametrize("kept", ["sparse", "dense"])
def test_longer_merged_gradient_is_due_since_its_first_batch(kept: str) -> None:
    """The other kind leaves with every second batch, so what it waits for then began later."""
    pending = merger(
        sparse=100 if kept == "sparse" else 2, dense=100 if kept == "dense" else 2, max_delay_s=1.0
    )
    for now in (0.0, 0.2, 0.4):
        pending.add(gradients(1, 1.0), 10, now=now, pulled=0)
        pending.take(now=now)

    assert pending.due() == 1.0
    push = pending.take(now=1.0)
    assert push is not None
    assert (bool(push.sparse), bool(push.dense)) == (kept == "sparse", kept == "dense")
    assert pending.due() == 1.4
    push = pending.take(now=1.4)
    assert push is not None
    assert (bool(push.sparse), bool(push.dense)) == (kept != "sparse", kept != "dense")
    assert pending.due() is None


def test_dense_array_may_be_reused_after_it_was_added() -> None:
    pending = merger(sparse=2, dense=2)
    batch = gradients(1, 1.0)
    pending.add(batch, 10, now=0.0, pulled=0)
    batch.dense["dense"].values[:] = 99.0
    pending.add(gradients(1, 1.0), 10, now=0.0, pulled=0)

    push = pending.take(now=0.0)

    assert push is not None
    assert push.dense["dense"].values.tolist() == [2.0, 2.0, 2.0]


def test_array_given_back_is_summed_into_again_from_zero() -> None:
    pending = merger()
    pending.add(gradients(1, 5.0), 10, now=0.0, pulled=0)
    first = pending.take(now=0.0)
    assert first is not None
    pending.give_back(first)

    pending.add(gradients(1, 1.0), 10, now=0.1, pulled=0)
    second = pending.take(now=0.1)

    assert second is not None
    assert second.dense["dense"].values is first.dense["dense"].values
    assert second.dense["dense"].values.tolist() == [1.0, 1.0, 1.0]


def test_backlog_leaves_in_pushes_of_no_more_than_the_merge() -> None:
    pending = merger(sparse=2, dense=3)
    for step in range(7):
        pending.add(gradients(step, 1.0), 10, now=0.0, pulled=step)

    pushes = []
    while (push := pending.take(now=0.0)) is not None:
        pushes.append((push.batches, push.dense_batches, push.pulled))
    rest = pending.take(now=0.0, everything=True)

    assert pushes == [(2, 3, 0), (2, 3, 2), (2, 0, 4)]
    assert rest is not None
    assert (rest.batches, rest.dense_batches, rest.examples) == (1, 1, 10)
    assert pending.due() is None


@pytest.mark.parametrize("everything", [False, True])
def test_empty_merger_has_nothing(everything: bool) -> None:
    assert merger().take(now=1e9, everything=everything) is None
    assert merger().due() is None


def test_merged_push_says_how_many_batches_and_the_oldest_version_of_their_rows() -> None:
    """Sparse gradients of two batches; then those of two more, with the dense ones of all four."""
    pending = merger(sparse=2, dense=4)
    pushes = []
    for pulled in (7, 5, 8, 9):
        pending.add(gradients(1, 1.0), 10, now=0.0, pulled=pulled)
        if (push := pending.take(now=0.0)) is not None:
            pushes.append((push.batches, push.pulled))

    assert pushes == [(2, 5), (2, 8)]


def test_dense_push_of_its_own_completes_no_batch() -> None:
    pending = merger(sparse=2, dense=1)
    pending.add(gradients(1, 1.0), 10, now=0.0, pulled=3)

    push = pending.take(now=0.0)

    assert push is not None
    assert (push.batches, push.examples, push.pulled) == (0, 0, 3)


def test_step_of_several_batches_counts_as_so_many() -> None:
    pending = merger(sparse=3, dense=3)
    pending.add(gradients(1, 1.0), 10, now=0.0, pulled=0, numbers=[1, 2])
    assert pending.take(now=0.0) is None

    pending.add(gradients(1, 1.0), 10, now=0.0, pulled=0, numbers=[3, 4])

    push = pending.take(now=0.0)
    assert push is not None
    assert push.batches == 4


@given(
    sparse=st.integers(1, 4),
    dense=st.integers(1, 4),
    moves=st.lists(st.sampled_from(["add", "take", "late"]), max_size=40),
    swaps=st.randoms(use_true_random=False),
)
def test_push_id_claims_what_has_left_and_nothing_more(
    sparse: int, dense: int, moves: list[str], swaps: Random
) -> None:
    """Threads take batches in order and push them in another; a batch is its key and its dense element."""
    tracker, pending = PushIds(member()), merger(sparse, dense)
    taken: list[int] = []
    rows_left: set[int] = set()
    dense_left = np.zeros(100)
    for now, move in enumerate([*moves, *["late"] * 50]):
        if move == "add":
            taken.append(tracker.take(DataPosition(skip=now)))
            taken.append(tracker.take(DataPosition(skip=now)))
            number = taken.pop(swaps.randrange(len(taken)))
            block = np.eye(100, dtype=np.float32)[number]
            row = SparseGrad(np.array([number], np.uint64), np.ones((1, 2), np.float32), 1)
            grads = Gradients({"t": row}, {"dense": DenseGrad(block, 1)})
            pending.add(grads, 1, now=now / 100, pulled=0, numbers=[number])
            continue
        push = pending.take(now=now / 100, everything=move == "late")
        if push is None:
            continue
        rows_left |= {int(key) for grad in push.sparse.get("t", []) for key in grad.keys}
        dense_left += sum((grad.values for grad in push.dense.values()), np.zeros(100))

        push_id = tracker.next(examples=1, batches=push.batches, pulled=0, whole=push.whole)

        whole = rows_left & set(np.flatnonzero(dense_left).tolist())
        assert push_id.step == next(n for n in itertools.count() if n + 1 not in whole)
