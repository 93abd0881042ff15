"""Speed of several checkouts side by side: each keeps clusters that stand idle but for turns of a second.

    git worktree add ../before HEAD~1
    python -m benchmarks.turns ../before . --case sync_2x2 --batch-size 100

Runs that follow one another differ by more than a change of a percent, as the speed of a machine drifts, and
an instance differs from the next of the same code by 2 to 5 %. So all instances of all checkouts take turns,
and a round compares the means over instances. Every checkout needs this module.
"""

import argparse
import contextlib
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench_train import (
    BATCH_SIZES,
    MODES,
    NUM_WORKERS,
    environment_of,
    free_ports,
    run_worker,
    settings_of,
    start_server,
    warmup_steps,
    worker_role,
)
from benchmarks.figures import say

STEPS = {100: 300, 512: 80, 4096: 10}
_GEO_STEPS = 100  # as many as between exchanges, at least

Workers = list[subprocess.Popen[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT")
    cases = ["in_process_1", *(f"{mode}_2x2" for mode in MODES)]
    parser.add_argument("--case", choices=cases, required=True)
    parser.add_argument("--batch-size", type=int, choices=BATCH_SIZES, required=True)
    parser.add_argument("--instances", type=int, default=3, help="of each checkout")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    mode = options.case.removesuffix("_2x2")
    steps = STEPS[options.batch_size] if mode != "geo" else _GEO_STEPS
    numbers = range(len(options.checkouts))
    speeds: dict[int, list[float]] = {number: [] for number in numbers}
    with contextlib.ExitStack() as stack:
        instances = [
            (number, stack.enter_context(instance(checkout, mode, options.batch_size, steps)))
            for _ in range(options.instances)
            for number, checkout in enumerate(options.checkouts)
        ]
        for _ in range(options.rounds):
            of_round: dict[int, list[float]] = {number: [] for number in numbers}
            for number, workers in instances:
                seconds = turn(workers)
                of_round[number].append(len(workers) * steps * options.batch_size / seconds)
            for number in numbers:
                speeds[number].append(statistics.mean(of_round[number]))
            instances.reverse()  # no checkout is always the first of a round
    for number, checkout in enumerate(options.checkouts):
        ratios = [ours / first for ours, first in zip(speeds[number], speeds[0], strict=True)]
        say(
            "turns",
            checkout=str(checkout),
            case=options.case,
            batch_size=options.batch_size,
            examples_per_s=round(statistics.median(speeds[number])),
            of_first=round(statistics.median(ratios), 3),
            standard_error=round(statistics.stdev(ratios) / len(ratios) ** 0.5, 3),
        )


@contextlib.contextmanager
def instance(checkout: Path, mode: str, batch_size: int, steps: int) -> Iterator[Workers]:
    """Runs the processes of one checkout's job, and returns its workers once all are warm."""
    folder = checkout.resolve()
    environment = {"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    roles: list[dict[str, str]] = [{}]
    settings: list[str] = []
    ports: list[int] = []
    if mode != "in_process_1":
        ports = free_ports(2)
        environment |= environment_of(ports, NUM_WORKERS)
        roles = [worker_role(index) for index in range(NUM_WORKERS)]
        settings = settings_of(mode, batch_size)
    arguments = ["--turns", f"--batch-size={batch_size}", f"--steps={steps}"]
    arguments += [f"--warmup={warmup_steps(mode, batch_size)}", *(f"--set={s}" for s in settings)]
    processes = [start_server(port, environment, checkout=folder) for port in ports]
    workers = [
        run_worker(environment | role, arguments, checkout=folder, stderr=subprocess.DEVNULL)
        for role in roles
    ]
    try:
        for worker in workers:
            answer_of(worker)
        yield workers
        for worker in workers:
            worker.communicate(timeout=60)  # the end of its input ends it
    finally:
        for process in (*workers, *processes):
            process.kill()
            process.wait()


def turn(workers: Workers) -> float:
    """Has the workers of a job train together; returns the seconds of the slowest."""
    for worker in workers:
        assert worker.stdin is not None
        print(file=worker.stdin, flush=True)
    return max(answer_of(worker) for worker in workers)


def answer_of(worker: subprocess.Popen[str]) -> float:
    """Returns the next line of a worker: the seconds of a turn."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"a worker failed with exit code {worker.wait()}")
    return float(line)


if __name__ == "__main__":
    main()
