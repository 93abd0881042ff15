"""A job with heter trainers, each member a thread with a client of its own; servers are real."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from ctr_ps.ctr_model.models.model import Model
from ctr_ps.protos.role import HeterRole
from ctr_ps.ps_worker.extras.heter.connect import heter_trainers
from ctr_ps.ps_worker.extras.heter.heter_job import train_heter
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.plan import model_plan_of
from ctr_ps.ps_worker.run.run import Run
from tests.support.cluster import Cluster, cluster
from tests.support.processes import free_port
from tests.support.training import together, worker_run

CpuTrainer = Callable[[Run, int], object]
"""What a CPU trainer does in its run, given its index."""


class HeterCluster:
    """A running job: its servers, results of heter trainers, and the members that had left in the end."""

    def __init__(self, servers: Cluster, endpoints: Sequence[str]) -> None:
        self.servers = servers
        self.heter_endpoints = tuple(endpoints)
        self.figures: list[dict[str, Any]] = [{} for _ in endpoints]
        self.left: set[int] = set()

    def run_worker(
        self, index: int, model: Model, settings: Job, work: CpuTrainer, num_workers: int
    ) -> None:
        heter = heter_trainers(self.heter_endpoints, settings, worker=index)
        with worker_run(
            self.servers.client(joins=False),
            model,
            settings,
            worker=index,
            num_workers=num_workers,
            num_heter=len(self.heter_endpoints),
            heter=heter,
            is_in_process=False,
        ) as run:
            work(run, index)
            run.leave()

    def run_heter(self, index: int, model: Model, settings: Job, num_workers: int) -> None:
        role = HeterRole(
            endpoints=tuple(self.servers.endpoints),
            heter_endpoints=self.heter_endpoints,
            heter_index=index,
            num_workers=num_workers,
        )
        store = self.servers.client(joins=False)
        self.figures[index] = train_heter(
            model_plan_of(model, settings, role), store, host="127.0.0.1"
        )


def run_job(
    model: Callable[[], Model],
    settings: Job,
    work: CpuTrainer,
    *,
    num_workers: int = 2,
    num_heter: int = 1,
    num_servers: int = 1,
) -> HeterCluster:
    """Runs a job to its end: `work` in each CPU trainer, with `model()` in each member.

    Without heter trainers CPU trainers train the whole model.
    """
    with (
        ExitStack() as ports,
        cluster(
            num_servers=num_servers, num_workers=num_workers, num_heter=num_heter, wait_limit_s=30
        ) as servers,
    ):
        held = [ports.enter_context(free_port()) for _ in range(num_heter)]
        ports.close()
        job = HeterCluster(servers, [f"127.0.0.1:{port}" for port in held])
        works: list[Callable[[], object]] = [
            partial(job.run_worker, index, model(), settings, work, num_workers)
            for index in range(num_workers)
        ]
        works += [
            partial(job.run_heter, index, model(), settings, num_workers)
            for index in range(num_heter)
        ]
        together(*works)
        job.left = set(servers.client(joins=False).status().left)
        return job
