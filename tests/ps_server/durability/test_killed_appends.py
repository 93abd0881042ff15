"""A process that is killed while it appends: all records that it acknowledged are read back."""

import random
import sys
from pathlib import Path

import pytest

from ctr_ps.ps_server.durability.update_log import LogSync
from tests.support.append_target import THREADS
from tests.support.processes import LIMIT_S, started
from tests.support.update_logs import read_records, resumed_log


@pytest.mark.parametrize("sync", LogSync, ids=lambda sync: sync.value)
@pytest.mark.parametrize("run", range(4))
def test_acknowledged_records_survive_a_kill(tmp_path: Path, sync: LogSync, run: int) -> None:
    folder = tmp_path / "log"
    command = [sys.executable, "-m", "tests.support.append_target", folder, sync.value]

    with started(command) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(random.Random(run).randrange(10, 200))]
        process.kill()
        lines += process.stdout.readlines()
        process.wait(LIMIT_S)
    acknowledged = {line.strip() for line in lines if line.endswith("\n")}
    found = [bytes(record.payload).split()[0].decode() for record in read_records(folder)]

    assert acknowledged <= set(found), lines[-3:]
    for thread in range(THREADS):
        own = [name for name in found if name.startswith(f"{thread}:")]
        assert own == [f"{thread}:{number}" for number in range(len(own))]
        # One more may have been written and not yet acknowledged.
        assert len(own) <= sum(name.startswith(f"{thread}:") for name in acknowledged) + 1
    with resumed_log(folder, sync=sync) as log:
        log.begin_segment([])
