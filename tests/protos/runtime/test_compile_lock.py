"""One process at a time compiles."""

import pytest

from protos.errors import WaitTimeoutError
from protos.runtime.compile_lock import compile_lock


def test_lock_is_free_again_after_the_block(tmp_path):
    path = tmp_path / "lock"

    for _ in range(2):
        with compile_lock(path):
            assert path.exists()


def test_lock_that_another_holds_is_not_waited_for_without_limit(tmp_path):
    path = tmp_path / "lock"

    with (
        compile_lock(path),
        pytest.raises(WaitTimeoutError, match=r"has compiled kernels for 0 s .*lock"),
        compile_lock(path, limit_s=0.0),
    ):
        pass
