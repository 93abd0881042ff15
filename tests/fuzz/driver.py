"""The loop of a fuzzer in a process of its own, which a crash ends and not the one that watches it.

A case is an input of a seed and a number; an input that ends otherwise than with an answer, or with an error
of ours, is a finding. What a finding needs to come again is printed.
"""

import faulthandler
import hashlib
import json
import mmap
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ctr_ps.protos.errors import CtrPsError

CORPUS = Path(__file__).parent / "corpus"

MODULES = {
    "data_targets": ("columns", "text", "rows"),
    "serving_targets": ("attachments", "http", "grpc"),
    "server_targets": ("checkpoint", "log", "rpc"),
}
TARGETS = {name: module for module, names in MODULES.items() for name in names}
"""The module of each target, which is a function of its name there."""

CASE_LIMIT_S = 120.0
"""Of a case, which may be the first to need a kernel."""

START_LIMIT_S = 600.0
"""Of the seeds, for which kernels are compiled."""

MEMORY_LIMIT_BYTES = 4 * 2**30
_LOOK_S = 0.02
_LIBRARY_CRASHES = re.compile(
    rb"terminate called after throwing|"
    rb'Current thread .*\(most recent call first\):\n  File ".*/pyarrow/orc\.py"'
)
"""By an exception of Arrow's C++ code, and within ORC's decoder, which trusts its file (docs/security.md)."""

_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV)


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        seeds: Inputs that are in order.
        make: Makes another input; nearly all draws are mutated seeds.
        check: Takes an input. Returns what it was answered, which must not depend on the machine; raises
            CtrPsError where it is refused, and AssertionError if the answer is wrong.
    """

    seeds: Sequence[bytes]
    make: Callable[[random.Random], bytes]
    check: Callable[[bytes], bytes]


@dataclass(frozen=True)
class Report:
    """What became of the cases.

    Attributes:
        answered: Of the inputs.
        refused: Of the inputs.
        aborted: Cases in which Arrow, or ORC's decoder in it, ended the process.
        digest: Of all answers, up to the last abort.
        finding: Empty, or what was found and how it comes again.
    """

    answered: int = 0
    refused: int = 0
    aborted: int = 0
    digest: str = ""
    finding: str = ""

    @property
    def cases(self) -> int:
        return self.answered + self.refused + self.aborted


def target_of(name: str, folder: Path) -> Target:
    """Makes a target in a scratch folder; what it fuzzes is imported only now."""
    target: Target = getattr(import_module(f"tests.fuzz.{TARGETS[name]}"), name)(folder)
    return target


def corpus_of(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def run_cases(
    target: Target,
    past: Sequence[bytes],
    state: mmap.mmap,
    *,
    seed: int,
    first: int,
    count: int,
    seconds: float,
) -> dict[str, object]:
    """Runs cases until `count` are done or the time is up; `state` tells the watcher which one.

    Raises:
        Exception: That of the first finding.
    """
    for each in target.seeds:  # compiles kernels
        target.check(each)
    digest, numbers = hashlib.sha256(), {"answered": 0, "refused": 0}

    def run(data: bytes) -> None:
        try:
            digest.update(b"answered" + target.check(data))
            numbers["answered"] += 1
        except CtrPsError as error:
            digest.update(type(error).__name__.encode())
            numbers["refused"] += 1

    if first == 0:
        for each in past:
            run(each)
    number, stop = first, time.monotonic() + seconds
    while number < first + count and time.monotonic() < stop:
        state[8:16] = (number + 1).to_bytes(8, "little")
        state[:8] = numbers["answered"].to_bytes(4, "little") + numbers["refused"].to_bytes(
            4, "little"
        )
        run(input_of(target, seed, number))
        number += 1
    return {**numbers, "digest": digest.hexdigest()}


def input_of(target: Target, seed: int, number: int) -> bytes:
    return target.make(random.Random(f"{seed}/{number}"))


def fuzz(name: str, *, seed: int, seconds: float, first: int = 0, count: int = 2**62) -> Report:
    """Runs cases in a child process, and watches its time and memory."""
    report, stop = Report(), time.monotonic() + seconds
    while True:
        left, more = max(stop - time.monotonic(), 0.0), first + count
        child = _watched(name, seed, first, count, left)
        report = Report(
            report.answered + child.answered,
            report.refused + child.refused,
            report.aborted + child.aborted,
            child.digest,
            child.finding,
        )
        if not child.aborted:
            return report
        first = child.cases + first
        count = more - first
        if count <= 0 or time.monotonic() >= stop:
            return report


def _watched(name: str, seed: int, first: int, count: int, seconds: float) -> Report:
    options = ["--seed", seed, "--first", first, "--count", count, "--seconds", seconds]
    command = [sys.executable, "-m", "tests.fuzz", name, *map(str, options)]
    with tempfile.TemporaryFile() as shared, tempfile.TemporaryFile() as errors:
        shared.truncate(16)
        state = mmap.mmap(shared.fileno(), 16)
        child = subprocess.Popen(
            [*command, "--child", str(shared.fileno())],
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=[shared.fileno()],
        )
        why = _watch(child, state)
        assert child.stdout is not None
        output = child.stdout.read()
        child.stdout.close()
        errors.seek(0)
        text = errors.read()
    if child.returncode == 0:
        return Report(**json.loads(output))
    number = int.from_bytes(state[8:16], "little") - 1
    answered, refused = (int.from_bytes(state[i : i + 4], "little") for i in (0, 4))
    if child.returncode in _CRASHES and _LIBRARY_CRASHES.search(text):
        return Report(answered, refused, 1)
    place = f"--first {number} --count 1" if number >= 0 else "--count 0"
    finding = (
        f"{why or f'exit status {child.returncode}'}\n{text[-8000:].decode(errors='replace')}\n"
        f"again: python -m tests.fuzz {name} --seed {seed} {place} --keep FILE"
    )
    return Report(answered, refused, finding=finding)


def _watch(child: subprocess.Popen[bytes], state: mmap.mmap) -> str:
    """Waits for the end of a process, which comes at a limit at the latest; returns which one, or nothing."""
    before, since = b"", time.monotonic()
    while True:
        try:
            child.wait(_LOOK_S)
            return ""
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        if (number := state[8:16]) != before:
            before, since = number, now
        limit_s = CASE_LIMIT_S if any(number) else START_LIMIT_S
        try:
            pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):  # it has ended
            pages = 0
        why = f"a case took {limit_s:g} s" if now - since > limit_s else ""
        if pages * mmap.PAGESIZE > MEMORY_LIMIT_BYTES:
            why = f"a case took {MEMORY_LIMIT_BYTES >> 30} GiB of memory"
        if why:
            child.kill()
            child.wait()
            return why


def child_main(target: Target, name: str, state: int, **limits: Any) -> int:
    """Runs cases and prints their report, with a finding a traceback; `state` is a descriptor."""
    faulthandler.enable()
    try:
        print(json.dumps(run_cases(target, corpus_of(name), mmap.mmap(state, 16), **limits)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    return 0
