"""One suite for every store: workers that train together, or each for itself."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from protos.errors import ProtocolError, WaitTimeoutError
from protos.store import Missing, Staleness, Store, WorkerProgress
from tests.support.stores import (
    KEYS,
    TOWER,
    assert_same_parameters,
    in_process,
    pull,
    push_id,
    random_gradients,
)


def test_worker_that_left_without_a_push_is_in_the_status(store):
    store.leave(0, step=0)

    assert store.status().examples == {0: 0}
    assert store.status().left == {0}


def train_steps(store: Store, worker: int, num_steps: int) -> None:
    """Takes part in steps of synchronous training, and leaves."""
    for step in range(num_steps):
        pull(store, at=step)
        gradients = random_gradients(1000 * worker + step, examples=3 + worker)
        store.push_grad(gradients, push_id(worker, step, 3 + worker), at=step).result()
    store.leave(worker, step=num_steps)


def train_together(stores: list[Store], num_steps: list[int]) -> None:
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(train_steps, stores, range(len(stores)), num_steps))


@pytest.mark.parametrize("num_servers", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "num_steps", [[4, 4, 4], [2, 5, 3], [4, 0, 1]], ids=["equal", "less", "none"]
)
def test_sync_model_depends_on_neither_timing_nor_servers(open_job, num_steps):
    """The reference gets the workers' parts in the other order, one after the other.

    Three workers, because the sum of two numbers is the same in either order.
    """
    stores = open_job(num_workers=3)
    reference = in_process(num_workers=3)

    train_together(stores, num_steps)
    for step in range(max(num_steps) + 1):
        for worker in (2, 1, 0):
            if step == num_steps[worker]:
                reference.leave(worker, step=step)
            elif step < num_steps[worker]:
                gradients = random_gradients(1000 * worker + step, examples=3 + worker)
                reference.push_grad(gradients, push_id(worker, step, 3 + worker), at=step).result()

    assert_same_parameters(reference, stores[0])
    status = stores[0].status()
    assert status.version == max(num_steps)
    assert status.left == {0, 1, 2}
    for worker, steps in enumerate(num_steps):
        assert status.examples.get(worker, 0) == (3 + worker) * steps


def test_pull_waits_for_its_version(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), push_id(0), at=0).result()

    pulled = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=1)
    assert np.count_nonzero(pull(first)["wide"]) == 0
    second.push_grad(random_gradients(1), push_id(1), at=0).result()

    assert np.count_nonzero(pulled.result().rows["wide"]) > 0


def test_version_that_does_not_come_names_who_is_behind(open_job):
    first, _ = open_job(num_workers=2, wait_limit_s=0.1)
    first.push_grad(random_gradients(0), push_id(0), at=0).result()

    with pytest.raises(WaitTimeoutError, match=r"version 1 .* workers \[1\]"):
        first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=1).result()


def test_push_out_of_step_is_refused(open_job):
    first, _ = open_job(num_workers=2)

    with pytest.raises(ProtocolError, match="worker 0 pushed step 1, expected 0"):
        first.push_grad(random_gradients(0), push_id(0), at=1).result()


def test_barrier_lets_all_go_on_at_one_version(open_job):
    """Worker 0 waits from step 1 on, so worker 1 takes steps 1 and 2 alone."""
    first, second = open_job(num_workers=2)
    versions: dict[int, int] = {}

    def wait() -> None:
        first.push_grad(random_gradients(0), push_id(0), at=0).result()
        versions[0] = first.barrier("pass", 0, step=1).result()

    thread = threading.Thread(target=wait)
    thread.start()
    for step in range(3):
        pull(second, at=step)
        second.push_grad(random_gradients(step), push_id(1, step), at=step).result()
    pull(second, at=3)  # worker 0 has come, or this would wait
    versions[1] = second.barrier("pass", 1, step=3).result()
    thread.join(10)

    assert versions == {0: 3, 1: 3}


def test_barrier_that_some_do_not_reach_names_them(open_job):
    first, *_ = open_job(num_workers=3, wait_limit_s=0.1)

    with pytest.raises(WaitTimeoutError, match=r"barrier 'pass': workers \[1, 2\] did not come"):
        first.barrier("pass", 0, step=0).result()


def test_barrier_does_not_wait_for_workers_that_are_done(open_job):
    first, second = open_job(num_workers=2)
    second.leave(1, step=0)

    assert first.barrier("pass", 0, step=0).result() == 0


def test_status_counts_rows_examples_and_workers(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), push_id(0, 0, examples=8)).result()
    first.push_grad(random_gradients(0), push_id(0, 1, examples=8)).result()
    second.push_grad(random_gradients(0), push_id(1, 0, examples=5)).result()
    second.leave(1, step=0)

    status = first.status()

    assert status.examples == {0: 16, 1: 5}
    assert status.left == {1}
    assert status.version == 3
    assert status.tables["deep"].rows == 60
    assert status.tables["deep"].size_bytes > 60 * 4 * 10


def test_version_counts_the_batches_pushed_on_arrival(open_job):
    """A pull for a version waits for them, too, and says which it has."""
    first, second = open_job(num_workers=2)
    waiting = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=5)

    versions = [
        first.push_grad(random_gradients(0), push_id(0, batches=3)).result(),
        second.push_grad(random_gradients(1), push_id(1, batches=0)).result(),
        second.push_grad(random_gradients(2), push_id(1, 1, batches=2)).result(),
    ]

    assert versions == [3, 3, 5]
    assert waiting.result().version == 5
    assert np.count_nonzero(waiting.result().rows["wide"]) > 0
    assert first.pull_dense({"tower": np.empty(TOWER.length, np.float32)}).result() == 5


def test_steps_go_on_after_a_barrier_where_pushes_on_arrival_ended(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), push_id(0, batches=3)).result()

    meetings = [
        store.barrier("pass", worker, step=0) for worker, store in enumerate((first, second))
    ]
    assert [met.result() for met in meetings] == [3, 3]
    for worker, store in enumerate((first, second)):
        store.push_grad(random_gradients(1), push_id(worker, 1), at=3).result()

    assert pull(first, at=4)["wide"].any()
    assert first.status().version == 4


def test_push_on_arrival_while_a_step_waits_for_parts_changes_nothing(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), push_id(0), at=0).result()
    before, status = first.digest(), first.status()

    with pytest.raises(ProtocolError, match="worker 1 pushed to be applied on arrival"):
        second.push_grad(random_gradients(1), push_id(1)).result()

    assert first.digest() == before
    assert first.status() == status


def test_status_counts_how_stale_batches_were(open_job, num_servers):
    """Every server counts every batch."""
    first, second = open_job(num_workers=2)
    pulled = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL).result().version

    first.push_grad(random_gradients(0), push_id(0, batches=4, pulled=pulled)).result()
    second.push_grad(random_gradients(1), push_id(1, batches=2, pulled=pulled)).result()
    second.push_grad(random_gradients(1), push_id(1, 1, batches=0, pulled=pulled)).result()
    second.push_grad(random_gradients(1), push_id(1, 2, pulled=99)).result()

    times = max(1, num_servers)
    assert first.status().staleness == Staleness().add(0, 5 * times).add(4, 2 * times)


def test_steps_in_common_are_never_stale(open_job, num_servers):
    """A worker's part counts once, however many batches it sums over."""
    stores = open_job(num_workers=2)
    for step in range(2):
        for worker, store in enumerate(stores):
            gradients = random_gradients(step)
            store.push_grad(
                gradients, push_id(worker, step, batches=3, pulled=step), at=step
            ).result()

    assert stores[0].status().staleness == Staleness().add(0, 4 * max(1, num_servers))


