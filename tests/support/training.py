"""A small model and random batches, and one worker's training with them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from ctr_model.batch import Batch
from ctr_model.models.model import Model
from ctr_model.registry import build_model
from ctr_model.schema import Schema
from protos.store import Store
from ps_worker.job import Job, override_job
from ps_worker.run.run import Run
from ps_worker.training.meter import Progress

NUM_DENSE, NUM_SLOTS = 3, 4
LIMIT_S = 60.0


def small_model() -> Model:
    """Returns a CTR-DNN that trains in no time."""
    return build_model(
        "ctr_dnn",
        Schema.numbered(NUM_DENSE, NUM_SLOTS),
        {"dim": 4, "hidden": [16, 8], "init_range": 0.1},
    )


def job(mode: str, *overrides: str) -> Job:
    """Returns a job for the small model."""
    return override_job({}, [f"strategy.mode={mode}", *overrides], source="test")


def random_batches(num_batches: int, batch_size: int, *, seed: int) -> list[Batch]:
    """Returns batches of which many share keys; clicks follow the first slot."""
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(num_batches):
        values = rng.integers(0, 50, (batch_size, NUM_SLOTS)).astype(np.uint64)
        slots = np.arange(NUM_SLOTS, dtype=np.uint64) << np.uint64(32)
        clicked = (values[:, 0] % 2 == 0) ^ (rng.random(batch_size) < 0.1)
        batches.append(
            Batch(
                labels=clicked.astype(np.float32),
                dense=rng.normal(size=(batch_size, NUM_DENSE)).astype(np.float32),
                keys=(values + slots).reshape(-1),
                offsets=np.arange(batch_size * NUM_SLOTS + 1, dtype=np.int32),
                num_slots=NUM_SLOTS,
            )
        )
    return batches


def joined(batches: Sequence[Batch]) -> Batch:
    """Returns the examples of several batches as one."""
    sizes = sum(batch.size for batch in batches)
    return Batch(
        labels=np.concatenate([batch.labels for batch in batches if batch.labels is not None]),
        dense=np.concatenate([batch.dense for batch in batches]),
        keys=np.concatenate([batch.keys for batch in batches]),
        offsets=np.arange(sizes * NUM_SLOTS + 1, dtype=np.int32),
        num_slots=NUM_SLOTS,
    )


def train_worker(
    store: Store,
    batches: Iterable[Batch],
    settings: Job,
    *,
    worker: int = 0,
    num_workers: int = 1,
    is_in_process: bool = True,
) -> Progress:
    """Trains one worker on its batches of up to `train.batch_size`, from the first barrier to the last."""
    with Run(
        store,
        small_model(),
        settings,
        worker=worker,
        num_workers=num_workers,
        is_in_process=is_in_process,
    ) as run:
        run.train(batches)
        run.barrier("end")
        return run.progress


def train_workers(
    stores: Sequence[Store],
    data: Sequence[Iterable[Batch]],
    settings: Job,
    *,
    is_in_process: bool = False,
) -> None:
    """Trains a worker for each element of `data` at once, as `train_worker` does."""
    together(
        *(
            partial(
                train_worker,
                store,
                batches,
                settings,
                worker=worker,
                num_workers=len(data),
                is_in_process=is_in_process,
            )
            for worker, (store, batches) in enumerate(zip(stores, data, strict=True))
        )
    )


def together(*works: Callable[[], object]) -> None:
    """Runs functions in threads at once; raises the first error of any."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a worker did not end"
    if errors:
        raise errors[0]
