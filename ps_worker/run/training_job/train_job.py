"""One worker's part of a training job, from its plan to its summary.

    start -> | pass over the data -> barrier -> shrink, validate, save | x passes -> evaluate -> leave

Worker 0 loads, shrinks, validates, saves and evaluates; the others wait for it at barriers. A resumed run
starts in the middle of this: in the epoch, and at the position in its data, that the checkpoint says.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import PurePosixPath

from ctr_ps.ctr_model.models.model import Compute
from ctr_ps.protos.errors import counted
from ctr_ps.protos.store import Store
from ctr_ps.ps_server.checkpoint.files.manifest import PUBLISHED
from ctr_ps.ps_server.checkpoint.publish import write_best
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.coordination.push_ledger import MAX_PARTITIONS
from ctr_ps.ps_worker.checkpoints.claim import claimed
from ctr_ps.ps_worker.checkpoints.warm_start import WarmStart
from ctr_ps.ps_worker.data.files.file_split import FileSplit, shown, splits_of_workers
from ctr_ps.ps_worker.data.formats import splitter
from ctr_ps.ps_worker.job.datasets import TrainingData, evaluated, format_of_job
from ctr_ps.ps_worker.job.model import errors_of_model
from ctr_ps.ps_worker.job.streams import TrainingStream
from ctr_ps.ps_worker.run.plan import DenseTrainers, Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import MetricsWriter, RunFolder
from ctr_ps.ps_worker.run.training_job.checkpoints import JobCheckpoints, clear_folder, start_of
from ctr_ps.ps_worker.run.training_job.publishing import Gate
from ctr_ps.ps_worker.run.training_job.training import Training
from ctr_ps.ps_worker.run.training_job.validation import Validator
from ctr_ps.ps_worker.training.evaluation.base_rate import warning_of_test
from ctr_ps.ps_worker.training.evaluation.breakdown import breakdown_of
from ctr_ps.ps_worker.training.evaluation.evaluator import Figures, SavedStore, figures, json_value

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a run; those of the evaluation on worker 0 only, None elsewhere."""

    # On the test data; of a model of several labels for its first task.
    auc: float | None = None  # area under the ROC curve
    log_loss: float | None = None  # mean
    base_log_loss: float | None = None  # of predicting the click rate of the test data for each row
    accuracy: float | None = None  # at threshold 0.5
    calibration: float | None = None  # predicted clicks over actual clicks
    test_examples: int | None = None  # rows evaluated
    unknown_values: Mapping[str, float] | None = None  # share of each slot without weights
    tasks: Mapping[str, Mapping[str, object]] | None = None  # these figures, by name of a task
    # mean distance of predicted and actual click rate over `calibration_buckets`
    calibration_error: float | None = None
    # predicted and actual click rates by ascending prediction
    calibration_buckets: Sequence[Mapping[str, object]] | None = None
    gauc: float | None = None  # AUC within groups of `valid.group_by`, weighted by their examples
    groups: Mapping[str, object] | None = None  # numbers of groups and examples in it, and left out
    # by slot of `valid.slices`: figures of its most frequent values
    slices: Mapping[str, object] | None = None

    examples: int = 0  # trained on, over all workers
    examples_per_s: float = 0.0  # of all workers, without loading, saving and evaluating
    compute: Compute = "float32"  # precision of matrix products in training, not in the evaluation
    train_loss: float | None = None  # mean of this worker, each example predicted before trained on
    bad_rows: int = 0  # malformed rows that this worker skipped in an epoch
    skipped_batches: int = 0  # of this worker, as their loss or gradients were not finite
    # the same by table or dense block whose gradient that was, and "loss"
    skipped_by_name: Mapping[str, int] = field(default_factory=dict)
    # steps of other workers between the pull and the push of a batch, over all workers
    staleness: Mapping[str, object] | None = None
    duplicates: int | None = None  # pushes that came again, their answers lost; they count once
    # without whom the others went on: what was left of their data was not trained on
    lost_workers: Sequence[int] | None = None
    tables: Mapping[str, Mapping[str, int]] | None = None  # rows, bytes, rows expired or evicted
    model_digest: str | None = None  # SHA-256 of the trained model
    checkpoint: str | None = None  # folder of the last checkpoint
    passes: Sequence[Mapping[str, object]] = ()  # as `PassFigures`
    validations: Sequence[Mapping[str, object]] = ()  # with the checkpoint of each best one so far
    best: Mapping[str, object] | None = None  # the best of them, with the url of its checkpoint
    stopped_early: bool = False  # since validations got no better
    # the checkpoint that the run started from, the tables taken and those with initial values
    warm_start: Mapping[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """Returns the fields; NaN becomes None, as JSON has no NaN."""
        return {name: json_value(value) for name, value in asdict(self).items()}


def train_job(
    plan: Plan,  # what to do, and in which role
    store: Store,  # the parameters
    *,
    heter: DenseTrainers | None = None,  # see `Run`
    # called once this process has its place among the workers
    on_joined: Callable[[Run], None] = lambda _: None,
    # whether this worker is to end after the step that it is in, and the job goes on
    is_told_to_end: Callable[[], bool] = lambda: False,
) -> Summary:
    """Trains, saves and evaluates; returns the figures.

    Raises:
        SystemExit: With the exit code of SIGTERM, if it was told to end.
        CtrPsError: If anything goes wrong; says what.
    """
    job = plan.job
    # All that can fail comes after joining: the others are told, and no other process has this one's place.
    with errors_of_model(job), Run(store, plan, heter=heter) as run:
        on_joined(run)
        # All workers compute the shares of all alike.
        split_file = splitter(plan.schema, format_of_job(job))
        parts = splits_of_workers(split_file, plan.train_files, run.num_workers, plan.stamps)
        is_dealt = job.data.deal == "queue"
        own = _in_order(parts, plan) if is_dealt else parts[run.worker]
        data = TrainingData(job, plan.schema, own)
        stream = None
        if job.data.stream:
            stream = TrainingStream(job, plan.schema, run.worker, run.num_workers)
        head = data.head if stream is None or plan.train_files else stream.head
        is_shared = data.is_shuffled_globally or stream is not None or is_dealt
        without_rows = [] if is_shared else [k for k, own in enumerate(parts) if not own]
        if is_dealt:
            logger.info("worker %d takes from a queue of %s", run.worker, counted(len(own), "file"))
        elif stream is None or plan.train_files:
            _log_parts(parts, run.worker, without_rows)
        folder = None
        if run.is_first and job.run.dir:
            folder = RunFolder(job, is_continued=job.checkpoint.resume or run.is_replacement)
        with ExitStack() as stack:
            claim = None
            if run.is_first:
                is_own, servers = run.is_replacement, plan.role.endpoints
                claim = stack.enter_context(claimed(job, is_of_this_run=is_own, servers=servers))
            start = start_of(plan, run, head, claim)
            if folder is not None:
                stack.enter_context(folder)
            run.start(head(), num_training=run.num_workers - len(without_rows))
            clear_folder(job, run, start)
            metrics = MetricsWriter(folder, run)
            validator = Validator(plan, run, metrics)
            checkpoints = JobCheckpoints(plan, run, validator, start)
            gate = Gate(plan.job, run, metrics)
            training = Training(
                plan, run, data, stream, metrics, validator, checkpoints, gate, is_told_to_end
            )
            training.train(start.earlier)
            summary = summarize(training, start.warm_start)
        run.leave()
    return summary


def _in_order(parts: Sequence[Sequence[FileSplit]], plan: Plan) -> list[FileSplit]:
    """Returns the parts of all workers in the order of the files."""
    places = {path: number for number, path in enumerate(plan.train_files)}
    found = sorted(chain(*parts), key=lambda each: (places[each.path], each.start))
    if len(found) > MAX_PARTITIONS:
        raise plan.job.error(
            "data.deal",
            f"the queue would have {len(found)} files or parts of files, expected up to {MAX_PARTITIONS}: "
            "write larger files",
        )
    return found


def _log_parts(
    parts: Sequence[Sequence[FileSplit]], worker: int, without_rows: Sequence[int]
) -> None:
    """Logs what a worker reads; worker 0, and those without rows, warn of all that have none."""
    own = parts[worker]
    named = f"{counted(len(own), 'file')}: {', '.join(map(shown, own))}" if own else "no files"
    logger.info("worker %d trains on %s", worker, named)
    if without_rows and (worker == 0 or worker in without_rows):
        logger.warning(
            "%d of %d workers have no rows to train on: workers %s. data.train has only %s: a row group of "
            "Parquet, a stripe of ORC, or a file that cannot be split, such as compressed text, goes to one "
            "worker. Start fewer workers, or write more files or smaller row groups",
            len(without_rows),
            len(parts),
            ", ".join(map(str, without_rows)),
            counted(sum(map(len, parts)), "part"),
        )


def summarize(training: Training, warm_start: WarmStart | None) -> Summary:
    """Evaluates a run that was trained; the figures of all workers are on worker 0 alone.

    `warm_start` is what the run took from another one's checkpoint.
    """
    job, run, validator = training.plan.job, training.run, training.validator
    own = Summary(
        compute=job.train.compute,
        train_loss=run.progress.mean_loss,
        bad_rows=training.data.bad_rows + (training.stream.bad_rows if training.stream else 0),
        skipped_batches=run.non_finite.skipped,
        skipped_by_name=run.non_finite.by_name,
        passes=[asdict(each) for each in training.passes],
        stopped_early=training.stopped_early,
    )
    if not run.is_first:
        return replace(own, examples=run.progress.examples)
    status = run.store.status()
    # Without heter trainers, which have no data.
    lost = sorted(worker for worker in status.lost if worker < run.num_workers)
    if lost and job.data.deal == "fixed":
        logger.warning("workers %s were lost: the rest of their data was not trained on", lost)
    best = training.checkpoints.best()
    final = Checkpoint.open(best) if best and job.valid.final_model == "best" else None
    if final is not None:
        write_best(job.checkpoint.dir, PurePosixPath(final.url).name, PUBLISHED)
    seconds = sum(each.train_seconds for each in training.passes)
    passed = sum(each.examples for each in training.passes)
    if (evaluation := _evaluation(training, final)) is not None:
        own = replace(own, **evaluation)
    summary = replace(
        own,
        examples=sum(status.examples.values()),
        examples_per_s=passed / seconds if seconds else 0.0,
        staleness=status.staleness.as_dict(),
        duplicates=status.duplicates,
        lost_workers=lost,
        tables={name: asdict(table) for name, table in status.tables.items()},
        model_digest=run.store.digest() if final is None else final.digest_of_files(),
        checkpoint=training.checkpoints.latest,
        warm_start=None if warm_start is None else asdict(warm_start),
        validations=[asdict(each) for each in validator.validations],
        best=None if validator.best is None else {**asdict(validator.best), "checkpoint": best},
    )
    ends = ("examples", "examples_per_s", "model_digest", "checkpoint", "best", "stopped_early")
    training.metrics.write("end", {name: getattr(summary, name) for name in ends})
    return summary


def _evaluation(training: Training, final: Checkpoint | None) -> Figures | None:
    """Returns the figures of `data.test`, if any, of the `final` model or, if None, of the last step's.

    Says so if the model knows less of `data.test` than its click rate.
    """
    plan, run = training.plan, training.run
    if not plan.test_files:
        return None
    dataset = evaluated(plan.job, plan.schema, plan.test_files, plan.stamps)
    breakdown = breakdown_of(plan.job, plan.schema, plan.test_files)()
    saved = None if final is None else SavedStore(SavedModel(final, maps=True, verifies=True))
    metrics = run.evaluate(dataset, breakdown=breakdown, reader=saved)
    metrics.warn_of_unknown()
    if not metrics.examples:
        logger.warning("nothing was evaluated: files of data.test have no rows with a label")
    evaluation = figures(metrics, breakdown)
    training.metrics.write("test", evaluation)
    last = training.passes[-1] if training.passes else None
    warning = warning_of_test(
        plan.job,
        log_loss=evaluation["log_loss"],
        base_log_loss=evaluation["base_log_loss"],
        is_learnt=last is not None and last.log_loss < last.base_log_loss,
        is_in_process=run.is_in_process,
    )
    if warning:
        logger.warning("%s", warning)
    return evaluation
