"""Seeds of the simulated cluster: a few always, many where tests are slow, and one twice."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
A_DAY = 86_400


def simulate(*options: object, hash_seed: str = "0", limit_s: float = 600.0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *map(str, options)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    return done.stdout


def test_a_few_seeds_hold() -> None:
    assert "6 seeds from 0, 0 bad" in simulate("--seeds", 6)


@pytest.mark.slow
def test_as_many_seeds_as_fit_into_a_minute_hold_others_each_day() -> None:
    first = int(time.time()) // A_DAY * 100_000
    simulate("--first", first, "--seeds", 100_000, "--seconds", 60)


@pytest.mark.slow
def test_a_seed_is_one_run_bit_by_bit() -> None:
    for seed in (11, 12):
        once, again = (simulate("--seed", seed, hash_seed=each) for each in ("1", "2"))
        assert once.splitlines() == again.splitlines()
