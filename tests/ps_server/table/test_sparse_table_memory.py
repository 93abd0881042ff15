"""What a row costs in memory, as the system counts it."""

import subprocess
import sys

import pytest

MEASURE = """
import mmap, sys
from pathlib import Path
import numpy as np
from protos.gradients import SparseGrad
from protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ps_server.table.sparse_table import SparseTable

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

def new_table():
    return SparseTable(TableSpec(
        name="t", dim=10, initializer=InitializerSpec(scale=0.1),
        optimizer=OptimizerSpec(name=sys.argv[1]),
    ))

def fill(table, num_rows):
    values = np.ones((min(num_rows, 100_000), 10), np.float32)
    for start in range(0, num_rows, 100_000):
        keys = np.arange(start, min(start + 100_000, num_rows), dtype=np.uint64)
        table.push(SparseGrad(keys, values[: keys.size], 1))

num_rows = int(sys.argv[2])
fill(new_table(), 100_000)  # compiles the kernels, takes the buffers
before = resident_bytes()
table = new_table()
fill(table, num_rows)
print((resident_bytes() - before) / num_rows, table.status.size_bytes / num_rows)
"""

STATE_WIDTHS = {"sgd": 0, "adagrad": 10}


def bytes_a_row(optimizer: str, num_rows: int) -> tuple[float, float]:
    """Returns the bytes a row takes, and those that the table says it takes."""
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, optimizer, str(num_rows)],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout
    resident, declared = map(float, output.split())
    return resident, declared


@pytest.mark.parametrize(
    "num_rows", [2_000_000, pytest.param(10_000_000, marks=pytest.mark.slow)], ids=["2M", "10M"]
)
@pytest.mark.parametrize("optimizer", STATE_WIDTHS)
def test_row_takes_at_most_1_6_times_its_key_and_numbers(optimizer: str, num_rows: int) -> None:
    key_and_numbers = 8 + 4 * (10 + STATE_WIDTHS[optimizer])

    resident, declared = bytes_a_row(optimizer, num_rows)

    assert resident <= 1.6 * key_and_numbers
    assert declared == pytest.approx(resident, rel=0.15)


def test_small_table_takes_little() -> None:
    """Jobs have dozens of tables; what is reserved is not yet used."""
    resident, _ = bytes_a_row("adagrad", 1000)

    assert resident * 1000 < 2 * 2**20
