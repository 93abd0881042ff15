"""One worker's part in a training run, on a store that is open.

    load -> start, declare -> | train, steps, evaluate, save, barrier, all_reduce, in any order | -> leave
                                                                                 told to end --`--> end_early

The model is declared when all have come to the start: then they know the base rate at which a fresh one
begins, and before if it is loaded, or needs none.

A job file (training_job) drives it from pass to pass, a script (ps_worker/fleet) step by step. Workers wait
for each other first when they start to train. Until then worker 0 may load a checkpoint, from which all
train; later it may not, since in some modes each worker has parameters of its own.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import tasks_of
from ctr_ps.protos.errors import AbortedError, UsageError, counted
from ctr_ps.protos.store import (
    Numbers,
    ParameterReader,
    ReduceOp,
    SaveRequest,
    Shrunk,
    Store,
    Version,
    WorkerLoss,
    WorkerProgress,
)
from ctr_ps.ps_worker.checkpoints.warm_start import warm_start
from ctr_ps.ps_worker.communicators.choice import communicator_of
from ctr_ps.ps_worker.communicators.communicator import Communicator
from ctr_ps.ps_worker.data.blocks import Batches
from ctr_ps.ps_worker.data.global_shuffle import Peers
from ctr_ps.ps_worker.job.checks import require_deal, require_one_worker
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, declare, num_biases, num_rates
from ctr_ps.ps_worker.run.membership import Membership, abort_by
from ctr_ps.ps_worker.run.plan import DenseTrainers, ModelPlan, PassParts, PassTrainer
from ctr_ps.ps_worker.run.termination import SAVE_S, STEP_S, Termination, abort
from ctr_ps.ps_worker.training.evaluation.base_rate import advice_on_loss, rates_of
from ctr_ps.ps_worker.training.evaluation.breakdown import Breakdown
from ctr_ps.ps_worker.training.evaluation.evaluator import Evaluation, OnPredictions, evaluate
from ctr_ps.ps_worker.training.meter import LearningRates, Progress
from ctr_ps.ps_worker.training.non_finite import NonFiniteBatches
from ctr_ps.ps_worker.training.step_loop import StepLoop, TrainedStep

logger = logging.getLogger(__name__)

_NOTHING = {ReduceOp.SUM: 0.0, ReduceOp.MAX: -np.inf, ReduceOp.MIN: np.inf}
"""Brought to a reduction, these leave it as it is."""


class Run(AbstractContextManager["Run"]):
    """Trains, evaluates and saves one model. For one thread.

    Leaving the `with` block ends the background work; what was not sent is lost. By an error it ends the job:
    no other worker waits for one that does not come.
    """

    def __init__(
        self, store: Store, plan: ModelPlan, *, heter: DenseTrainers | None = None
    ) -> None:
        """Joins the run; `heter` trains the dense parameters for this worker, None: it does that itself.

        Of the plan's job the sections [train], [optimizer], [life], [strategy], [device] and [cluster] count.

        Raises:
            JobError: If workers do not agree.
            CtrPsError: If servers do not answer, or hold another model; the latter may come with the start.
        """
        job, model, role = plan.job, plan.model, plan.role
        require_one_worker(job, role.num_workers, len(role.heter_endpoints))
        require_deal(job, role.members)
        self.store = store
        self.worker = role.worker_index
        self.num_workers = role.num_workers
        self.is_in_process = role.is_in_process  # the store
        self.progress = Progress(
            every_s=job.train.log_every_s,
            # With weights the loss is not comparable with that of the base rate.
            has_log_loss=getattr(model, "has_log_loss", False) and job.train.delay != "fnw",
            advice=job.in_words(advice_on_loss(job, is_in_process=role.is_in_process)),
            rates=LearningRates(plan.specs.optimizers, lambda: store.status().batches).shown,
        )
        self.non_finite = NonFiniteBatches(
            job.train.non_finite, worker=self.worker if role.num_workers > 1 else None
        )
        self._plan = plan
        self._model = model
        self._job = job
        self._heter = heter
        self._tasks = tasks_of(model)
        self._counting_tables = plan.specs.counting_tables
        self._communicator: Communicator | None = None  # None: not started
        self._earlier_progress: WorkerProgress | None = None
        self._partial_pass: str | None = None  # why its write back ended midway
        self._num_barriers = 0
        self.barriers_passed = 0  # by this process, all-reduces included
        self._version_of_barrier: Version = 0
        self._membership = Membership(
            store,
            self.worker,
            terms=plan.terms,
            limits=job.cluster,
            is_in_process=role.is_in_process,
        )
        if self.is_replacement:
            what = (
                "joining a running job" if role.members.is_elastic else "replacing a lost process"
            )
            logger.info("%s worker=%d", what, self.worker)
        self._is_declared = False
        if job.train.base_rate != "data" or not num_biases(model):
            try:
                self._declare(() if job.train.base_rate == "data" else job.train.base_rate)
            except BaseException as error:
                abort_by(error, store, self.worker)
                self.close()
                raise

    @property
    def is_replacement(self) -> bool:
        """Whether this process goes on where a lost one in its place was: the job has begun."""
        return self._membership.joined.barriers_passed > 0

    @property
    def has_trained_before(self) -> bool:
        """Whether the lost process before this one came to a barrier after that at the start."""
        return self._membership.joined.barriers_passed > 1

    @property
    def restarts(self) -> bool:
        """Whether this process goes on at a barrier `RESTART` after that at the start."""
        return self._membership.joined.restart > 0

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._membership.__exit__(kind, error, trace)
        finally:
            self.close()

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0, which loads, saves and shrinks for all."""
        return self.worker == 0

    @property
    def is_repeating(self) -> bool:
        """Whether the next barrier is one that the lost process before this one has passed."""
        return self.barriers_passed < self._membership.joined.barriers_passed

    def agree(self, terms: Mapping[str, str]) -> None:
        """Has the servers compare settings with those of other workers; see `Membership.agree`."""
        self._membership.agree(terms)

    def load(
        self, url: str, *, only: Sequence[str] = (), token: str = "", head: Iterable[Batch] = ()
    ) -> None:
        """Loads a checkpoint, see `Store.load`; worker 0 alone, before training.

        `head` is as for `start`, and read if the dense parameters are not taken.

        Raises:
            UsageError: If training has begun.
            CheckpointError: If there is no such checkpoint, or it does not fit; nothing was replaced.
        """
        if self._communicator is not None:
            raise UsageError(
                f"{url} cannot be loaded, as training has begun and workers hold parameters: load before "
                "the first pass"
            )
        takes_dense = not only or DENSE_BLOCK in only
        self._declare(() if takes_dense or self._is_declared else rates_of(head, self._tasks))
        self.store.load(url, only=only, token=token)
        start = warm_start(url, self._model, only)
        logger.info(
            "loaded %s taken=%s fresh=%s", url, ",".join(start.taken), ",".join(start.fresh)
        )

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], *, batches: int
    ) -> None:
        """Resumes the run whose checkpoint was loaded; worker 0 alone, before training.

        The parameters loaded have this version, and this much of the training of each worker, and of all.
        """
        self.store.resume(version, progress, batches=batches)
        logger.info("resuming an earlier run version=%d batches=%d", version, batches)

    def start(self, head: Iterable[Batch] = (), *, num_training: int | None = None) -> None:
        """Waits for all workers, and makes ready to train; once started, a no-op.

        Worker 0 reads `head`, first rows to train on, for the rate at which a fresh model begins.
        `num_training` workers have rows to train on, the same on all workers; None: all. Raises CtrPsError if
        others do not come.
        """
        if self._communicator is not None:
            return
        version = self._declare_together(head)
        status = self.store.status()
        communicator = communicator_of(
            self._job,
            self.store,
            self._plan.trained,
            self._plan.specs,
            self._plan.role,
            member=self._membership.member,
            num_training=num_training,
            batches_before=status.batches - status.version,
        )
        # The others may be far beyond the start when this process takes a lost one's place.
        communicator.rejoin(max(version, status.version) if self.is_replacement else version)
        self._earlier_progress = status.progress.get(self.worker)
        if self._earlier_progress is not None:
            communicator.push_ids.resume(self._earlier_progress)
            self.progress.resume(self._earlier_progress.step)
        self._communicator = communicator

    def _declare(self, rates: Sequence[float] = ()) -> None:
        if not self._is_declared:
            declare(self.store, self._plan.specs, rates)
            self._is_declared = True

    def _declare_together(self, head: Iterable[Batch]) -> Version:
        """Waits for all workers, and declares the model with the rates that worker 0 sees in `head`.

        Without, if one of them has declared it before: by loading or evaluating what was not trained yet.
        """
        told = np.full(num_rates(self._model) + 1, _NOTHING[ReduceOp.MAX])
        if self._is_declared:
            told[-1] = 1.0
        # Else it is told what the lost process was. Until a model is there, perhaps only servers other than
        # the first, which alone has the rates, have let that one pass.
        elif self.is_first and not (self.is_repeating and self.store.status().tables):
            told[:-1] = rates_of(head, self._tasks) or _NOTHING[ReduceOp.MAX]
        reduced = self.store.all_reduce("start", self.worker, told, ReduceOp.MAX, step=0).result()
        self.barriers_passed = max(1, self._membership.joined.restart - 1)
        self._version_of_barrier = reduced.version
        *rates, is_declared = reduced.values.tolist()
        self._declare(rates if np.isfinite(rates).all() and is_declared != 1.0 else ())
        return reduced.version

    @property
    def earlier_progress(self) -> WorkerProgress | None:
        """How much of this worker's training the parameters had at the start; None: nothing."""
        self.start()
        return self._earlier_progress

    def train(
        self,
        batches: Batches,
        *,
        thread_num: int | None = None,
        after_step: Callable[[], None] | None = None,
        is_told_to_end: Callable[[], bool] | None = None,
    ) -> None:
        """Trains on each batch once; `thread_num` overrides the job's. See `StepLoop.train`.

        With tables on a device, `after_step` is called when a pass has ended: only then the store has it.
        """
        if self._job.device.tables == "pass":
            self.flush()
            trainer = self._pass_trainer()
            try:
                trainer.train(batches, after_step, is_told_to_end)
            except BaseException as error:
                if trainer.is_partly_written:
                    self._partial_pass = f"{type(error).__name__}: {error}"
                raise
            return
        loop = self._step_loop(thread_num or self._job.train.thread_num)
        loop.train(batches, after_step, is_told_to_end)

    def steps(self, batches: Batches) -> Iterator[TrainedStep]:
        """Trains on each batch once, and yields after each; see `StepLoop.steps`.

        Raises UsageError if tables are on a device, where steps are of a pass.
        """
        if self._job.device.tables == "pass":
            raise UsageError('device.tables is "pass", which trains passes, not single steps')
        return self._step_loop(thread_num=1).steps(batches)

    def evaluate(
        self,
        batches: Iterable[Batch],
        *,
        on_predictions: OnPredictions | None = None,
        breakdown: Breakdown | None = None,
        reader: ParameterReader | None = None,
    ) -> Evaluation:
        """Predicts with the parameters of `reader`, None: of the store; see `evaluate`."""
        return evaluate(
            reader or self.reader(),
            self._model,
            batches,
            batch_size=self._job.train.batch_size,
            num_threads=self._job.train.thread_num,
            on_predictions=on_predictions,
            breakdown=breakdown,
        )

    def reader(self) -> ParameterReader:
        """Returns the parameters to predict with, once the store has all gradients of this worker."""
        self._declare()
        self.flush()
        return self.store

    def flush(self) -> None:
        """Returns when the store has all gradients of this worker.

        Raises AbortedError if it has a part of a pass that was to be written back from a device.
        """
        if self._partial_pass is not None:
            raise AbortedError(
                "the write back of a pass was interrupted, so parameters may include a part of that pass "
                "and cannot be saved, evaluated or trained: start the job again from its newest checkpoint, "
                f"with checkpoint.resume = true ({self._partial_pass})"
            )
        if self._communicator is not None:
            self._communicator.flush()

    def settle(self) -> None:
        """Returns when the servers have all steps that this worker took part in.

        In synchronous training all servers are at one version then, until it takes the next step. Modes that
        are not in lockstep do not wait for what is queued in this worker.
        """
        if self._communicator is not None:
            if self._communicator.is_lockstep:
                self.flush()
            self.store.wait_version(self._communicator.version).result()

    def barrier(self, name: str = "") -> None:
        """Waits at a barrier until every worker has come; the store then has the gradients of all.

        The name is the same for all workers; empty: numbered.
        """
        self.flush()
        name = self._barrier(name)
        if self._heter is not None:
            self._heter.attend(self.barriers_passed, name)
        self._rejoin(self.store.barrier(name, self.worker, step=self._version).result())

    def all_reduce(
        self, values: Numbers, op: ReduceOp, name: str = "", *, remember: bool = True
    ) -> Numbers:
        """Returns the sum, largest or smallest of all workers' `values` float64[N]; all of them must call.

        Workers that have left bring nothing: then a sum logs a warning. Without `remember`, see
        `Coordination.all_reduce`, `values` may be returned as they are where `is_repeating` is true before.
        """
        if op is not ReduceOp.SUM:
            return self._reduced(values, op, name, remember=remember)
        is_repeating = self.is_repeating
        *_, num_brought = reduced = self._reduced(
            np.append(values, 1.0), op, name, remember=remember
        )
        is_missing = num_brought < self.num_workers and not self._plan.role.members.is_elastic
        if is_missing and not is_repeating:
            logger.warning(
                "the sum of numbers lacks some workers: only %s contributed, %d of %d have left",
                counted(int(num_brought), "worker"),
                self.num_workers - num_brought,
                self.num_workers,
            )
        return reduced[:-1]

    def attend(self, name: str, *, size: int, op: ReduceOp | None) -> None:
        """Comes to a barrier of the workers, as a heter trainer; to an all-reduce with nothing to bring."""
        if op is None:
            self.barrier(name)
        else:
            # Whether the answer must be remembered is for those to say who need it.
            self._reduced(np.full(size, _NOTHING[op]), op, name, remember=False)

    @property
    def communicator(self) -> Communicator:
        """How gradients leave and parameters arrive; the first call waits for all workers."""
        self.start()
        assert self._communicator is not None
        return self._communicator

    @property
    def steps_since_barrier(self) -> int:
        """Synchronous steps since the last barrier, the lost process's before this one included.

        In other modes 0: what that one did is known only as of its last push.
        """
        is_sync = self._job.strategy.is_sync and self._job.device.tables == "host"
        return self._version - self._version_of_barrier if is_sync else 0

    def peers(self) -> Peers:
        """Returns this worker's way to the others, for what all do together besides training.

        Raises UsageError if the run has heter trainers, which take no part in an exchange.
        """
        if self._plan.role.heter_endpoints:
            raise UsageError(
                "rows cannot be shuffled globally in a job with heter trainers: shuffle them locally"
            )
        return Peers(self.store, self.worker, self.num_workers, self.all_reduce)

    def save(self, request: SaveRequest) -> str:
        """Saves what the store holds; no other worker takes part. See `Store.save`, and `flush`."""
        self._declare()
        self.flush()
        self.settle()
        return self.store.save(request)

    def shrink(
        self, max_norm: float | None = None, *, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        """Ends a pass in the tables, and logs it; worker 0 alone. See `Store.shrink`."""
        self._declare()
        self.flush()
        shrunk = self.store.shrink(max_norm=max_norm, dry_run=dry_run)
        if not dry_run:
            has_rules = max_norm is None and self._counting_tables
            names = sorted(self._counting_tables) if has_rules else shrunk
            log_shrunk({name: shrunk[name] for name in names})
        return shrunk

    def leave(self) -> None:
        """Leaves the run for good, when the store has all its gradients.

        Raises AbortedError if another worker has ended the job.
        """
        self.flush()
        self._membership.leave(self._version)
        self.close()

    def require_place(self) -> None:
        """Raises CtrPsError if it was noticed that the job has ended, or this process lost its place."""
        if (refusal := self._membership.refusal) is not None:
            raise refusal

    @property
    def is_needed(self) -> bool:
        """Whether the job ends when this worker is lost, and no other process can take its place."""
        rule = WorkerLoss(self._job.cluster.on_worker_loss)
        return rule is WorkerLoss.FAIL or (rule is WorkerLoss.CONTINUE and self.is_first)

    def end_by(self, termination: Termination) -> None:
        """From now on, SIGTERM aborts the job, or ends this worker after its batch if it is not needed.

        Of a job that saves then, worker 0 ends after its batch, and others wait for that.
        """
        saves, is_waited_for = self._job.saves_when_told, self._job.cluster.on_worker_loss == "wait"

        def wait_s() -> float:
            if not saves or self._communicator is None:
                return 0.0
            if self.is_needed:
                return SAVE_S
            is_of_steps = is_waited_for and self._job.strategy.is_sync and not self.is_first
            return STEP_S if is_of_steps else 0.0

        if self.is_needed:
            place, ends = (self.store, self.worker), saves and self.is_first
            termination.abort_at(lambda: place, wait_s=wait_s, ends_after_batch=ends)
        else:
            termination.end_after_batch(self._membership.give_up, wait_s=wait_s)

    def end_early(self) -> None:
        """Ends the part of a worker before its end, when the store has all its gradients.

        Where the others wait for lost workers its place is free then, else it has left, or the job has ended.
        """
        if self.is_needed:
            self._membership.has_left = True
            abort(self.store, self.worker)
            return
        if WorkerLoss(self._job.cluster.on_worker_loss) is WorkerLoss.CONTINUE:
            self.leave()
            return
        self.flush()
        self._membership.has_left = True
        if self._communicator is not None:
            self._communicator.close()
        self._membership.give_up()

    def close(self) -> None:
        """Ends the background work; what was not sent is lost."""
        self._membership.close()
        if self._communicator is not None:
            self._communicator.close()
        if self._heter is not None:
            self._heter.close()

    @property
    def _version(self) -> Version:
        return 0 if self._communicator is None else self._communicator.version

    def _rejoin(self, version: Version) -> None:
        self.barriers_passed += 1
        self._version_of_barrier = version
        if self._communicator is not None:
            # A process in a lost one's place is answered at old barriers as that one was, and is further on.
            self._communicator.rejoin(max(version, self._version))

    def _reduced(self, values: Numbers, op: ReduceOp, name: str, *, remember: bool) -> Numbers:
        self.flush()
        name = self._barrier(name)
        if self._heter is not None:
            self._heter.attend(self.barriers_passed, name, size=values.size, op=op)
        reduced = self.store.all_reduce(
            name, self.worker, values, op, step=self._version, remember=remember
        ).result()
        self._rejoin(reduced.version)
        return reduced.values.copy()  # writable

    def _barrier(self, name: str) -> str:
        if name:
            return name
        self._num_barriers += 1
        return f"barrier-{self._num_barriers}"

    def _pass_trainer(self) -> PassTrainer:
        if self._plan.new_pass_trainer is None:
            raise UsageError('device.tables is "pass", but this run cannot train passes')
        parts = PassParts(
            model=self._plan.trained,
            specs=self._plan.specs,
            store=self.store,
            push_ids=self.communicator.push_ids,
            progress=self.progress,
            non_finite=self.non_finite,
        )
        return self._plan.new_pass_trainer(parts)

    def _step_loop(self, thread_num: int) -> StepLoop:
        return StepLoop(
            self._plan.trained,
            self.communicator,
            batch_size=self._job.train.batch_size,
            thread_num=thread_num,
            progress=self.progress,
            counting_tables=self._counting_tables,
            non_finite=self.non_finite,
            clip_norm=self._job.train.clip_norm,
        )


def log_shrunk(tables: Mapping[str, Shrunk]) -> None:
    """Logs what a shrink removed from each table and left; a warning if it removed more than half of it."""
    for name, shrunk in tables.items():
        level = logging.WARNING if shrunk.rows > shrunk.left_rows else logging.INFO
        candidates = f" removed_candidates={shrunk.candidates}" if shrunk.candidates else ""
        logger.log(
            level,
            "shrunk table=%s removed_rows=%d left_rows=%d removed_mb=%.1f%s",
            name,
            shrunk.rows,
            shrunk.left_rows,
            shrunk.size_bytes / 2**20,
            candidates,
        )
