"""`ps-worker train --dry-run`: one step of a job on its first rows, in this process; no file is changed."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.resume import earlier_run, require_free_folder
from ctr_ps.ps_worker.checkpoints.warm_start import require_schema
from ctr_ps.ps_worker.cluster.open_store import LOCAL
from ctr_ps.ps_worker.data.formats import format_of
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.job.checks import require_one_worker
from ctr_ps.ps_worker.job.datasets import digest_of_files, evaluated, streamed
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, errors_of_model
from ctr_ps.ps_worker.job.streams import TrainingStream
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import RunFolder


def dry_run(plan: Plan) -> dict[str, Any]:
    """Trains on the first batch of data.train or a stream, and predicts first rows of each list of files.

    Returns what it found, for people. A checkpoint to start from is loaded, however large. Raises what a run
    would, as far as one process can tell.
    """
    job, schema = plan.job, plan.schema
    require_one_worker(job, plan.role.num_workers, len(plan.role.heter_endpoints))
    require_free_folder(job)
    if job.run.dir:
        RunFolder(job, is_continued=job.checkpoint.resume)
    alone = replace(plan, role=LOCAL, terms=LOCAL.members.terms)
    lists = {"train": plan.train_files, "valid": plan.valid_files, "test": plan.test_files}
    format_of_all = job.data.format or (job.data.pipe_command and "piped")
    read = {}
    with errors_of_model(job), Run(ParameterStore(), alone) as run:
        data = streamed(job, schema, is_for_training=True)
        if plan.train_files:
            batch, head = _first(data, plan.train_files), data.head
        else:
            stream = TrainingStream(job, schema, worker=0, num_workers=1)
            batch, head = _first_of_stream(stream), stream.head
        _load(plan, run, head)
        run.start(head())
        run.train([batch], thread_num=1)
        for name, paths in lists.items():
            formats = [format_of_all or format_of(path) for path in paths]
            for format in dict.fromkeys(formats):
                path = paths[formats.index(format)]
                found = {"files": formats.count(format), "first": path}
                read[f"{name} {format}"] = found | _predicted(plan, run, name, path)
        loss, tables = run.progress.mean_loss, run.store.status().tables
    return {
        "dry_run": "one step in this process; nothing was saved",
        "columns": f"{len(schema.slots)} slots, {len(schema.dense)} numbers",
        "rows_of_batch": batch.size,
        "dense_parameters": plan.model.num_params,
        "loss": loss,
        "data": read,
        "rows_of_tables": {name: each.rows for name, each in tables.items()},
        "optimizers": {name: spec.name for name, spec in plan.specs.optimizers.items()},
    }


def _first_of_stream(stream: TrainingStream) -> Batch:
    with closing(stream.head()) as batches:
        if (batch := next(batches, None)) is None:
            raise DataError(f"{stream.name} has no rows now")
        return batch


def _load(plan: Plan, run: Run, head: Callable[[], Iterable[Batch]]) -> None:
    """Loads what the run would start from."""
    job, files = plan.job, digest_of_files(plan.train_files)
    signature, workers = plan.signatures["data.train"], plan.role.num_workers
    earlier = earlier_run(job, num_workers=workers, files=files, signature=signature)
    url, only = (earlier.url, ()) if earlier else (job.checkpoint.load, job.checkpoint.only)
    if url:
        takes = {"takes_dense": not only or DENSE_BLOCK in only, "resumes": earlier is not None}
        require_schema(job, plan.model, plan.schema, url, **takes)
        run.load(url, only=only, head=head())


def _predicted(plan: Plan, run: Run, name: str, path: str) -> dict[str, Any]:
    """Predicts the first rows of a file of data.`name`, and returns what was read."""
    # Rows to train on need no column to group by.
    new = streamed if name == "train" else partial(evaluated, files=[path])
    dataset = new(plan.job, plan.schema)
    batch = _first(dataset, [path])
    clicks = run.evaluate([batch]).clicks
    return {"rows_read": batch.size, "malformed": dataset.bad_rows, "clicks": clicks}


def _first(dataset: QueueDataset, files: Sequence[str]) -> Batch:
    dataset.set_filelist(files)
    with closing(iter(dataset)) as batches:
        return next(batches)  # a DataError if there is none