def test_worker_that_is_not_of_the_job_is_refused(open_job):
    first, _ = open_job(num_workers=2)
    before = first.digest()

    with pytest.raises(ProtocolError, match="worker 2 called, but this job has 2 workers"):
        first.leave(2, step=0)
    with pytest.raises(ProtocolError, match="worker 2 called, but this job has 2 workers"):
        first.push_grad(random_gradients(0), push_id(2)).result()

    assert first.status().left == frozenset()
    assert first.digest() == before


def test_status_tells_how_much_of_each_worker_is_applied(open_job):
    first, second = open_job(num_workers=2)
    push_ids = [replace(push_id(worker, 0), position=f"worker {worker}") for worker in range(2)]

    first.push_grad(random_gradients(0), push_ids[0], at=0).result()
    waiting = first.status().progress
    second.push_grad(random_gradients(1), push_ids[1], at=0).result()

    assert waiting == {}
    assert second.status().progress == {
        worker: WorkerProgress(incarnation=7, sequence=0, step=0, position=f"worker {worker}")
        for worker in range(2)
    }


def progress_of(step: int, position: str) -> WorkerProgress:
    return WorkerProgress(incarnation=1, sequence=8, step=step, position=position)


def test_run_goes_on_at_its_version_with_its_progress(open_job):
    first, second = open_job(num_workers=2)
    progress = {0: progress_of(5, "there"), 1: progress_of(4, "here")}

    first.resume(5, progress)

    assert (first.status().version, first.status().progress) == (5, progress)
    together = [
        store.barrier("start", worker, step=0) for worker, store in enumerate([first, second])
    ]
    assert [each.result() for each in together] == [5, 5]
    first.push_grad(random_gradients(0), push_id(0, 0, pulled=5), at=5).result()
    assert first.status().progress == progress
    second.push_grad(random_gradients(1), push_id(1, 0, pulled=5), at=5).result()
    assert first.status().version == 6
    assert first.status().staleness.largest == 0
    assert {each.position for each in first.status().progress.values()} == {""}


def test_worker_that_was_not_in_the_run_is_refused(open_job):
    (store,) = open_job(num_workers=1)

    with pytest.raises(ProtocolError, match="worker 1"):
        store.resume(5, {1: progress_of(5, "")})

    assert (store.status().version, store.status().progress) == (0, {})


def test_run_that_has_begun_does_not_go_on_with_another(open_job):
    (store,) = open_job(num_workers=1)
    store.push_grad(random_gradients(0), push_id(0)).result()

    with pytest.raises(ProtocolError, match="restart the servers"):
        store.resume(5, {})

    assert store.status().version == 1
