"""What tests need of a machine. Where it is missing a test is skipped, but under CI=true it fails."""

import os
import shutil
from typing import NoReturn

import pytest

IN_CI = os.environ.get("CI") == "true"


def is_missing(program: str) -> bool:
    """Whether a test that runs a program is to be skipped."""
    return shutil.which(program) is None and not IN_CI


def lacking(what: str) -> NoReturn:
    """Skips the test for want of something; fails it under CI=true."""
    if IN_CI:
        pytest.fail(what)
    pytest.skip(what)
