"""What a row costs in memory, as the system counts it."""

import pytest

from tests.support.commands import printed_by

MEASURE = """
import mmap, sys
from pathlib import Path
import numpy as np
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.ps_server.table.sparse_table import SparseTable

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

def new_table():
    return SparseTable(TableSpec(
        name="t", dim=10, initializer=InitializerSpec(scale=0.01),
        optimizer=OptimizerSpec(name=sys.argv[1], params={"learning_rate": 1.0}),
    ), num_subscribers=int(sys.argv[3]))

def fill(table, num_rows):
    values = np.zeros((min(num_rows, 100_000), 10), np.float32)
    values[::8] = 1  # one row in eight goes away from 0
    for start in range(0, num_rows, 100_000):
        keys = np.arange(start, min(start + 100_000, num_rows), dtype=np.uint64)
        table.push(SparseGrad(keys, values[: keys.size], 1))

def used_bytes(table, before):
    print(resident_bytes() - before, table.status.size_bytes)

num_rows = int(sys.argv[2])
warm = new_table()  # compiles the kernels, takes the buffers
fill(warm, 100_000)
warm.shrink(max_norm=0.1)
before = resident_bytes()
table = new_table()
fill(table, num_rows)
used_bytes(table, before)
table.shrink(max_norm=0.1)
used_bytes(table, before)
"""

STATE_WIDTHS = {"sgd": 0, "adagrad": 10}


def used_bytes(optimizer: str, num_rows: int, num_subscribers: int = 0) -> list[list[int]]:
    """Returns the bytes that a table takes, and those that it says it takes.

    First of all rows, then of the eighth that is left after evicting.
    """
    output = printed_by(MEASURE, optimizer, num_rows, num_subscribers)
    return [[int(number) for number in line.split()] for line in output.splitlines()]


@pytest.mark.parametrize(
    "num_rows", [2_000_000, pytest.param(10_000_000, marks=pytest.mark.slow)], ids=["2M", "10M"]
)
@pytest.mark.parametrize("optimizer", STATE_WIDTHS)
def test_row_takes_at_most_1_6_times_its_key_and_numbers(optimizer: str, num_rows: int) -> None:
    key_and_numbers = 8 + 4 * (10 + STATE_WIDTHS[optimizer])

    (resident, declared), _ = used_bytes(optimizer, num_rows)

    assert resident <= 1.6 * key_and_numbers * num_rows
    assert declared == pytest.approx(resident, rel=0.15)


def test_memory_of_evicted_rows_goes_back_to_the_system() -> None:
    """But for pages with a row that is left, and for the buffers of the thread that pushed."""
    (before, _), (after, declared) = used_bytes("adagrad", 2_000_000, num_subscribers=100)

    assert declared < before / 7
    assert after < declared + 10 * 2**20


def test_small_table_takes_little() -> None:
    """Jobs have dozens of tables; what is reserved is not yet used."""
    (resident, _), _ = used_bytes("adagrad", 1000)

    assert resident < 2 * 2**20
