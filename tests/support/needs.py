"""Requirements of tests on the machine: without them a test is skipped, but under CI=true it fails."""

import os
import shutil
from typing import NoReturn

import pytest

IN_CI = os.environ.get("CI") == "true"


def is_missing(program: str) -> bool:
    return shutil.which(program) is None and not IN_CI


def lacking(what: str) -> NoReturn:
    if IN_CI:
        pytest.fail(what)
    pytest.skip(what)
