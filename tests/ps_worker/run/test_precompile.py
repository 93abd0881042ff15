"""A worker compiles the kernels of its job before it joins the others, and no more than those."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run import precompile as module
from ctr_ps.ps_worker.run.plan import plan_of
from tests.support.commands import printed_by

PROGRAM = """
import json, sys
from collections import Counter
from pathlib import Path

from numba.core.dispatcher import Dispatcher

from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.precompile import precompile
from ctr_ps.ps_worker.run.training_job.train_job import train_job

PACKAGES = ("ctr_ps.",)


def compiled():
    found = Counter()
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES):
            for attribute, value in vars(module).items():
                if isinstance(value, Dispatcher) and value.__module__ == name:
                    found[f"{name}.{attribute}"] = len(value.signatures)
    return +found


path, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
row = "\\t".join(["1", *["2"] * 13, *["a"] * 26])
path.write_text(f"{row}\\n" * 20)
data = {"train": str(path), "test": str(path), **settings}
train = {"batch_size": 4, "thread_num": 2}
plan = plan_of(Job.model_validate({"data": data, "train": train}))
precompile(plan)
before = compiled()
summary = train_job(plan, ParameterStore())
print(json.dumps({
    "examples": summary.examples,
    "compiled later": dict(compiled() - before),
    "route": before["ctr_ps.protos.placement._route"],
    "in memory": before["ctr_ps.ps_worker.data.rows_in_memory.gather_lists"],
}))
"""


PIPED = {
    "pipe_command": r"sed 's/^/1 /; s/\t/ 1 /g'",
    "values": "text",
    "columns": ["click", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))],
}


@pytest.mark.parametrize(
    "settings", [{}, {"in_memory": True}, PIPED], ids=["streamed", "in memory", "piped"]
)
def test_training_in_process_compiles_nothing_after_the_start(settings, tmp_path):
    printed = printed_by(PROGRAM, tmp_path / "rows.tsv", json.dumps(settings))

    assert json.loads(printed.splitlines()[-1]) == {
        "examples": 20,
        "compiled later": {},
        "route": 0,  # no servers to choose from
        "in memory": int("in_memory" in settings),
    }


OF_A_CLUSTER = """
import json, sys

from ctr_ps.protos.wire.encoding import arrays
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.precompile import precompile
from tests.support.training import worker_role

job = Job.model_validate(json.loads(sys.argv[1]))
precompile(plan_of(job, worker_role(is_in_process=False)))
print([len(kernel.signatures) for kernel in (arrays._round, arrays._widen)])
"""


@pytest.mark.parametrize(("wire_dtype", "number"), [("float32", 0), ("bfloat16", 1)])
def test_worker_of_a_cluster_compiles_how_numbers_are_rounded_if_its_job_does(
    wire_dtype: str, number: int, tmp_path: Path
) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("\t".join(["1", *["2"] * 13, *["a"] * 26]) + "\n")
    strategy = {"mode": "async", "async": {"wire_dtype": wire_dtype}}
    settings = {"data": {"train": str(path)}, "strategy": strategy}

    printed = printed_by(OF_A_CLUSTER, json.dumps(settings))

    assert json.loads(printed) == [number, number]


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.parquet"])
def test_lock_is_not_held_while_files_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be slow, and all other processes wait for the lock."""
    rows = pa.table({"label": [0, 1], "user": ["a", "b"], "price": [0.5, 1.5]})
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(rows, path)
    else:
        with pa.output_stream(path) as file:
            csv.write_csv(rows, file)
    (tmp_path / "schema.toml").write_text(
        'hash_version = 1\nslots = ["user"]\ndense = [{ name = "price", transform = "none" }]\n'
    )
    data = {"train": str(path), "schema": str(tmp_path / "schema.toml")}
    plan = plan_of(Job.model_validate({"data": data}))
    monkeypatch.setattr(module, "_train_on_two_rows", lambda *_: None)
    hashed: list[int] = []
    monkeypatch.setattr(
        "ctr_ps.ps_worker.data.columnar.column_values._hash_values", lambda *_: hashed.append(1)
    )

    @contextmanager
    def lock() -> Iterator[None]:
        assert hashed == []
        path.unlink()
        yield
        assert hashed

    monkeypatch.setattr(module, "compile_lock", lock)
    module.precompile(plan)


def test_files_that_cannot_be_read_are_left_to_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.parquet").write_text("no parquet")
    plan = plan_of(Job.model_validate({"data": {"train": str(tmp_path / "rows.parquet")}}))
    monkeypatch.setattr(module, "_train_on_two_rows", lambda *_: None)

    module.precompile(plan)
