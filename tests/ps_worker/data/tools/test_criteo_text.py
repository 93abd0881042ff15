"""Rows as text: exact bytes, and the round trip through the reader."""

import numpy as np

from ps_worker.data.tools.generate import criteo_text


def test_row_is_label_numbers_and_values_with_tabs_between() -> None:
    clicks = np.array([True, False])
    numbers = np.array([[0.0, np.nan, 10.0], [np.nan, 7.0, 2.0**62]])
    values = np.array([[0x68FD1E64, -1], [-1, 0x0A]])

    text = criteo_text(clicks, numbers, values)

    assert text == b"1\t0\t\t10\t68fd1e64\t\n0\t\t7\t4611686018427387904\t\t0000000a\n"


def test_no_rows_are_no_text() -> None:
    assert criteo_text(np.empty(0, bool), np.empty((0, 3)), np.empty((0, 2), np.int64)) == b""


def test_widest_row_fits() -> None:
    clicks, numbers = np.ones(2, bool), np.full((2, 2), 9e18)
    values = np.full((2, 2), 2**32 - 1)

    text = criteo_text(clicks, numbers, values)

    assert text == b"1\t9000000000000000000\t9000000000000000000\tffffffff\tffffffff\n" * 2
