"""Kernels in CI: each checks its indices there, in all tests that run it."""

import numpy as np
import pytest

from ctr_ps.protos.runtime.jit import kernel
from tests.support.needs import IN_CI


@kernel
def read(values: np.ndarray, index: int) -> float:
    return values[index]


@pytest.mark.skipif(not IN_CI, reason="of CI, which sets NUMBA_BOUNDSCHECK")
def test_kernel_that_reads_beyond_its_array_fails() -> None:
    assert read(np.array([1.0, 2.0]), 1) == 2

    with pytest.raises(IndexError):
        read(np.array([1.0, 2.0]), 2)
