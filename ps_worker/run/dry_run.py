"""`ps-worker train --dry-run`: one step of a job on its first rows, in this process; no file is changed.

It meets the errors that a run would meet on a single process, those about servers and other workers apart.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import DataError
from ctr_ps.protos.spec import DenseSpec, OptimizerSpec, TableSpec
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.spec_compat import require_loadable
from ctr_ps.ps_worker.checkpoints.resume import earlier_run, require_free_folder
from ctr_ps.ps_worker.checkpoints.warm_start import require_schema, warm_start_of
from ctr_ps.ps_worker.cluster.open_store import LOCAL
from ctr_ps.ps_worker.data.formats import format_of
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.job.checks import require_one_worker
from ctr_ps.ps_worker.job.datasets import digest_of_files, evaluated, streamed
from ctr_ps.ps_worker.job.model import DENSE_BLOCK, errors_of_model, names_of
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import RunFolder
from ctr_ps.ps_worker.training.evaluation.breakdown import breakdown_of
from ctr_ps.ps_worker.training.evaluation.evaluator import json_value


def dry_run(plan: Plan) -> dict[str, Any]:
    """Trains on the first batch of data.train, and predicts first rows of each list and format of files.

    Returns what it found, for people. A checkpoint to start from is loaded if the plan is that of a process
    alone, and else compared with the model, as servers have more memory. Raises what a run would, as far as
    one process can tell.
    """
    job, schema, start = plan.job, plan.schema, time.monotonic()
    require_one_worker(job, plan.role.num_workers, len(plan.role.heter_endpoints))
    require_free_folder(job)
    if job.run.dir:
        RunFolder(job, is_continued=job.checkpoint.resume)
    alone = replace(plan, role=LOCAL, terms=LOCAL.members.terms)
    with errors_of_model(job), Run(ParameterStore(), alone) as run:
        data = streamed(job, schema, is_for_training=True)
        batch = _first(data, plan.train_files)
        _load(plan, run, data)
        run.start(data.head())
        run.train([batch], thread_num=1)
        files = [
            {"list": f"data.{name}", "files": len(paths), **_predicted(plan, run, name, path)}
            for name, all_of_list in (
                ("train", plan.train_files),
                ("test", plan.test_files),
                ("valid", plan.valid_files),
            )
            for path, paths in _by_format(all_of_list, job.data.format)
        ]
        loss, tables = run.progress.mean_loss, run.store.status().tables
    optimizers = plan.specs.optimizers
    return {
        "dry_run": "one step in this process; nothing was saved",
        "model": job.model.name,
        "columns": f"{len(schema.slots)} slots, {len(schema.dense)} numbers",
        "rows_of_batch": batch.size,
        "loss": json_value(loss),
        "mode": job.strategy.mode,
        "seconds": time.monotonic() - start,
        "files": files,
        "parameters": [
            *(
                {
                    "name": table.name,
                    "numbers": f"{table.dim} a row",
                    "rows": tables[table.name].rows,
                    "optimizer": _shown(optimizers[table.name]),
                }
                for table in plan.model.tables
            ),
            {
                "name": DENSE_BLOCK,
                "numbers": f"{plan.model.num_params:,}",
                "optimizer": _shown(optimizers[DENSE_BLOCK]),
            },
        ],
    }


def _load(plan: Plan, run: Run, data: QueueDataset) -> None:
    """Loads what the run would start from, or only compares it if the job has servers for that."""
    job, model = plan.job, plan.model
    earlier = earlier_run(
        job,
        num_workers=plan.role.num_workers,
        files=digest_of_files(plan.train_files),
        signature=plan.signatures["data.train"],
    )
    warm = None if earlier else warm_start_of(job, model)
    only: Sequence[str] = ()
    if earlier is not None:
        url, takes_dense = earlier.url, True
    elif warm is not None:
        url, only, takes_dense = warm.checkpoint, job.checkpoint.only, DENSE_BLOCK in warm.taken
    else:
        return
    resumes = earlier is not None
    require_schema(job, model, plan.schema, url, takes_dense=takes_dense, resumes=resumes)
    if plan.role.is_in_process:
        run.load(url, only=only, head=data.head())
    else:
        checkpoint = Checkpoint.open(url)
        checkpoint.require_trainable()
        checkpoint.require(names_of(model), only)
        saved: dict[str, TableSpec | DenseSpec] = {**checkpoint.tables, **checkpoint.blocks}
        specs: list[TableSpec | DenseSpec] = [*plan.specs.tables, plan.specs.dense]
        for spec in specs:
            if spec.name in (only or names_of(model)):
                require_loadable(saved[spec.name], spec, url)


def _by_format(files: Sequence[str], format: str) -> list[tuple[str, list[str]]]:
    """Returns the files of each format, with the first of them."""
    found: dict[str, list[str]] = {}
    for path in files:
        found.setdefault(format or format_of(path), []).append(path)
    return [(paths[0], paths) for paths in found.values()]


def _predicted(plan: Plan, run: Run, name: str, path: str) -> dict[str, Any]:
    """Predicts the first rows of a file of data.`name`, and returns what was read."""
    job, schema = plan.job, plan.schema
    if name == "train":  # which need no column to group by
        dataset, breakdown = streamed(job, schema), None
    else:
        dataset = evaluated(job, schema, [path], plan.stamps)
        breakdown = breakdown_of(job, schema, [path])()
    batch = _first(dataset, [path])
    metrics = run.evaluate([batch], breakdown=breakdown)
    return {
        "first": path,
        "rows_read": batch.size,
        "malformed": dataset.bad_rows,
        "clicks": metrics.clicks,
    }


def _first(dataset: QueueDataset, files: Sequence[str]) -> Batch:
    dataset.set_filelist(files)
    with closing(iter(dataset)) as batches:
        batch = next(batches, None)
    if batch is None:
        raise DataError(f"{', '.join(files)}: no rows")
    return batch


def _shown(optimizer: OptimizerSpec) -> str:
    settings = ", ".join(f"{name} {value:g}" for name, value in optimizer.params.items())
    return f"{optimizer.name} ({settings})" if settings else optimizer.name
