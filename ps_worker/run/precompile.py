"""Compiles the kernels of a worker: `python -m ctr_ps.ps_worker.run.precompile` in the build of an image.

It trains on two rows with a store of its own, so that all kernels of a step are compiled, or loaded from
numba's cache on disk.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.gradients import SparseGrad, sum_sparse
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.role import WorkerRole
from ctr_ps.protos.runtime.jit import compile_lock, read_only
from ctr_ps.protos.wire.encoding.arrays import from_bfloat16, to_bfloat16
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.routing import scatter_rows
from ctr_ps.ps_worker.data.bad_rows import BadRowLog, BadRows
from ctr_ps.ps_worker.data.columnar.record_batches import blocks_of
from ctr_ps.ps_worker.data.columns import columns_of
from ctr_ps.ps_worker.data.formats import format_of, has_byte_offsets, without_codec
from ctr_ps.ps_worker.data.rows_in_memory import RowsInMemory
from ctr_ps.ps_worker.data.text.multislot import MultiSlotScanner
from ctr_ps.ps_worker.data.text.text_reader import first_block
from ctr_ps.ps_worker.data.user_code.samples import batches_of_samples
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.datasets import streamed
from ctr_ps.ps_worker.job.model import errors_of_model
from ctr_ps.ps_worker.run.plan import NewPassTrainer, Plan, model_plan_of, plan_of
from ctr_ps.ps_worker.run.run import Run


def precompile(plan: Plan) -> None:
    """Compiles the kernels that a worker needs for this plan, and no others."""
    job = plan.job
    is_read = bool(plan.train_files) and not job.data.pipe_command
    # Before the lock: files may be far away, and other processes wait for it.
    read_again = _first_rows(plan) if is_read else None
    with errors_of_model(job), compile_lock():
        _train_on_two_rows(plan.model, plan.schema, job, plan.new_pass_trainer)
        if not plan.role.is_in_process:
            _move_rows(job)
        if job.data.in_memory:
            _gather_lists()
        if job.data.pipe_command:
            # Without the command: each run of one may be costly.
            MultiSlotScanner(plan.schema).scan(np.frombuffer(b"\n", np.uint8))
        if read_again is not None:
            read_again()


def precompile_script(
    model: Model,
    schema: Schema,
    job: Job,
    *,
    is_in_process: bool,
    new_pass_trainer: NewPassTrainer | None = None,
) -> None:
    """Compiles the kernels that a script may need, whose data is not known yet; see `precompile`."""
    with compile_lock():
        _train_on_two_rows(model, schema, job, new_pass_trainer)
        if not is_in_process:
            _move_rows(job)
        _hash_a_sample(schema)


def _train_on_two_rows(
    model: Model, schema: Schema, job: Job, new_pass_trainer: NewPassTrainer | None
) -> None:
    quiet = job.train.model_copy(update={"batch_size": 1, "log_every_s": math.inf})
    batches = [_batch_of_one(schema, label) for label in (0.0, 1.0)]
    job = job.model_copy(update={"train": quiet})
    plan = model_plan_of(model, job, new_pass_trainer=new_pass_trainer)
    with Run(ParameterStore(), plan) as run:
        run.train(batches, thread_num=1)
        run.evaluate(batches)


def _first_rows(plan: Plan) -> Callable[[], object] | None:
    """Reads the first rows of the files, and compiles nothing.

    Returns what compiles the kernels that read such rows, without the files; None: they cannot be read.
    """
    path = plan.train_files[0]
    format = plan.job.data.format or format_of(path)
    with contextlib.suppress(CtrPsError):  # training reports it
        if not has_byte_offsets(path, format):
            bad_rows = BadRows(plan.job.data.bad_row_limit, BadRowLog(is_silent=True))
            columns = next(columns_of(path, plan.schema, bad_rows, format=format), None)
            return None if columns is None else lambda: next(blocks_of(columns, plan.schema), None)
        if lines := first_block(path).tobytes():
            return partial(_read_lines, plan, without_codec(path), lines)
    return None


def _read_lines(plan: Plan, name: str, lines: bytes) -> None:
    """Reads lines as if they were those of a file of this name, whose suffix may be its format."""
    dataset = streamed(plan.job, plan.schema)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(CtrPsError):
        path = Path(folder, name)
        path.write_bytes(lines)
        dataset.set_filelist([path])
        next(dataset.head(), None)


def _batch_of_one(schema: Schema, label: float) -> Batch:
    num_slots = len(schema.slots)
    return Batch(
        labels=np.array([label], np.float32),
        other_labels=np.full((1, len(schema.other_labels)), label, np.float32)
        if schema.other_labels
        else None,
        dense=np.zeros((1, schema.num_dense), np.float32),
        keys=np.arange(num_slots, dtype=np.uint64),
        offsets=np.arange(num_slots + 1, dtype=np.int32),
        num_slots=num_slots,
    )


def _hash_a_sample(schema: Schema) -> None:
    sample = (1, [0.0] * len(schema.dense), ["a"] * len(schema.slots))
    list(batches_of_samples([sample], schema, batch_size=1))


def _gather_lists() -> None:
    rows = RowsInMemory(num_dense=1, num_slots=1)
    two_keys = Batch(
        labels=None,
        dense=np.zeros((1, 1), np.float32),
        keys=np.zeros(2, np.uint64),
        offsets=np.array([0, 2], np.int32),
        num_slots=1,
    )
    rows.extend(two_keys, source=0)
    rows.gather(rows.in_order())


def _move_rows(job: Job) -> None:
    """Runs what a cluster's client does with keys and rows."""
    if job.strategy.in_use().get(f"{job.strategy.mode}.wire_dtype") == "bfloat16":
        from_bfloat16(to_bfloat16(np.ones(1, np.float32)))
    keys = np.arange(4, dtype=np.uint64)
    grad = SparseGrad(keys, np.ones((4, 2), np.float32), 1)
    sum_sparse([grad, grad])
    out = np.empty((4, 2), np.float32)
    for positions in ShardMap.of(2).route(keys, 64):
        values = read_only(np.ones((positions.size, 2), np.float32))
        scatter_rows(values, positions, out)


def _precompile_image() -> None:
    plan = plan_of(Job(), WorkerRole(endpoints=("server:1",), worker_index=0, num_workers=1))
    precompile(plan)
    with compile_lock():
        # Criteo's rows, for jobs whose files are not there when an image is built.
        row = "\t".join(["1", *("1" for _ in plan.schema.dense), *("a" for _ in plan.schema.slots)])
        _read_lines(plan, "rows.tsv", f"{row}\n".encode())
        _hash_a_sample(plan.schema)
        _gather_lists()


if __name__ == "__main__":
    _precompile_image()
