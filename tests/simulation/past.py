"""Faults of the past, put back: does the simulation find them, and how soon?

    python -m tests.simulation.past [--seeds N] [--theme THEME] [NAME ...]

A file of past_faults/ says in its first line what was wrong, and where it was mended, if it was found later
than written; then which lines of which file become which. They are changed as the package is imported.
"""

import argparse
import importlib.machinery
import os
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("past_faults")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class PastFault:
    """A fault: the file that has it, and its changes: lines that are there once, and what they become."""

    name: str
    title: str
    file: str
    changes: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, name: str) -> "PastFault":
        title, file, rest = (FOLDER / f"{name}.txt").read_text().split("\n", 2)
        parts = rest.removeprefix("<<<\n").removesuffix(">>>\n").split("<<<\n")
        changes = [part.split("===\n") for part in parts]
        return cls(name, title, file.removeprefix("--- "), tuple((a, b) for a, b in changes))

    def put_into(self, source: str) -> str:
        for old, new in self.changes:
            assert source.count(old) == 1, f"{self.name}: its lines are not in {self.file}: {old}"
            source = source.replace(old, new)
        return source


def all_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def install(name: str) -> None:
    """Has this process import the package with a fault; to be called before."""
    fault = PastFault.read(name)
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed(self: Any, fullname: str) -> Any:
        if not self.path.endswith(fault.file):
            return get_code(self, fullname)
        source = fault.put_into(Path(self.path).read_text())
        return compile(source, self.path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = changed


def find(
    name: str,
    num_seeds: int,
    num_processes: int = 1,
    undisturbed: Path | None = None,
    theme: str | None = None,
) -> tuple[int | None, float, str]:
    """Returns the first seed that finds a fault, None: none; seconds of processors, and what was wrong."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.simulation", f"--fault={name}", "--until-bad"),
            *(f"--seeds={num_seeds}", f"--processes={num_processes}"),
            *(() if undisturbed is None else (f"--undisturbed={undisturbed}",)),
            *(() if theme is None else (f"--theme={theme}",)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = re.search(r"^seed (\d+): (.*)", done.stdout, re.MULTILINE)
    if found is None and done.returncode:  # as when nothing works at all
        return -1, took_s, done.stderr.strip().rpartition("\n")[2]
    seed, wrong = (None, "") if found is None else (int(found[1]), found[2])
    return seed, took_s, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.past")
    parser.add_argument("names", nargs="*", help="faults; all if none is named")
    parser.add_argument("--seeds", type=int, default=200, help="give up after so many")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--theme", help="with the seeds of one theme only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return _find_all(options, Path(folder) / "undisturbed")


def _find_all(options: argparse.Namespace, undisturbed: Path) -> int:
    simulate = sys.executable, "-m", "tests.simulation", "--seeds=0"
    subprocess.run([*simulate, f"--undisturbed={undisturbed}"], cwd=ROOT, check=True)
    num_found = 0
    names = options.names or all_names()
    for name in names:
        seed, took_s, wrong = find(
            *(name, options.seeds, options.processes, undisturbed, options.theme)
        )
        num_found += seed is not None
        at = "not found" if seed is None else f"seed {seed}"
        title = PastFault.read(name).title
        print(f"| {name} | {title} | {at} | {took_s:.0f} s | {wrong[:90]} |", flush=True)
    print(f"found {num_found} of {len(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
