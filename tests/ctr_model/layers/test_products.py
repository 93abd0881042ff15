import numpy as np
import pytest

from ctr_ps.ctr_model.layers.products import add_bias, add_bias_relu, outer, relu_backward, sum_rows

SHAPES = pytest.mark.parametrize("shape", [(1, 1), (3, 2), (7, 33), (4, 400)])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@SHAPES
def test_bias_is_added_to_every_row(shape: tuple[int, int]) -> None:
    out, bias = normal(1, *shape), normal(2, shape[1])
    expected = out + bias

    add_bias(bias, out)

    np.testing.assert_array_equal(out, expected)


@SHAPES
def test_activation_is_never_negative(shape: tuple[int, int]) -> None:
    out, bias = normal(1, *shape), normal(2, shape[1])
    expected = np.maximum(out + bias, 0)

    add_bias_relu(bias, out)

    np.testing.assert_array_equal(out, expected)


@SHAPES
def test_gradient_stops_where_the_activation_is_zero(shape: tuple[int, int]) -> None:
    activation, grad = np.maximum(normal(1, *shape), 0), normal(2, *shape)
    bias_grad = np.full(shape[1], np.nan, np.float32)
    expected = np.where(activation > 0, grad, 0)

    relu_backward(activation, grad, bias_grad)

    np.testing.assert_array_equal(grad, expected)
    np.testing.assert_allclose(bias_grad, expected.sum(axis=0, dtype=np.float64), atol=1e-5)


@SHAPES
def test_rows_are_summed(shape: tuple[int, int]) -> None:
    grad = normal(1, *shape)
    out = np.full(shape[1], np.nan, np.float32)

    sum_rows(grad, out)

    np.testing.assert_allclose(out, grad.sum(axis=0, dtype=np.float64), atol=1e-5)


@SHAPES
def test_outer_product_has_each_pair(shape: tuple[int, int]) -> None:
    column, row = normal(1, shape[0]), normal(2, shape[1])
    out = np.full(shape, np.nan, np.float32)

    outer(column, row, out)

    np.testing.assert_array_equal(out, column[:, None] * row)


def test_nan_is_not_hidden_by_the_activation() -> None:
    """A diverged model must be seen, so max(nan, 0) stays nan."""
    out = np.array([[np.nan, 1.0]], np.float32)

    add_bias_relu(np.zeros(2, np.float32), out)

    assert np.isnan(out[0, 0])
