"""A worker compiles the kernels of its job before it joins the others, and no more than those."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
from collections import Counter
from pathlib import Path

from ps_server.store import ParameterStore
from ps_worker.job import Job
from ps_worker.run.plan import plan_of
from ps_worker.run.precompile import precompile
from ps_worker.run.training_job.train_job import train_job

PACKAGES = ("protos.", "ps_server.", "ps_worker.", "ctr_model.")


def compiled():
    found = Counter()
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES):
            for attribute, value in vars(module).items():
                if getattr(value, "__module__", None) == name:
                    found[f"{name}.{attribute}"] = len(getattr(value, "signatures", ()))
    return +found


path, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
row = "\\t".join(["1", *["2"] * 13, *["a"] * 26])
path.write_text(f"{row}\\n" * 20)
data = {"train": str(path), "test": str(path), **settings}
train = {"batch_size": 4, "thread_num": 2}
plan = plan_of(Job.model_validate({"data": data, "train": train}))
precompile(plan, is_in_process=True)
before = compiled()
summary = train_job(plan, ParameterStore())
print(json.dumps({
    "examples": summary.examples,
    "compiled later": dict(compiled() - before),
    "route": before["protos.placement._route"],
    "in memory": before["ps_worker.data.memory.rows.gather_lists"],
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
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "rows.tsv"), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {
        "examples": 20,
        "compiled later": {},
        "route": 0,  # no servers to choose from
        "in memory": int("in_memory" in settings),
    }
