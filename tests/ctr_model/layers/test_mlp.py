"""Dropout: gradients under a mask, what the mask depends on, and what has none."""

import numpy as np
import pytest

from ctr_ps.ctr_model.layers.mlp import Dropout, Mlp
from ctr_ps.ctr_model.models.model import number_batch
from ctr_ps.ctr_model.registry import with_dropout
from tests.support.model_cases import MY_MODEL, SMALL, ModelCase, small_case

DEEP = [name for name, small in SMALL.items() if "hidden" in small.options]
EPSILON = 1e-3


def dropped(case: ModelCase, rate: float = 0.4, seed: int = 1) -> ModelCase:
    case.model = with_dropout(case.model, rate, seed)
    return case


def gradient(case: ModelCase, number: int = 5):
    workspace = case.model.workspace(case.batch.size)
    number_batch(workspace, number)
    return case.gradient(workspace)


@pytest.mark.parametrize("name", DEEP)
def test_gradient_under_a_mask_is_that_of_finite_differences(name: str) -> None:
    case = dropped(small_case(name, seed=3, batch_size=6))
    found = gradient(case)

    def loss_at(array: np.ndarray, index: tuple[int, ...], change: float) -> float:
        kept = array[index]
        array[index] += np.float32(change)
        loss = gradient(case).loss
        array[index] = kept
        return loss

    def check(array: np.ndarray, grad: np.ndarray) -> None:
        places = np.random.default_rng(0).permutation(array.size)[:60]
        num_smooth = 0
        for place in places:
            index = np.unravel_index(place, array.shape)
            above = (loss_at(array, index, EPSILON) - found.loss) / EPSILON
            below = (found.loss - loss_at(array, index, -EPSILON)) / EPSILON
            if abs(above - below) < 0.02 + 0.02 * abs(above):  # else a relu switches there
                num_smooth += 1
                assert grad[index] == pytest.approx((above + below) / 2, rel=0.02, abs=0.02)
        assert num_smooth > 0.7 * places.size

    check(case.params, found.dense)
    for table, lookup in case.lookups.items():
        check(lookup.rows, found.sparse[table])


@pytest.mark.parametrize("name", DEEP)
def test_predictions_leave_nothing_out(name: str) -> None:
    plain = small_case(name, seed=3)
    expected = plain.predict().copy()
    case = dropped(small_case(name, seed=3))
    workspace = case.model.workspace(case.batch.size)
    number_batch(workspace, 7)
    case.gradient(workspace)

    np.testing.assert_array_equal(case.predict(workspace), expected)


def test_mask_is_that_of_the_batchs_number_whatever_came_before() -> None:
    case = dropped(small_case("ctr_dnn", seed=3))
    workspace = case.model.workspace(case.batch.size)
    fresh = {number: gradient(case, number).as_bytes() for number in (4, 5)}

    for number in (5, 4, 4, 5):
        number_batch(workspace, number)
        assert case.gradient(workspace).as_bytes() == fresh[number]

    other = dropped(small_case("ctr_dnn", seed=3), seed=2)
    assert len({*map(tuple, fresh.values()), tuple(gradient(other, 5).as_bytes())}) == 3


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_share_left_out_is_the_rate_and_the_mean_stays(rate: float) -> None:
    masks = Dropout(rate, seed=9)
    kept = []
    for number, layer in [(1, 0), (1, 1), (2, 0)]:
        values = np.ones((400, 500), np.float32)
        masks.begin(number)
        masks.forward(layer, values)
        assert np.mean(values == 0) == pytest.approx(rate, abs=0.005)
        assert values.mean() == pytest.approx(1.0, abs=0.03)
        assert set(np.unique(values)) == {0, np.float32(1 / (1 - rate))}
        kept.append(values != 0)
    for first, second in [(0, 1), (0, 2), (1, 2)]:
        both = np.mean(kept[first] & kept[second])
        assert both == pytest.approx((1 - rate) ** 2, abs=0.005), "masks are independent"


def test_masks_are_of_one_layer_and_the_same_in_every_thread() -> None:
    masks = Dropout(0.5, seed=9)
    first, second = masks.take_layers(2), masks.take_layers(3)
    drawn = []
    for each, layer in ((masks, 1), (masks.of_thread(), 1), (masks, 2)):
        values = np.ones((20, 30), np.float32)
        each.begin(4)
        each.forward(layer, values)
        drawn.append(values)

    assert (first, second, masks.num_layers) == (0, 2, 5)
    assert masks.of_thread().num_layers == 0
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()


def test_perceptrons_side_by_side_have_masks_of_their_own() -> None:
    mlp, masks = Mlp((1, 50, 1)), Dropout(0.5, seed=9)
    tensors = [np.ones(segment.shape, np.float32) for segment in mlp.segments]
    both = [mlp.buffers(1, dropout=masks) for _ in range(2)]
    masks.begin(4)

    for buffers in both:
        buffers.input(1)[:] = 1
        mlp.forward(tensors, buffers, 1)

    first, second = (buffers.outputs(1)[1] for buffers in both)
    assert (first != second).any()


@pytest.mark.parametrize("name", ["lr", "fm", MY_MODEL])
def test_model_without_hidden_layers_is_refused(name: str) -> None:
    model = small_case(name, seed=1).model

    with pytest.raises(
        ValueError, match=f"{type(model).__name__} has no hidden layer that applies drop"
    ):
        with_dropout(model, 0.5, 0)
    assert with_dropout(model, 0.0, 0) is model


def test_class_that_brings_its_own_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match="object does not derive from ClickModel"):
        with_dropout(object(), 0.5, 0)  # type: ignore[arg-type]


def test_module_of_torch_is_told_of_its_own_dropout() -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    from ctr_ps.ctr_model.schema import Schema
    from ctr_ps.ctr_model.torch import TorchModel
    from tests.support.torch_models import CtrDnn

    module = TorchModel(Schema.numbered(3, 4), CtrDnn, {"dim": 2, "hidden": [3]})

    with pytest.raises(ValueError, match=r"use torch.nn.Dropout between its layers"):
        with_dropout(module, 0.5, 0)


def test_bfloat16_has_the_same_masks() -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    from ctr_ps.ctr_model.registry import with_compute

    case = dropped(small_case("ctr_dnn", seed=3))
    expected = gradient(case)
    case.model = with_dropout(with_compute(small_case("ctr_dnn", seed=3).model, "bfloat16"), 0.4, 1)

    found = gradient(case)

    np.testing.assert_array_equal(found.dense == 0, expected.dense == 0)
    np.testing.assert_allclose(found.dense, expected.dense, rtol=0.05, atol=0.05)
