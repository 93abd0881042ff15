"""Jobs that train in this process; a small model, random batches, and a worker's training with them."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.role import WorkerRole
from ctr_ps.protos.store import Store
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.device_pass import new_pass_trainer
from ctr_ps.ps_worker.extras.heter.connect import HeterTrainers, before_the_cut
from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.job.model import trained_model
from ctr_ps.ps_worker.run.plan import Plan, model_plan_of, plan_of
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.training_job.train_job import Summary, train_job
from ctr_ps.ps_worker.training.meter import Progress

NUM_DENSE, NUM_SLOTS = 3, 4
LIMIT_S = 60.0


def small_model() -> Model:
    return build_model(
        "ctr_dnn",
        Schema.numbered(NUM_DENSE, NUM_SLOTS),
        {"dim": 4, "hidden": [16, 8], "init_range": 0.1},
    )


def job(mode: str, *overrides: str) -> Job:
    return job_of(f"strategy.mode={mode}", *overrides)


def job_of(*settings: str) -> Job:
    return override_job({}, settings, source="test")


def train_alone(job: Job) -> Summary:
    """Runs a job with one worker on a store in this process."""
    return train_job(plan_of(job), ParameterStore())


def train_together(
    job: Job, num_workers: int = 2, *, store: ParameterStore | None = None
) -> list[Summary]:
    """Runs a job with several workers on a store in this process; returns the summary of each."""
    plan = plan_of(job)
    store = store or ParameterStore(num_workers=num_workers, wait_limit_s=LIMIT_S)
    plans = [plan_as(plan, worker, num_workers) for worker in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(lambda each: train_job(each, store), plans))


def random_batches(num_batches: int, batch_size: int, *, seed: int) -> list[Batch]:
    """Returns batches with common keys; clicks depend on the first slot."""
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


def worker_role(
    worker: int = 0, num_workers: int = 1, *, num_heter: int = 0, is_in_process: bool = True
) -> WorkerRole:
    """Returns the role of a worker, whose servers are not at the endpoints that it names."""
    return WorkerRole(
        endpoints=() if is_in_process else ("server:1",),
        worker_index=worker,
        num_workers=num_workers,
        heter_endpoints=tuple(f"heter:{index + 1}" for index in range(num_heter)),
    )


def plan_as(plan: Plan, worker: int, num_workers: int = 1, *, is_in_process: bool = True) -> Plan:
    """Returns the plan of the same job for another worker."""
    role = worker_role(worker, num_workers, is_in_process=is_in_process)
    trained = trained_model(plan.job, plan.model, worker=worker)
    return replace(plan, role=role, trained=trained, terms={**plan.terms, **role.members.terms})


def worker_run(
    store: Store,
    model: Model,
    settings: Job,
    *,
    worker: int = 0,
    num_workers: int = 1,
    num_heter: int = 0,
    heter: HeterTrainers | None = None,
    is_in_process: bool = True,
) -> Run:
    """Returns one worker's part in a run."""
    role = worker_role(worker, num_workers, num_heter=num_heter, is_in_process=is_in_process)
    plan = model_plan_of(model, settings, role, new_pass_trainer=new_pass_trainer)
    return Run(store, before_the_cut(plan, heter), heter=heter)


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
    with worker_run(
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
    """Runs functions in threads; raises the first error of any."""
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


def written_module(folder: Path, methods: str) -> str:
    """Writes a module of PyTorch, a sum of embeddings with some methods more; returns its `model.name`."""
    (folder / "net.py").write_text(
        "from torch import nn\n"
        "from ctr_ps.ctr_model.torch import SlotEmbedding\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, schema):\n"
        "        super().__init__()\n"
        "        self.embedding = SlotEmbedding(dim=1)\n"
        "    def forward(self, batch):\n"
        "        return self.embedding(batch).sum((1, 2))\n"
        f"{methods}"
    )
    return f"{folder}/net.py:Net"
