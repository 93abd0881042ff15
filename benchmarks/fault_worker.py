"""One worker of bench_faults: trains until it is told to stop, and says when each batch was trained.

    stdin:  save NAME | stop            stdout: one JSON line an event

It trains on the same batches again and again. Times are those of `time.time`, which all processes share.
"""

import argparse
import itertools
import json
import os
import queue
import sys
import threading
import time

from benchmarks.rows import batches
from benchmarks.train_worker import job_of
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.protos.role import WorkerRole, role_from_environment
from ctr_ps.protos.runtime.environment import keep_freed_memory
from ctr_ps.ps_worker.checkpoints.saver import Saver
from ctr_ps.ps_worker.cluster.open_store import open_store
from ctr_ps.ps_worker.job.sections import CheckpointSection
from ctr_ps.ps_worker.run.plan import model_plan_of
from ctr_ps.ps_worker.run.run import Run

NUM_BATCHES = 64
SAYS_EVERY = 100  # batches
STOP = "stop"


def say(event: str, **what: object) -> None:
    """Prints an event."""
    print(json.dumps({"event": event, "time": time.time(), **what}), flush=True)


class Training:
    """A run that is told what to do, from stdin."""

    def __init__(self, run: Run, folder: str) -> None:
        """Saves checkpoints in `folder`."""
        self._run = run
        self._saver = Saver(run.store, CheckpointSection(dir=folder))
        self._saves: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._times: list[float] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            command, _, name = line.strip().partition(" ")
            if command == STOP:
                break
            self._saves.put(name)
        self._is_over.set()

    def train(self, batch_size: int) -> None:
        """Trains until it is told to stop."""
        rows = list(batches(NUM_BATCHES, batch_size, seed=1000 + self._run.worker))
        self._run.start()
        say("start")
        endless = itertools.takewhile(lambda _: not self._is_over.is_set(), itertools.cycle(rows))
        self._run.train(endless, after_step=self._after_step)
        self._saver.finish()
        self._run.leave()
        say("end", times=self._times)

    def _after_step(self) -> None:
        self._times.append(time.time())
        if len(self._times) % SAYS_EVERY == 0:
            say("trained", batches=len(self._times))
        if not self._saves.empty():
            self._save(self._saves.get())

    def _save(self, name: str) -> None:
        """Saves as a job does: training goes on as soon as the snapshot is taken."""
        say("save")
        self._run.flush()
        self._run.settle()
        self._saver.save(name, len(self._times), {})
        say("snapshot")
        threading.Thread(target=self._tell_of_save).start()

    def _tell_of_save(self) -> None:
        self._saver.finish()
        say("saved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--folder", required=True, help="of checkpoints")
    parser.add_argument("--load", default="", help="checkpoint to start with")
    options = parser.parse_args()
    role = role_from_environment(os.environ)
    if not isinstance(role, WorkerRole):
        raise SystemExit("fault_worker is for workers")
    job = job_of(options.batch_size, options.set)
    keep_freed_memory()  # as the commands do
    model = build_model("ctr_dnn", criteo_schema(), {})
    with (
        open_store(role, job.cluster) as store,
        Run(store, model_plan_of(model, job, role)) as run,
    ):
        if run.is_first and options.load:
            run.load(options.load)
        Training(run, options.folder).train(options.batch_size)


if __name__ == "__main__":
    main()
