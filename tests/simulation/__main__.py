"""Runs seeds: python -m tests.simulation [--seeds N] [--first N] [--seconds S] [--processes N] | --seed N"""

import argparse
import itertools
import logging
import os
import sys
import tempfile
from pathlib import Path

import grpc  # noqa: F401 - others' modules keep the system's threads
import numba  # noqa: F401

# Before any of the package: it takes its threads and clocks from these modules.
from tests.simulation import past, world

world.install()
for argument in sys.argv:
    if argument.startswith("--fault="):
        past.install(argument.partition("=")[2])

from tests.simulation import cluster, crashes, disk, network, seeds  # noqa: E402

network.install()
disk.install()
cluster.install()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds")
    parser.add_argument("--theme", choices=sorted({*seeds.THEMES}), help="those of one theme only")
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    parser.add_argument("--shrink", action="store_true", help="to the fewest faults, if it is bad")
    parser.add_argument("--switches", action="store_true", help="tell each switch of threads")
    parser.add_argument("--seconds", type=float, help="begin no seed after so many seconds")
    parser.add_argument("--until-bad", action="store_true", help="end with the first bad seed")
    parser.add_argument("--crashes", metavar="TEXT,TEXT", help="in moves, whose name has each TEXT")
    parser.add_argument("--fault", help="put this fault of the past back: --fault=NAME")
    parser.add_argument("--undisturbed", type=Path, help="file with what undisturbed runs give")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.INFO)
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    simulator = seeds.Simulator(base / f"ctr-simulation-{os.getpid():08}", options.undisturbed)
    simulator.tells_switches = options.switches
    try:
        if options.seed is not None:
            setup = seeds.setup_of(options.seed)
            result = simulator.run(options.seed, setup, seeds.faults_of(options.seed, setup))
            if options.shrink and not result.is_good:
                result = simulator.shrunk(result)
            print(result.told())
            print(f"digest {result.outcome.digest:08x}")
            return 0 if result.is_good else 1
        if options.crashes is not None:
            bad = crashes.run_cases(simulator, options.crashes, options.processes)
            return 1 if bad else 0
        return _run_range(simulator, options)
    finally:
        simulator.close()


def _run_range(simulator: seeds.Simulator, options: argparse.Namespace) -> int:
    start = world._real.monotonic()
    themed = (
        seed
        for seed in itertools.count(options.first)
        if options.theme in (None, seeds.theme_of(seed))
    )
    wanted = itertools.islice(themed, options.seeds)

    def is_over() -> bool:
        return options.seconds is not None and world._real.monotonic() - start > options.seconds

    bad, num, virtual_s, processor_s, num_faults = [], 0, 0.0, 0.0, 0
    for result in simulator.run_seeds(wanted, options.processes, is_over):
        num += 1
        virtual_s += result.outcome.virtual_s
        processor_s += result.processor_s
        num_faults += len(result.faults)
        if num % 100 == 0:
            print(f"{num} seeds, {len(bad)} bad", flush=True)
        if not result.is_good:
            bad.append(result)
            print(f"seed {result.seed}: {result.outcome.errors[0][:300]}", flush=True)
            if options.until_bad:
                return 1
    hours = virtual_s / processor_s if processor_s else 0.0
    print(
        f"{num} seeds from {options.first}, {len(bad)} bad, {num_faults} faults, {virtual_s:.0f} s of "
        f"clusters in {processor_s:.0f} s of processors ({hours:.0f} cluster-hours an hour), "
        f"{world._real.monotonic() - start:.0f} s"
    )
    if bad:
        print(simulator.shrunk(bad[0]).told())
    return 1 if bad else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # not through the system's own ends, which know of other threads
