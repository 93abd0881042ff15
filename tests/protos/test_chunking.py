"""Cutting a push into parts, and joining it again."""

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk, join_push, split_columns, split_push
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad


def rows(count, dim, examples=3, first_key=0, counts=False):
    keys = np.arange(first_key, first_key + count, dtype=np.uint64)
    values = np.arange(count * dim, dtype=np.float32).reshape(count, dim)
    numbers = np.arange(count * 2, dtype=np.uint32).reshape(count, 2)
    return SparseGrad(keys, values, examples, numbers if counts else None)


def stretch(count, examples=3):
    return DenseGrad(np.arange(count, dtype=np.float32), examples)


def size_of(part):
    return sum(
        grad.keys.nbytes + grad.values.nbytes + (0 if grad.counts is None else grad.counts.nbytes)
        for _, grad in part.sparse
    ) + sum(grad.values.nbytes for _, _, grad in part.dense)


def assert_same(expected, actual):
    assert list(expected.sparse) == list(actual.sparse)
    assert list(expected.dense) == list(actual.dense)
    for table, grad in expected.sparse.items():
        np.testing.assert_array_equal(grad.keys, actual.sparse[table].keys)
        np.testing.assert_array_equal(grad.values, actual.sparse[table].values)
        np.testing.assert_array_equal(grad.counts, actual.sparse[table].counts)
        assert grad.examples == actual.sparse[table].examples
    for block, dense in expected.dense.items():
        np.testing.assert_array_equal(dense.values, actual.dense[block].values)
        assert dense.examples == actual.dense[block].examples


GRADIENTS = Gradients(
    sparse={
        "wide": rows(40, 1),
        "none": rows(0, 4),
        "deep": rows(17, 10),
        "counted": rows(21, 7, counts=True),
    },
    dense={"tower": stretch(100), "nothing": stretch(0), "bias": stretch(3, examples=9)},
)


@pytest.mark.parametrize("limit", [1, 48, 100, 333, 1000, 10_000])
def test_joining_undoes_cutting(limit):
    assert_same(GRADIENTS, join_push(split_push(GRADIENTS, limit)))


@pytest.mark.parametrize("limit", [48, 100, 333, 1000])
def test_no_part_exceeds_the_limit(limit):
    parts = split_push(GRADIENTS, limit)

    assert max(map(size_of, parts)) <= limit
    assert [part.chunk for part in parts] == list(range(len(parts)))
    assert {part.num_chunks for part in parts} == {len(parts)}


def test_parts_are_filled():
    parts = split_push(GRADIENTS, 333)

    assert min(map(size_of, parts[:-1])) > 333 - 48


def test_push_that_fits_is_one_part_and_not_copied():
    (part,) = split_push(GRADIENTS, 10_000)

    assert part.num_chunks == 1
    joined = join_push([part])
    assert np.shares_memory(joined.sparse["deep"].values, GRADIENTS.sparse["deep"].values)
    assert np.shares_memory(joined.dense["tower"].values, GRADIENTS.dense["tower"].values)


def test_push_of_nothing_is_one_empty_part():
    assert split_push(Gradients(), 100) == [PushChunk(sparse=[], dense=[])]


def test_element_larger_than_the_limit_is_alone_in_its_group():
    assert split_columns([(1, 10), (2, 500), (1, 10)], 100) == [
        [(0, slice(0, 1))],
        [(1, slice(0, 1))],
        [(1, slice(1, 2))],
        [(2, slice(0, 1))],
    ]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [PushChunk([("t", rows(1, 2))], []), PushChunk([("t", rows(1, 3))], [])],
            "'t' differ in dim",
        ),
        (
            [PushChunk([("t", rows(1, 2, 4))], []), PushChunk([("t", rows(1, 2, 5))], [])],
            r"differ in examples: \[4, 5\]",
        ),
        (
            [PushChunk([("t", rows(1, 2))], []), PushChunk([("t", rows(1, 2, counts=True))], [])],
            r"differ in having counts: \[0, 1\]",
        ),
        (
            [PushChunk([], [("b", 0, stretch(2, 4))]), PushChunk([], [("b", 2, stretch(2, 5))])],
            "'b' differ in examples",
        ),
        ([PushChunk([], [("b", 1, stretch(2))])], "starts at element 1, expected 0"),
        (
            [PushChunk([], [("b", 0, stretch(2))]), PushChunk([], [("b", 1, stretch(2))])],
            "starts at element 1, expected 2",
        ),
    ],
    ids=["dim", "examples", "counts", "dense-examples", "gap", "overlap"],
)
def test_parts_that_do_not_fit_each_other_are_refused(parts, message):
    with pytest.raises(ProtocolError, match=message):
        join_push(parts)
