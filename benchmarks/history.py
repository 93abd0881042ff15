"""What became of ratios from commit to commit: benchmarks/history.jsonl has a line for each `make bench`.

    python -m benchmarks.history    # warns of ratios that have fallen since the line before

Ratios within one run, as absolute figures differ between machines; lines of other machines are not compared.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).parent / "history.jsonl"

MOST_FALLEN = 0.10
"""A ratio that has lost more is warned of: two runs of one version differ by half of that."""

RATIOS = {
    "in process, 2 threads, of two ceilings": ("in_process_2", "two_ceilings"),
    "sync of async": ("sync_2x2", "async_2x2"),
    "async of in process": ("async_2x2", "in_process_2"),
    "geo of in process": ("geo_2x2", "in_process_2"),
    "async of PaddlePaddle": ("async_2x2", "peer_async_2x2"),
    "in process of plain PyTorch": ("in_process_2", "peer_torch_2"),
}
"""Cases of bench_train whose examples/s are compared."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Ratios of one run."""

    commit: str  # id of the version, short
    machine: str  # its processor
    ratios: Mapping[str, float]  # by name and batch size


def entry_of(lines: Sequence[Mapping[str, Any]], commit: str) -> Entry:
    """Returns the ratios of a run's lines; of cases that were not measured, or failed, there are none."""
    machine = next((line["cpu"] for line in lines if line["benchmark"] == "machine"), "")
    speeds = {
        (line["case"], line["batch_size"]): line["examples_per_s"]
        for line in lines
        if line["benchmark"] == "train" and "error" not in line
    }
    ratios = {
        f"{name}, B={size}": round(speeds[above, size] / speeds[below, size], 3)
        for name, (above, below) in RATIOS.items()
        for size in sorted({size for _, size in speeds})
        if (above, size) in speeds and (below, size) in speeds
    }
    return Entry(commit, machine, ratios)


def fallen(history: Sequence[Entry]) -> list[str]:
    """Returns a sentence for each ratio of the newest entry that has fallen since one of the same machine."""
    if not history:
        return []
    *earlier, newest = history
    before = next((each for each in reversed(earlier) if each.machine == newest.machine), None)
    if before is None:
        return []
    return [
        f"{name} is {ratio:g}, and was {before.ratios[name]:g} in {before.commit}"
        for name, ratio in newest.ratios.items()
        if name in before.ratios and ratio < (1 - MOST_FALLEN) * before.ratios[name]
    ]


def read(path: Path = HISTORY) -> list[Entry]:
    """Returns all entries, the oldest first."""
    if not path.exists():
        return []
    return [Entry(**json.loads(line)) for line in path.read_text().splitlines()]


def append(lines: Sequence[Mapping[str, Any]], path: Path = HISTORY) -> None:
    """Adds the ratios of a run of this version."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HISTORY.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    with path.open("a") as file:
        file.write(json.dumps(asdict(entry_of(lines, commit))) + "\n")


def main() -> None:
    """Warns; never fails, as a machine may have been busy."""
    for sentence in fallen(read()):
        print(f"warning: {sentence} (benchmarks/history.jsonl)")


if __name__ == "__main__":
    main()
