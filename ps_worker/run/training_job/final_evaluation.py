"""The evaluation that a training job ends with, on `data.test`."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.saved_model import SavedModel
from ps_worker.job import Job
from ps_worker.job.datasets import evaluated
from ps_worker.run.plan import Plan
from ps_worker.run.run import Run
from ps_worker.run.training_job.pass_figures import PassFigures
from ps_worker.training.evaluation.advice import warning_of_test
from ps_worker.training.evaluation.breakdown import breakdown_of
from ps_worker.training.evaluation.evaluator import evaluate, figures
from ps_worker.training.evaluation.saved_store import SavedStore

logger = logging.getLogger(__name__)


def final_evaluation(plan: Plan, run: Run, best: Checkpoint | None) -> dict[str, Any]:
    """Returns the figures of `data.test`, with the best model or, if None, that of the last step."""
    if not plan.test_files:
        return {}
    dataset = evaluated(plan.job, plan.schema, plan.test_files, plan.stamps)
    breakdown = breakdown_of(plan.job, plan.schema, plan.test_files)()
    if best is None:
        metrics = run.evaluate(dataset, breakdown=breakdown)
    else:
        metrics = evaluate(
            SavedStore(SavedModel(best, maps=True, verifies=True)),
            plan.model,
            dataset,
            batch_size=plan.job.train.batch_size,
            num_threads=plan.job.train.thread_num,
            breakdown=breakdown,
        )
    if not metrics.examples:
        logger.warning("nothing was evaluated: the files of data.test have no rows with a label")
    return figures(metrics, breakdown)


def warn_of(
    evaluation: Mapping[str, Any], job: Job, passes: Sequence[PassFigures], *, is_in_process: bool
) -> None:
    """Says so if the model knows less of `data.test` than its click rate; `passes` are those of training."""
    last = passes[-1] if passes else None
    warning = warning_of_test(
        job,
        log_loss=evaluation["log_loss"],
        base_log_loss=evaluation["base_log_loss"],
        is_learnt=last is not None and last.log_loss < last.base_log_loss,
        is_in_process=is_in_process,
    )
    if warning:
        logger.warning("%s", warning)
