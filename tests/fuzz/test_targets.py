"""All fuzzers for a moment; with CTR_FUZZ_SECONDS=60 for longer, from CTR_FUZZ_SEED on."""

import os

import pytest

from tests.fuzz.driver import TARGETS, fuzz

SECONDS = float(os.environ.get("CTR_FUZZ_SECONDS", "0.5"))
SEED = int(os.environ.get("CTR_FUZZ_SEED", "1"))


@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_refused_or_answered_rightly(name: str) -> None:
    report = fuzz(name, seed=SEED, seconds=SECONDS)

    assert not report.finding, report.finding
    assert report.cases
