import numpy as np
import pytest

from ctr_ps.ctr_model.layers.pooling import pool_slots
from tests.support.slot_keys import lookup_of


@pytest.mark.parametrize("dim", [1, 10, 17, 64])
def test_every_width_is_pooled_whole(dim: int) -> None:
    rows = np.random.default_rng(1).random((5, dim), np.float32)
    pooled = np.empty((1, 2 * dim), np.float32)

    pool_slots(np.empty((1, 0), np.float32), lookup_of(rows, [[4], [2]], num_slots=2), pooled)

    np.testing.assert_array_equal(pooled[0], np.concatenate([rows[4], rows[2]]))
