"""`ps-worker report`: from the folders of runs to one page.

run.dir                         --> records      --> sections --> report.html
its checkpoint, and data.test   --> importance   -->
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctr_ps.protos.errors import CheckpointError, CtrPsError, UsageError
from ctr_ps.ps_server.checkpoint.publish import best_in
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_worker.checkpoints.attachments import job_of_checkpoint
from ctr_ps.ps_worker.data.files.content import write_text
from ctr_ps.ps_worker.extras.report import sections
from ctr_ps.ps_worker.extras.report.importance import Importance, importance_of_checkpoint
from ctr_ps.ps_worker.extras.report.page import Section, page
from ctr_ps.ps_worker.extras.report.runs import RunRecords, number, read_runs
from ctr_ps.ps_worker.job import Job

_NAMED = 3  # most runs whose names are the title

logger = logging.getLogger(__name__)


def report(
    folders: Sequence[Path], output: Path, *, importance_rows: int, allow_code: bool = False
) -> dict[str, Any]:
    """Writes a page about runs, and returns its path, their number, and that of those with importance.

    Importance is measured over `importance_rows` of data.test, or data.valid; 0: it is not. `allow_code` runs
    the model's file and the command for data that a checkpoint names. Raises CtrPsError if a folder is not
    that of a run, or the page cannot be written.
    """
    if not output.parent.is_dir() or output.is_dir():
        raise UsageError(
            f"--output: cannot write {str(output)!r}: give the path of a file in an existing folder"
        )
    runs = read_runs(folders)
    importance = [_importance(run, importance_rows, allow_code) for run in runs]
    parts: dict[str, Callable[[], Section]] = {
        "Runs": lambda: sections.overview(runs),
        "Training": lambda: sections.training(runs),
        "Validation": lambda: sections.validation(runs),
        "Progressive validation": lambda: sections.passes(runs),
        "Calibration": lambda: sections.calibrated(runs),
        "AUC by slot value": lambda: sections.by_slot_value(runs),
        "Feature importance": lambda: sections.importance(runs, importance),
        "Table growth": lambda: sections.tables(runs),
        "Staleness": lambda: sections.staleness(runs),
        "Time by part of a step": lambda: sections.time_by_part(runs),
    }
    html = page(
        " · ".join(run.name for run in runs) if len(runs) <= _NAMED else f"{len(runs)} runs",
        {title: _made(title, make) for title, make in parts.items()},
    )
    write_text(output, html)
    return {
        "report": str(output),
        "runs": len(runs),
        "runs_with_importance": sum(isinstance(each, Importance) for each in importance),
    }


def _made(title: str, make: Callable[[], Section]) -> Section:
    """Returns a section, or what failed in its place: records of a run may be of any process that wrote."""
    try:
        return make()
    except Exception as error:
        logger.exception("the part %r of the report failed", title)
        fault = f"This part failed: {type(error).__name__}: {error}"
        return Section(lead="", missing=[fault])


def _importance(run: RunRecords, rows: int, allow_code: bool) -> Importance | str:
    if not rows:
        return "not measured: give --importance-rows above 0."
    job = run.job
    if job is None:
        return "no readable job.json, which has the model and the data."
    if not job.checkpoint.dir:
        return "no saved model: train with checkpoint.dir."
    if not job.data.test and not job.data.valid:
        return "no rows to predict: train with data.test or data.valid."
    try:
        return _measured(run, job, rows, allow_code)
    except Exception as error:  # of a model's own code, too
        is_ours = isinstance(error, CtrPsError)
        logger.warning("%s: no feature importance: %s", run.name, error, exc_info=not is_ours)
        return f"not measured: {error if is_ours else f'{type(error).__name__}: {error}'}"


def _measured(run: RunRecords, of_run: Job, rows: int, allow_code: bool) -> Importance:
    """Predicts with the best model of a run, or the last one if none was validated."""
    root = of_run.checkpoint.dir
    best = best_in(root)
    checkpoint = Checkpoint.open(root if best is None else folder_at(root).child(best).url)
    job = job_of_checkpoint(checkpoint)
    other = f"the model in {root} belongs to another run"
    if Path(job.run.dir).resolve() != Path(of_run.run.dir).resolve():
        raise CheckpointError(
            f"{other}, with run.dir = {job.run.dir!r}: give each run a checkpoint.dir of its own"
        )
    begun = next((number(each.get("time")) for each in run.of_kind("start")), None)
    if begun is not None and checkpoint.manifest.created < begun:
        raise CheckpointError(f"{other}: it is older than this run, which has not saved yet")
    text = "importance of %s: %s, rows=%d; --importance-rows 0 leaves it out"
    logger.info(text, run.name, checkpoint.url, rows)
    return importance_of_checkpoint(checkpoint, rows=rows, allow_code=allow_code)
