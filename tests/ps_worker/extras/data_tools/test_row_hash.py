"""Hashes of rows: fixed for ever, spread evenly."""

import numpy as np

from ctr_ps.ps_worker.data.negative_sampling import row_hash, write_row_hashes


def test_hashes_are_pinned() -> None:
    """Another value means that a set of rows is no longer the one that a model was trained on."""
    assert [int(row_hash(seed, row)) for seed, row in ((0, 0), (1, 0), (1, 1), (7, 10**12))] == [
        0x48218226FF3CD4BF,
        0xDCE423FC82C0D5B8,
        0x5C52BD4054E958C9,
        0xCCB4A968859621DB,
    ]


def test_block_of_hashes_is_that_of_its_rows() -> None:
    hashes = np.empty(5, np.uint64)
    write_row_hashes(3, 100, hashes)

    assert hashes.tolist() == [row_hash(3, row) for row in range(100, 105)]


def test_hashes_are_spread_evenly_and_independent_of_each_other() -> None:
    hashes = np.empty((2, 100_000), np.uint64)
    for seed in range(2):
        write_row_hashes(seed, 0, hashes[seed])
    shares = hashes / 2.0**64

    counts = np.histogram(shares, bins=100, range=(0, 1))[0]
    assert abs(counts - 2000).max() < 5 * np.sqrt(2000)
    assert abs(np.corrcoef(shares[0], shares[1])[0, 1]) < 0.02
    assert abs(np.corrcoef(shares[0, 1:], shares[0, :-1])[0, 1]) < 0.02
