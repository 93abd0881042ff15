"""DCN-v2 and its cross network against their oracles."""

from collections.abc import Callable

import numpy as np
import pytest

from ctr_ps.ctr_model.models.dcn_v2 import Cross, DcnV2
from ctr_ps.ctr_model.parameters import FlatLayout
from ctr_ps.ctr_model.registry import build_model
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import models as oracle
from tests.support.model_cases import (
    SCHEMA,
    ModelCase,
    assert_gradients_agree,
    assert_predictions_agree,
)

every_structure = pytest.mark.parametrize("structure", ["parallel", "stacked"])


@every_structure
@pytest.mark.parametrize("num_cross_layers", [1, 3])
@pytest.mark.parametrize("cross_rank", [None, 2])
def test_every_network_agrees_with_the_oracle(
    structure: str, num_cross_layers: int, cross_rank: int | None
) -> None:
    model = DcnV2(
        SCHEMA,
        dim=2,
        hidden=[5],
        structure=structure,
        num_cross_layers=num_cross_layers,
        cross_rank=cross_rank,
    )
    case = ModelCase(model, SCHEMA, seed=1)

    assert_predictions_agree(case, oracle.dcn_v2)
    assert_gradients_agree(case, oracle.dcn_v2)


@every_structure
def test_any_columns_will_do(structure: str) -> None:
    schema = Schema.numbered(0, 3)
    case = ModelCase(DcnV2(schema, dim=2, hidden=[5], structure=structure), schema, seed=1)

    assert_gradients_agree(case, oracle.dcn_v2)


def test_sizes_are_those_of_the_paper() -> None:
    perceptron = 273 * 400 + 400 + 2 * (400 * 400 + 400) + 400 + 1
    crosses = 2 * (273 * 273 + 273)

    assert DcnV2(criteo_schema()).num_params == crosses + perceptron
    assert DcnV2(criteo_schema(), structure="parallel").num_params == crosses + perceptron + 273


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("structure", "side by side", "structure is 'side by side': .*'stacked' or 'parallel'"),
        ("num_cross_layers", 0, "num_cross_layers is 0"),
        ("cross_rank", 0, "cross_rank is 0"),
    ],
)
def test_wrong_option_is_named(option: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("dcn_v2", SCHEMA, {option: value})


WIDTH, BATCH = 4, 3
NETWORKS = pytest.mark.parametrize(
    ("num_layers", "rank"), [(1, None), (2, None), (3, None), (1, 2), (3, 2), (2, 5)]
)


class Case:
    """A network with random tensors and inputs; its loss weights the outputs by `directions`."""

    def __init__(self, num_layers: int, rank: int | None) -> None:
        rng = np.random.default_rng(num_layers)
        self.rank = rank
        self.network = Cross(WIDTH, num_layers, rank=rank)
        self.layout = FlatLayout(self.network.segments)
        self.params = rng.normal(scale=0.5, size=self.layout.length).astype(np.float32)
        self.x0 = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        self.directions = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        self.buffers = self.network.buffers(BATCH + 1)
        self.outputs = [self.x0, *(each[:BATCH] for each in self.buffers.outputs)]

    def forward(self) -> np.ndarray:
        return self.network.forward(self.layout.views(self.params), self.outputs, self.buffers)

    def backward(self) -> tuple[np.ndarray, np.ndarray]:
        params_grad, grad = np.full_like(self.params, np.nan), self.directions.copy()
        self.network.backward(
            self.layout.views(self.params),
            self.outputs,
            self.buffers,
            grad,
            self.layout.views(params_grad),
        )
        return params_grad, grad

    def oracle_outputs(self, params: np.ndarray, x0: np.ndarray) -> np.ndarray:
        tensors = self.layout.views(params)
        if self.rank is None:
            weights, biases = tensors[::2], tensors[1::2]
        else:
            weights = [a @ b for a, b in zip(tensors[::3], tensors[1::3], strict=True)]
            biases = tensors[2::3]
        return np.array([oracle.cross(x, weights, biases) for x in x0])

    def oracle_loss(self, params: np.ndarray, x0: np.ndarray) -> float:
        return float((self.oracle_outputs(params, x0) * self.directions).sum())


def difference_quotients(function: Callable[[np.ndarray], float], at: np.ndarray) -> np.ndarray:
    grad, step = np.empty_like(at), 1e-5
    for i in range(at.size):
        upper, lower = at.copy(), at.copy()
        upper.flat[i] += step
        lower.flat[i] -= step
        grad.flat[i] = (function(upper) - function(lower)) / (2 * step)
    return grad


@NETWORKS
def test_outputs_agree_with_the_oracle(num_layers: int, rank: int | None) -> None:
    case = Case(num_layers, rank)

    out = case.forward()

    expected = case.oracle_outputs(case.params.astype(np.float64), case.x0.astype(np.float64))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@NETWORKS
def test_gradients_agree_with_difference_quotients(num_layers: int, rank: int | None) -> None:
    case = Case(num_layers, rank)
    params, x0 = case.params.astype(np.float64), case.x0.astype(np.float64)

    case.forward()
    params_grad, x0_grad = case.backward()

    expected = difference_quotients(lambda p: case.oracle_loss(p, x0), params)
    np.testing.assert_allclose(params_grad, expected, rtol=1e-3, atol=1e-4)
    expected = difference_quotients(lambda x: case.oracle_loss(params, x), x0)
    np.testing.assert_allclose(x0_grad, expected, rtol=1e-3, atol=1e-4)


def test_low_rank_has_fewer_parameters() -> None:
    full, low = Cross(273, 2), Cross(273, 2, rank=32)

    assert FlatLayout(full.segments).length == 2 * (273 * 273 + 273)
    assert FlatLayout(low.segments).length == 2 * (273 * 32 + 32 * 273 + 273)
    assert [segment.name for segment in low.segments[:3]] == [
        "cross1.weight_in",
        "cross1.weight_out",
        "cross1.bias",
    ]
    assert low.segments[1].init_std == pytest.approx(32**-0.5)
