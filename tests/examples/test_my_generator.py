"""The example generator, as a pipe command and in process, yields the rows of the Criteo reader."""

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import MakeReader
from ctr_ps.ps_worker.data.text.criteo import CriteoReader
from ctr_ps.ps_worker.data.user_code.generator_reader import generated
from ctr_ps.ps_worker.data.user_code.pipe import piped
from examples.my_generator import CriteoGenerator
from tests.support.commands import ROOT

COMMAND = f"PYTHONPATH={shlex.quote(str(ROOT))} {shlex.quote(sys.executable)} {ROOT}/examples/my_generator.py"


@pytest.mark.parametrize(
    "make",
    [generated(CriteoGenerator()), piped(COMMAND, values="text")],
    ids=["in process", "piped"],
)
def test_rows_equal_those_of_the_criteo_reader(tmp_path: Path, make: MakeReader) -> None:
    generator = np.random.default_rng(1)
    path = tmp_path / "part-0"
    with path.open("w") as file:
        for _ in range(50):
            numbers = [str(n) if n > 0 else "" for n in generator.integers(-9, 99, 13)]
            values = [f"{n:08x}" if n > 9 else "" for n in generator.integers(0, 99, 26)]
            print(generator.integers(0, 2), *numbers, *values, sep="\t", file=file)
    schema, part = criteo_schema(), FileSplit(str(path))

    (block,) = make(schema, BadRows(0)).blocks(part)

    (expected,) = CriteoReader(schema, BadRows(0)).blocks(part)
    assert block.rows.labels.tolist() == expected.rows.labels.tolist()
    assert block.rows.dense.tolist() == expected.rows.dense.tolist()
    assert block.rows.keys.tolist() == expected.rows.keys.tolist()
    assert block.rows.offsets.tolist() == expected.rows.offsets.tolist()
