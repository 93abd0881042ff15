"""Mutated checkpoints: more of them with FUZZ_COUNT=10000, others with FUZZ_SEED."""

import json
import os
import subprocess
import sys

LIMIT_S = 600


def test_mutated_checkpoints_are_refused_or_read_as_they_were_saved() -> None:
    """In a process of its own, which a read beside an array would end."""
    seed, count = (
        os.environ.get(f"FUZZ_{name}", default)
        for name, default in (("SEED", "1"), ("COUNT", "40"))
    )
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.checkpoint_mutations",
        "--seed",
        seed,
        "--count",
        count,
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    assert sum(counts.values()) == int(count)
    assert all(counts.values())
