"""Initial values: those of the formula, and of the right distribution."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.spec import InitializerSpec
from ctr_ps.ps_server.table.rows.initializers import (
    KINDS,
    build_initializer,
    initialize_elements,
    initialize_row,
)
from tests.reference.initializers import initial_row

COUNT = 100_000


@given(
    kind=st.sampled_from(KINDS),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 50.0]),
    seed=st.sampled_from([0, 1, 2**64 - 1]),
    key=st.integers(0, 2**64 - 1),
    dim=st.integers(1, 9),
)
def test_rows_equal_the_big_integer_oracle(
    kind: str, scale: float, seed: int, key: int, dim: int
) -> None:
    spec = InitializerSpec(kind=kind, scale=scale)
    row = np.full(dim, np.nan, np.float32)

    initialize_row(build_initializer(spec, seed, "t"), np.uint64(key), row)

    expected = initial_row(spec, seed, "t", key, dim)
    np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-7 * scale)


@given(kind=st.sampled_from(KINDS), start=st.integers(0, 2**40), length=st.integers(0, 9))
def test_elements_equal_the_big_integer_oracle(kind: str, start: int, length: int) -> None:
    """Each from its position in the block, so that its pieces do not matter."""
    spec = InitializerSpec(kind=kind, scale=1.0)
    elements = np.full(length, np.nan, np.float32)

    initialize_elements(build_initializer(spec, 3, "d"), start, elements)

    expected = [initial_row(spec, 3, "d", start + i, 1)[0] for i in range(length)]
    np.testing.assert_allclose(elements, expected, rtol=1e-6, atol=1e-7)


def sample(kind: str, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    values = np.empty(COUNT, np.float32)
    spec = InitializerSpec(kind=kind, scale=scale)
    initialize_elements(build_initializer(spec, seed, "d"), 0, values)
    return values.astype(np.float64)


def test_uniform_values_fill_their_interval_evenly() -> None:
    values = sample("uniform", scale=0.25)

    counts, _ = np.histogram(values, bins=20, range=(-0.25, 0.25))
    assert counts.sum() == COUNT
    assert counts.min() > 0.95 * COUNT / 20
    assert counts.max() < 1.05 * COUNT / 20


def test_normal_values_have_the_moments_of_the_distribution() -> None:
    values = sample("normal", scale=2.0) / 2.0

    moments = [np.mean(values**power) for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.1)
    assert np.mean(np.abs(values) < 1.959964) == pytest.approx(0.95, abs=0.005)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_neighbours_and_of_other_seeds_are_unrelated(kind: str) -> None:
    """Neighbouring keys, neighbouring columns, neighbouring seeds."""
    values = sample(kind)
    other_seed = sample(kind, seed=1)
    rows = np.empty((COUNT // 2, 2), np.float32)
    initializer = build_initializer(InitializerSpec(kind=kind, scale=1.0), 0, "t")
    for key in range(2000):
        initialize_row(initializer, np.uint64(key), rows[key])

    pairs = [(values[:-1], values[1:]), (values, other_seed), (rows[:2000, 0], rows[:2000, 1])]
    limits = [0.02, 0.02, 0.1]
    for (first, second), limit in zip(pairs, limits, strict=True):
        assert abs(np.corrcoef(first, second)[0, 1]) < limit
