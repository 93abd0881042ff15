"""Resource usage of processes, from Linux's /proc."""

import os
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.25


@dataclass
class Peak:
    """Peak usage of a process; `processor_s` includes its last moment if it has ended."""

    memory_mb: float = 0.0
    threads: int = 0
    sockets: int = 0
    processor_s: float = 0.0

    def look(self, pid: int) -> None:
        """Updates it; an ended process that is not reaped has processor time only."""
        folder = Path(f"/proc/{pid}")
        # The name of the program is in brackets, and may have any character.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        self.processor_s = max(self.processor_s, ticks / os.sysconf("SC_CLK_TCK"))
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has just ended
            status = dict(re.findall(r"^(\w+):\s+(\d+)", (folder / "status").read_text(), re.M))
            if "VmHWM" not in status:
                return
            self.memory_mb = max(self.memory_mb, int(status["VmHWM"]) / 1024)
            self.threads = max(self.threads, int(status["Threads"]))
            opened = [_target(link) for link in (folder / "fd").iterdir()]
            num_sockets = sum(target.startswith("socket:") for target in opened)
            self.sockets = max(self.sockets, num_sockets)


def resident_bytes(pid: int | str = "self", *, peak: bool = False) -> int:
    """Returns the current or peak resident memory of a process."""
    name = "VmHWM" if peak else "VmRSS"
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])


def _target(link: Path) -> str:
    with suppress(FileNotFoundError):  # closed since it was listed
        return str(link.readlink())
    return ""


def peaks_until_end(
    pids: Mapping[str, int], ending: Collection[str], *, limit_s: float
) -> dict[str, Peak]:
    """Watches children of this process, by name, until those in `ending` have ended; nobody may reap them."""
    peaks = {name: Peak() for name in pids}
    end = time.monotonic() + limit_s
    while True:
        num_running = sum(not _has_ended(pids[name]) for name in ending)
        for name, pid in pids.items():
            peaks[name].look(pid)
        if not num_running or time.monotonic() > end:
            return peaks
        time.sleep(_LOOK_S)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
