"""Positions as texts."""

import pytest

from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.blocks import DataPosition


@pytest.mark.parametrize(
    "position", [DataPosition(), DataPosition(epoch=2, seed=2**62, split=3, offset=4, skip=5)]
)
def test_text_is_read_back(position: DataPosition) -> None:
    assert DataPosition.from_json(position.to_json()) == position


def test_position_of_an_old_checkpoint_is_read() -> None:
    """Positions once called the split a part."""
    old = DataPosition(epoch=2, split=3).to_json().replace('"split"', '"part"')

    assert DataPosition.from_json(old) == DataPosition(epoch=2, split=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected an object with epoch, seed, split, offset, skip"),
        ('{"epoch": 1}', "expected an object with epoch, seed"),
        (DataPosition().to_json().replace('"skip": 0', '"skip": -1'), "skip is -1, expected"),
        (
            DataPosition().to_json().replace('"split": 0', '"split": null'),
            "split is None, expected",
        ),
        (
            DataPosition().to_json().replace('"split": 0', '"split": true'),
            "split is True, expected",
        ),
        (DataPosition().to_json().replace("null", '"x"'), "offset is 'x', expected"),
    ],
)
def test_what_is_no_position_is_refused(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataPosition.from_json(text)
