import pytest

from ctr_ps.ctr_model.models.ctr_dnn import CtrDnn
from ctr_ps.ctr_model.schema import criteo_schema


def test_tutorial_network_has_the_tutorials_sizes() -> None:
    model = CtrDnn(criteo_schema())

    shapes = {segment.name: segment.shape for segment in model.segments}
    stds = {segment.name: segment.init_std for segment in model.segments}

    assert shapes["fc1.weight"] == (273, 400)
    assert shapes["fc4.weight"] == (400, 2)
    assert model.num_params == 273 * 400 + 400 + 2 * (400 * 400 + 400) + 400 * 2 + 2
    assert stds["fc2.weight"] == pytest.approx(1 / 20)
    assert stds["fc2.bias"] == 0
