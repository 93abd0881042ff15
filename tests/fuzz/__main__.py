"""Fuzzes a target: `python -m tests.fuzz TARGET --seconds 60 --seed 1`, `... TARGET --input FILE`.

A finding is printed with the command that repeats it. With `--keep FILE` the last input is kept: one of a
finding that was mended goes to `tests/fuzz/corpus/TARGET`, whose inputs come first in each run.
"""

import argparse
import logging
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.driver import TARGETS, child_main, fuzz, input_of, target_of


def main() -> int:
    """Returns the exit status: 1 with a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=2**62, help="most cases")
    parser.add_argument("--keep", type=Path, help="where the input of the first case is kept")
    parser.add_argument("--input", type=Path, help="a file that is the only input")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    name, seed, first = options.target, options.seed, options.first
    limits = {"seed": seed, "first": first, "count": options.count, "seconds": options.seconds}
    keep, given = (path and path.absolute() for path in (options.keep, options.input))
    if not (options.child or keep or given):
        report = fuzz(name, **limits)
        print({key: value for key, value in asdict(report).items() if key != "finding"})
        print(report.finding, end="")
        return bool(report.finding)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        target = target_of(name, Path(folder))
        if options.child:
            return child_main(target, name, options.child, **limits)
        data = given.read_bytes() if given else input_of(target, seed, first)
        if keep:
            keep.write_bytes(data)
        print(target.check(data)[:1000])
    return 0


if __name__ == "__main__":
    sys.exit(main())
