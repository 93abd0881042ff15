"""`ps-worker compare`: models trained one after another in this process, and evaluated on the same rows.

Standard errors are of the Poisson bootstrap (Hanley and MacGibbon, "Creating non-parametric bootstrap samples
using Poisson frequencies", 2006): replicate r has example i c_ri ~ Poisson(1) times, the same for all models,

    log loss_r = sum_i c_ri w_i loss_i / sum_i c_ri w_i,    AUC_r with the weights c_ri w_i,

and the error is the standard deviation over replicates, of a difference to the best model that of the paired
differences. It says what other rows of the evaluation would change, not what other seeds would.
"""

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import auc_of_histograms
from ctr_ps.ctr_model.registry import class_named
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.protos.store import ParameterReader
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.device_pass import new_pass_trainer
from ctr_ps.ps_worker.job import Job, load_job
from ctr_ps.ps_worker.job.datasets import evaluated
from ctr_ps.ps_worker.job.model import errors_of_model
from ctr_ps.ps_worker.job.sections import CheckpointSection, ModelSection, RunSection
from ctr_ps.ps_worker.run.plan import Plan, plan_of
from ctr_ps.ps_worker.run.precompile import precompile
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from ctr_ps.ps_worker.training.evaluation.evaluator import SavedStore, evaluate

REPLICATES = 200  # an error is known to 5 %: 1 / sqrt(2 * 200)

logger = logging.getLogger(__name__)


def compare(
    jobs: Sequence[Path], models: Sequence[str] = (), overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Trains each job, with each of `models` if given; returns a row of figures for each, and the base rate.

    Evaluated is data.test, else data.valid, with the last model or the best, as `valid.final_model` says.
    Nothing is kept: `checkpoint.dir` and `run.dir` do not count. Another model than the job's own has those
    of the job's options that it knows. Raises CtrPsError if a job is wrong, before anything is trained, or
    jobs are evaluated on different rows.
    """
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # saves may go on after an error
        plans: dict[str, Plan] = {}
        for path in jobs:
            job = load_job(path, overrides)
            for model in models or [job.model.name]:
                name = f"{path} {model}" if len(jobs) > 1 else model
                own = _with_model(job, model, f"{folder}/{len(plans)}")
                plans[name] = plan_of(own, new_pass_trainer=new_pass_trainer)
        figures, predicted = [], list[NDArray[np.float32]]()
        for number, (name, plan) in enumerate(plans.items(), 1):
            logger.info("comparing: %s, %d of %d", name, number, len(plans))
            trained, rows = _trained(plan)
            if predicted and not np.array_equal(rows[:2], predicted[0][:2]):
                raise UsageError(f"{name} was evaluated on other rows than {next(iter(plans))}")
            figures.append(trained)
            predicted.append(rows)
    labels, weights = predicted[0][:2]
    if not weights.any():
        raise DataError("no rows with a label to compare on")
    rate = np.average(labels, weights=weights)
    models_of_rows = [*(rows[2] for rows in predicted), np.full_like(labels, rate)]
    found = replicates(labels, weights, models_of_rows)
    best = int(found[0, :-1, 0].argmin())
    found = np.concatenate([found, found - found[:, best : best + 1]], axis=2)  # [1 + R, M + 1, 4]
    errors = found[1:].std(axis=0, ddof=1)
    lines = []
    for m, (name, shown) in enumerate(zip([*plans, "base rate"], [*figures, {}], strict=True)):
        lines.append({"model": name, **shown})
        for k, column in enumerate(("log_loss", "auc", "log_loss_to_best", "auc_to_best")):
            lines[-1] |= {column: found[0, m, k].item(), f"{column}_error": errors[m, k].item()}
    return {"rows": labels.size, "click_rate": rate.item(), "models": lines}


def replicates(
    labels: NDArray[np.float32], weights: NDArray[np.float32], models: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Returns log loss and AUC of each model, float64[1 + R, M, 2]: of all N examples, then of R samples."""
    orders = [np.argsort(each) for each in models]
    pairs = zip(models, orders, strict=True)
    # Where runs of equal predictions start.
    runs = [np.flatnonzero(np.diff(each[order], prepend=np.float32(-1))) for each, order in pairs]
    right = [np.where(labels > 0, each, 1 - each.astype(np.float64)) for each in models]
    losses = -np.log(np.clip(right, 1e-7, 1 - 1e-7))  # [M, N]
    classes = (labels, 1 - labels)
    random, found = np.random.default_rng(1), np.empty((1 + REPLICATES, len(models), 2))
    for r in range(1 + REPLICATES):
        counts = weights * (random.poisson(1.0, labels.size) if r else 1.0)
        for m, (order, starts) in enumerate(zip(orders, runs, strict=True)):
            of_classes = (np.add.reduceat((counts * each)[order], starts) for each in classes)
            found[r, m] = losses[m] @ counts / counts.sum(), auc_of_histograms(*of_classes)
    return found


def _with_model(job: Job, name: str, folder: str) -> Job:
    """Returns a job with another model, that saves what `valid.final_model` needs, and nothing else."""
    if not job.data.test and not job.data.valid:
        raise job.error("data.test", "data.test is empty: compare needs rows to evaluate on")
    options = job.model.options
    if name != job.model.name:
        with suppress(ValueError):  # a class in a file; of an unknown model the plan says it
            known = inspect.signature(class_named(name)).parameters
            options = {key: value for key, value in options.items() if key in known}
    saved_in = folder if job.valid.final_model == "best" else ""
    start = job.checkpoint.model_dump(include={"load", "only"})
    sections = {
        "model": ModelSection(name=name, **options),
        "checkpoint": CheckpointSection(dir=saved_in, **start),
        "run": RunSection(),
    }
    return job.model_copy(update=sections)


def _trained(plan: Plan) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """Trains a plan; returns figures, and labels, weights and predictions of N rows, float32[3, N]."""
    job, files = plan.job, plan.test_files or plan.valid_files
    precompile(plan)
    store = ParameterStore(wait_limit_s=job.cluster.wait_timeout_s)
    summary = train_job(replace(plan, test_files=[]), store)  # evaluated here
    reader: ParameterReader = store
    if summary.best is not None and job.valid.final_model == "best":
        best = Checkpoint.open(str(summary.best["checkpoint"]))
        reader = SavedStore(SavedModel(best, maps=True))
    rows = [np.empty((3, 0), np.float32)]

    def labelled() -> Iterator[Batch]:
        for batch in evaluated(job, plan.schema, files, plan.stamps):
            if batch.labels is not None:
                ones = np.ones_like(batch.labels)
                weights = ones if batch.weights is None else batch.weights
                rows.append(np.stack([batch.labels, weights, ones]))
                yield batch

    def keep(predictions: NDArray[np.float32]) -> None:
        rows[-1][2] = predictions if predictions.ndim == 1 else predictions[:, 0]  # of clicks

    size = job.train.batch_size
    with errors_of_model(job):
        evaluate(reader, plan.model, labelled(), batch_size=size, on_predictions=keep)
    rows_of = summary.tables or {}
    numbers = sum(rows_of[spec.name]["rows"] * spec.dim for spec in plan.specs.tables)
    figures = {"parameters": plan.model.num_params + numbers}
    return figures | {"examples_per_s": summary.examples_per_s}, np.concatenate(rows, axis=1)
