"""`ps-launch` whose processes are killed and paused at steps."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import COMMANDS
from tests.support.processes import started

LIMIT_S = 240.0
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Fault:
    """Kills the process `index` of a role, as "PSERVER", once worker 0 logs a step; or pauses it."""

    step: int
    role: str
    index: int
    pause_s: float = 0.0  # 0: it is killed


def launched_with(faults: Sequence[Fault], log_dir: Path, *arguments: object) -> dict[str, Any]:
    """Runs `ps-launch` to its end without an error; returns its result.

    The faults happen in order, none after a restart.
    """
    log = log_dir / "trainer.0.log"
    log.unlink(missing_ok=True)  # of an earlier run
    options = ["--json", "--log-dir", log_dir, "--set", f"train.log_every_s={_LOOK_S}"]
    with started([COMMANDS / "ps-launch", *options, *arguments]) as launcher:
        for fault in faults:
            while _last_step(log) < fault.step:
                with suppress(subprocess.TimeoutExpired):
                    raise AssertionError(
                        f"ended before {fault}: {launcher.communicate(timeout=_LOOK_S)}"
                    )
            process = _processes(launcher.pid, fault.role)[fault.index]
            if not fault.pause_s:
                os.kill(process, signal.SIGKILL)
                continue
            os.kill(process, signal.SIGSTOP)
            time.sleep(fault.pause_s)
            os.kill(process, signal.SIGCONT)
        out, error = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 0, error
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def _last_step(log: Path) -> int:
    steps = re.findall(r" step=(\d+) ", log.read_text()) if log.exists() else []
    return int(steps[-1]) if steps else 0


def _processes(parent: int, role: str) -> list[int]:
    """Returns the processes of a role that a launcher has started, in this order."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            if f"TRAINING_ROLE={role}" in (folder / "environ").read_text().split("\0"):
                found.append(int(folder.name))
    return sorted(found)
