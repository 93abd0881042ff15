"""What may be given to an all-reduce."""

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import MAX_MESSAGE_BYTES
from ctr_ps.protos.store import MAX_NUMBERS, require_numbers


@pytest.mark.parametrize("size", [0, 1, MAX_NUMBERS])
def test_vector_that_fits_a_message_is_taken(size: int) -> None:
    values = np.zeros(size)

    require_numbers("auc", values)

    assert values.nbytes < MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.zeros(3, np.float32), r"float32 of shape \(3,\)"),
        (np.zeros(3, np.int64), r"int64 of shape \(3,\)"),
        (np.zeros((2, 2)), r"float64 of shape \(2, 2\)"),
        (np.zeros(()), r"float64 of shape \(\)"),
        (np.zeros(MAX_NUMBERS + 1), rf"\({MAX_NUMBERS + 1},\), .* up to {MAX_NUMBERS}"),
    ],
    ids=["float32", "integers", "matrix", "scalar", "too-many"],
)
def test_anything_else_is_refused(values: np.ndarray, told: str) -> None:
    with pytest.raises(ProtocolError, match=rf"all_reduce 'auc' has .*{told}"):
        require_numbers("auc", values)
