"""Seeds of the simulated cluster: a few always, many where tests are slow, and one twice."""

import os
import subprocess
import sys
import time

import pytest

from tests.simulation.past import ROOT, PastFault, all_names, find

pytestmark = pytest.mark.timeout(600)

A_DAY = 86_400
OF_MOVES = {
    "moves/others-first": "sync add: driver.0 dies after: EndMove",
    "moves/prepare-unlogged": "sync add: server.2 dies after: PrepareMove",
    "moves/restarted": "counters drain: server.2 dies before: PrepareMove",
}
"""Faults of moves, and crashes that find them."""


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
    assert "4 seeds from 0, 0 bad" in simulate("--seeds", 4)


@pytest.mark.slow
def test_seeds_that_have_held_hold() -> None:
    assert "24 seeds from 0, 0 bad" in simulate("--seeds", 24)


@pytest.mark.slow
def test_as_many_seeds_as_fit_into_a_minute_hold_others_each_day() -> None:
    first = int(time.time()) // A_DAY * 100_000
    simulate("--first", first, "--seeds", 100_000, "--seconds", 60)


@pytest.mark.slow
def test_a_seed_is_one_run_bit_by_bit_whatever_the_hash_seed() -> None:
    for seed in (6, 11, 12):  # one with several threads in a worker
        once, again = (
            simulate("--seed", seed, "--switches", hash_seed=each) for each in ("1", "2")
        )
        assert once.splitlines() == again.splitlines()


def test_faults_of_the_past_fit_the_sources() -> None:
    for name in (*all_names(), *OF_MOVES):
        fault = PastFault.read(name)
        compile(fault.put_into((ROOT / fault.file).read_text()), fault.file, "exec")


def test_some_crashes_in_moves_leave_one_owner_with_all_updates() -> None:
    assert "\n0 bad" in simulate("--crashes", "sync add: server.0 dies,EndMove")


@pytest.mark.slow
def test_crashes_at_each_step_of_moves_leave_one_owner_with_all_updates() -> None:
    """Of a job of four each day, as all take seven minutes of a processor."""
    jobs = ["sync add", "sync drain", "counters add", "counters drain"]
    assert "\n0 bad" in simulate("--crashes", jobs[int(time.time()) // A_DAY % len(jobs)])


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "crashes"), OF_MOVES.items())
def test_faults_of_moves_are_found(fault: str, crashes: str) -> None:
    with pytest.raises(AssertionError, match=r"[1-9] bad"):
        simulate(f"--fault={fault}", "--crashes", crashes)


@pytest.mark.slow
def test_a_push_that_counts_twice_is_found() -> None:
    seed, _, wrong = find("push-twice", num_seeds=60)
    assert seed is not None
    assert "counter of pair" in wrong
