"""Kernels with checks of their indices, for which numba compiles them anew: in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TABLES = "tests/ps_server/table"
FILES = [
    f"{TABLES}/test_table_snapshot.py",
    f"{TABLES}/test_replica_table.py",
    f"{TABLES}/test_dense_table.py",
    f"{TABLES}/feature_life/test_candidates.py",
    f"{TABLES}/feature_life/test_expiry.py",
    f"{TABLES}/rows/test_removal.py",
]
"""Tests of the kernels that change a table's rows."""

LIMIT_S = 1200


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_kernels_of_tables_stay_within_their_arrays(tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "CI": "",
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *FILES]

    done = subprocess.run(
        [*command, "--timeout", str(LIMIT_S)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-8000:]
