"""A module cut in two: the same gradients as in one, for one batch and for several joined."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402

from ctr_ps.ctr_model.parameters import ModelInputError  # noqa: E402
from ctr_ps.ctr_model.torch import Batch, Front, SlotEmbedding, TorchModel  # noqa: E402
from ctr_ps.ctr_model.torch.embedding import fronts_of  # noqa: E402
from ctr_ps.ctr_model.torch.halves import Activations, BackHalf, BackResult, FrontHalf  # noqa: E402
from tests.support.model_cases import SCHEMA, SMALL, ModelCase  # noqa: E402
from tests.support.torch_models import TWINS, Attention, SlotProducts  # noqa: E402


class Interactions(Front):
    """A cut of the user's own: of an embedding only what a factorization machine needs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=3, init_range=0.1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.embedding(batch)
        return found.sum(1), 0.5 * (found.sum(1).square() - found.square().sum(1)).sum(1)


class OwnCut(nn.Module):
    """Its loss is float32[B], and a layer is frozen."""

    def __init__(self, schema: Any) -> None:
        super().__init__()
        self.interactions = Interactions()
        self.layer = nn.Linear(3, 1)
        self.frozen = nn.Linear(3, 1).requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        sums, pairs = self.interactions(batch)
        return (self.layer(sums) + self.frozen(sums)).squeeze(1) + pairs

    def loss(self, batch: Batch, output: Tensor) -> Tensor:
        return (output - batch.labels).square()

    def probabilities(self, batch: Batch, output: Tensor) -> Tensor:
        return output.sigmoid()


MODULES: dict[str, Any] = {
    **{name: (TWINS[name], SMALL[name].options) for name in TWINS},
    "attention": (Attention, {}),
    "own cut": (OwnCut, {}),
}


def case_of(name: str, seed: int, batch_size: int) -> ModelCase:
    module_class, options = MODULES[name]
    return ModelCase(TorchModel(SCHEMA, module_class, options, seed=1), SCHEMA, seed, batch_size)


def in_halves(cases: list[ModelCase], model: TorchModel) -> tuple[Any, list[Any], list[BackResult]]:
    """Returns the dense gradient of all, and the gradients of rows and the result of each."""
    front, back = FrontHalf(model), BackHalf(model)
    passes = [front.forward(case.batch, case.lookups) for case in cases]
    dense = np.full(model.num_params, np.nan, np.float32)
    results = back.gradient(cases[0].params, [each.activations for each in passes], dense)
    sparse = []
    for each, result, case in zip(passes, results, cases, strict=True):
        sparse.append({name: np.full_like(of.rows, np.nan) for name, of in case.lookups.items()})
        each.backward(result.grads, sparse[-1])
    return dense, sparse, results


@pytest.mark.parametrize("name", MODULES)
def test_halves_compute_what_the_whole_does_of_each_batch_and_of_several_joined(name: str) -> None:
    for seed in range(8):
        cases = [case_of(name, 3 * seed + i, batch_size=2 + (seed + 3 * i) % 7) for i in range(3)]
        for case in cases:
            case.params = cases[0].params
        model = cases[0].model
        expected = [case.gradient() for case in cases]

        for group in ([0], [0, 1, 2]):
            dense, sparse, results = in_halves([cases[i] for i in group], model)

            total = np.sum([expected[i].dense for i in group], axis=0)
            np.testing.assert_allclose(dense, total, rtol=2e-5, atol=2e-6)
            for i, found, result in zip(group, sparse, results, strict=True):
                assert result.probabilities == pytest.approx(cases[i].predict(), rel=1e-5)
                assert result.loss == pytest.approx(expected[i].loss, rel=1e-5) or name == "ctr_dnn"
                assert found.keys() == expected[i].sparse.keys()
                for table, grad in expected[i].sparse.items():
                    np.testing.assert_allclose(found[table], grad, rtol=2e-5, atol=2e-6)
            # A mean over joined batches is shared out by examples: its sum is right.
            assert sum(each.loss for each in results) == pytest.approx(
                sum(expected[i].loss for i in group), rel=1e-5
            )


def test_halves_compute_in_bfloat16_what_the_whole_does() -> None:
    float32 = TorchModel(SCHEMA, SlotProducts, seed=1)
    exact = ModelCase(float32, SCHEMA, 0, 6).gradient()
    case = ModelCase(float32.with_autocast(torch.bfloat16), SCHEMA, 0, 6)
    expected = case.gradient()

    dense, (sparse,), (result,) = in_halves([case], case.model)

    sent = FrontHalf(case.model).forward(case.batch, case.lookups).activations.outputs["products"]
    assert [each.dtype for each in sent] == [np.float32]
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert np.abs(dense / exact.dense - 1).max() > 1e-3
    np.testing.assert_allclose(dense, expected.dense, rtol=1e-5)
    for table, grad in expected.sparse.items():
        assert not np.allclose(grad, exact.sparse[table], rtol=1e-4, atol=0)
        np.testing.assert_allclose(sparse[table], grad, rtol=1e-5, atol=1e-7)


def test_of_an_own_cut_only_what_it_returns_crosses() -> None:
    case = case_of("own cut", 0, 5)

    outputs = FrontHalf(case.model).forward(case.batch, case.lookups).activations.outputs

    assert {name: [each.shape for each in of] for name, of in outputs.items()} == {
        "interactions": [(5, 3), (5,)]
    }


def test_a_front_with_dense_parameters_is_refused() -> None:
    class Scaled(Interactions):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    class Net(OwnCut):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.interactions = Scaled()

    model = TorchModel(SCHEMA, Net)  # as a whole it is a model
    with pytest.raises(ValueError, match=r"interactions is before the cut .* \['scale'\]"):
        FrontHalf(model)


def test_what_cannot_cross_is_refused() -> None:
    class Doubled(Interactions):
        def forward(self, batch: Batch) -> Any:
            return self.embedding(batch).double()

    class Net(OwnCut):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.interactions = Doubled()

    case = ModelCase(TorchModel(SCHEMA, Net), SCHEMA, 0, 5)
    with pytest.raises(ModelInputError, match=r"interactions.* returned float64\[5, 4, 3\]"):
        FrontHalf(case.model).forward(case.batch, case.lookups)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"outputs": {}},
            r"activations come from the layers , but OwnCut has the layers interactions before its cut",
        ),
        ({"labels": np.zeros(4, np.float32)}, r"labels \[4\] and dense inputs \[5, 3\]"),
        (
            {"outputs": {"interactions": [np.zeros((4, 3), np.float32)]}},
            r"interactions returned a tensor of shape \[4, 3\] for 5 examples, expected \[5, \.\.\.\]",
        ),
    ],
)
def test_activations_of_another_model_are_refused(change: Any, message: str) -> None:
    case = case_of("own cut", 0, 5)
    sent = FrontHalf(case.model).forward(case.batch, case.lookups).activations
    fields = {name: getattr(sent, name) for name in ("dense", "labels", "outputs")}
    dense = np.full(case.model.num_params, 7, np.float32)

    with pytest.raises(ModelInputError, match=message):
        BackHalf(case.model).gradient(case.params, [Activations(**{**fields, **change})], dense)

    assert (dense == 7).all()


def test_back_half_takes_its_module_to_another_device() -> None:
    """On each machine: one that is not a CPU, but computes nothing."""
    back = BackHalf(case_of("wide_deep", 0, 6).model, device="meta")

    assert {each.device.type for each in back._own.parameters} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", MODULES)
def test_back_half_computes_the_same_on_a_gpu(name: str) -> None:
    case = case_of(name, 0, 6)
    sent = FrontHalf(case.model).forward(case.batch, case.lookups).activations
    dense = np.empty((2, case.model.num_params), np.float32)

    results = [
        BackHalf(case.model, device=device).gradient(case.params, [sent], dense[i])[0]
        for i, device in enumerate(("cpu", "cuda"))
    ]

    np.testing.assert_allclose(dense[1], dense[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results[1].probabilities, results[0].probabilities, rtol=1e-4)


def test_fronts_whose_names_begin_alike_are_all_before_the_cut() -> None:
    module = nn.ModuleDict({name: SlotEmbedding(dim=2) for name in ("deep", "deeper")})

    assert list(fronts_of(module)) == ["deep", "deeper"]


def test_rows_that_the_loss_does_not_need_have_no_gradient() -> None:
    class Unused(OwnCut):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.unused = SlotEmbedding(dim=2)

    case = ModelCase(TorchModel(SCHEMA, Unused), SCHEMA, seed=1)

    _, (found,), _ = in_halves([case], case.model)

    assert not found["unused"].any()
    assert found["interactions_embedding"].any()
