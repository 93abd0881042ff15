"""A module of PyTorch as a model: the same gradients as the built-in ones, and what it may not have."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import nn  # noqa: E402

from ctr_ps.ctr_model.models.model import initial_biases_of  # noqa: E402
from ctr_ps.ctr_model.parameters import EmbeddingTable, ModelInputError  # noqa: E402
from ctr_ps.ctr_model.registry import build_model, name_of  # noqa: E402
from ctr_ps.ctr_model.torch import Batch, SlotEmbedding, TorchModel  # noqa: E402
from tests.support.model_cases import (  # noqa: E402
    SCHEMA,
    SMALL,
    Array,
    ModelCase,
    assert_fake_negatives_are_weighted,
    assert_odds_are_predicted,
    small_model,
)
from tests.support.torch_models import TWINS, params_of_twin  # noqa: E402


def twin_case(name: str, seed: int, batch_size: int = 5) -> tuple[ModelCase, ModelCase]:
    """Returns a case of a built-in model, and the same of its twin."""
    original = ModelCase(small_model(name), SCHEMA, seed, batch_size)
    options = {**SMALL[name].options}
    twin = ModelCase(TorchModel(SCHEMA, TWINS[name], options), SCHEMA, seed, batch_size)
    twin.batch, twin.lookups = original.batch, original.lookups
    twin.params = params_of_twin(twin.model, original.model, original.params)
    return original, twin


def relative(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-12))


@pytest.mark.parametrize("name", TWINS)
def test_gradients_are_those_of_the_built_in_model(name: str) -> None:
    for seed in range(50):
        original, twin = twin_case(name, seed, batch_size=2 + seed % 9)

        expected, found = original.gradient(), twin.gradient()

        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        dense = params_of_twin(twin.model, original.model, expected.dense)
        assert relative(found.dense, dense) < 1e-5
        assert found.sparse.keys() == expected.sparse.keys()
        for table, grad in expected.sparse.items():
            assert relative(found.sparse[table], grad) < 1e-5, (seed, table)
        np.testing.assert_allclose(twin.predict(), original.predict(), rtol=1e-5)


@pytest.mark.parametrize("name", TWINS)
def test_tables_are_those_of_the_built_in_model(name: str) -> None:
    original, twin = twin_case(name, 0)

    found = {table.name: table for table in twin.model.tables}
    for table in original.model.tables:
        assert found[table.name] == replace(table, learning_rate=None)


class Net(nn.Module):
    """Whatever a test needs: a module, and a layer of it."""

    def __init__(self, schema: Any, *, layer: Any = None, pooling: Any = "sum") -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=2, init_range=0.1, pooling=pooling)
        self.layer = layer or nn.Linear(2, 1)

    def forward(self, batch: Batch) -> Any:
        return self.layer(self.embedding(batch).sum(1))


def test_initial_values_are_those_of_the_module_and_the_seed() -> None:
    class OfOnes(nn.Module):
        def __init__(self, schema: Any) -> None:
            super().__init__()
            self.embedding = SlotEmbedding(dim=1)
            self.norm = nn.LayerNorm(3)
            self.scale = nn.Parameter(torch.full((2,), 7.0))

        def forward(self, batch: Batch) -> Any:
            return self.embedding(batch).sum((1, 2))

    ones = TorchModel(SCHEMA, OfOnes)
    assert [segment.name for segment in ones.segments] == ["scale", "norm.weight", "norm.bias"]
    assert ones.initial_values.tolist() == [7, 7, 1, 1, 1, 0, 0, 0]
    first, again, other = (TorchModel(SCHEMA, Net, seed=seed) for seed in (1, 1, 2))
    assert (first.initial_values == again.initial_values).all()
    assert (first.initial_values != other.initial_values).any()


def test_building_a_model_leaves_the_random_numbers_of_the_script_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    TorchModel(SCHEMA, Net, seed=1).workspace(4)

    assert (torch.rand(3) == expected).all()


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_pooling_is_that_of_embedding_bag(pooling: str) -> None:
    case = ModelCase(TorchModel(SCHEMA, Net, {"pooling": pooling}), SCHEMA, seed=3)
    lookup = case.lookups["embedding"]
    seen: list[Any] = []

    class Watching(Net):
        def forward(self, batch: Batch) -> Any:
            seen.append(self.embedding(batch))
            return super().forward(batch)

    case.model = TorchModel(SCHEMA, Watching, {"pooling": pooling})
    found = case.gradient()

    rows = torch.from_numpy(lookup.rows.copy()).requires_grad_()
    bags = nn.functional.embedding_bag(
        torch.from_numpy(lookup.inverse).long(),
        rows,
        torch.from_numpy(lookup.offsets[:-1]).long(),
        mode=pooling,
    )
    expected = bags.view(case.batch.size, 4, 2)
    torch.testing.assert_close(seen[0], expected)
    layer = torch.from_numpy(case.params[:2])
    logits = expected.sum(1) @ layer + float(case.params[2])
    labels = torch.from_numpy(case.batch.labels)
    nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum").backward()
    torch.testing.assert_close(torch.from_numpy(found.sparse["embedding"]), rows.grad)


def test_logit_offset_is_of_the_loss_alone() -> None:
    class Shifted(Net):
        def forward(self, batch: Batch) -> Any:
            return super().forward(batch) + 1.5

    case = ModelCase(TorchModel(SCHEMA, Net), SCHEMA, seed=3)
    predicted = case.predict()
    case.model = TorchModel(SCHEMA, Shifted)
    expected = case.gradient()

    case.model = TorchModel(SCHEMA, Net).with_logit_offset(1.5)

    assert case.gradient().as_bytes() == expected.as_bytes()
    assert case.predict().tobytes() == predicted.tobytes()


def test_probabilities_of_a_step_with_an_offset_are_those_of_its_loss() -> None:
    """The module's own, without the offset, are of all rows: those that it predicts."""
    model = TorchModel(SCHEMA, OwnProbabilities).with_logit_offset(1.5)
    case = ModelCase(model, SCHEMA, seed=3)
    own, out = case.model.workspace(case.batch.size), case.outputs()

    step = case.model.gradient(case.params, case.batch, case.lookups, own, out.dense, out.sparse)

    predicted = case.predict().astype(np.float64)
    odds = predicted / (1 - predicted) * math.exp(1.5)
    np.testing.assert_allclose(step.probabilities, odds / (1 + odds), rtol=1e-5)


def of_net(
    dense: Array, slots: Mapping[str, Sequence[Array]], tensors: Mapping[str, Array]
) -> float:
    pooled = sum(each.sum(0) for each in slots["embedding"])
    logit = tensors["layer.weight"][0] @ pooled + tensors["layer.bias"][0]
    return 1 / (1 + float(np.exp(-logit)))


class OwnProbabilities(Net):
    def probabilities(self, batch: Batch, output: Any) -> Any:
        return output.reshape(-1).sigmoid()


@pytest.mark.parametrize("offset", [0.0, 1.5])
@pytest.mark.parametrize("module", [Net, OwnProbabilities])
def test_fake_negatives_are_weighted_by_own_predictions(module: Any, offset: float) -> None:
    case = ModelCase(TorchModel(SCHEMA, module), SCHEMA, seed=3)

    assert_fake_negatives_are_weighted(case, of_net, offset)


def test_calibration_of_fake_negatives_predicts_the_odds() -> None:
    assert_odds_are_predicted(ModelCase(TorchModel(SCHEMA, Net), SCHEMA, seed=3, batch_size=20))
    with pytest.raises(ValueError, match=r"OwnProbabilities has its own probabilities.* set 'fnw'"):
        TorchModel(SCHEMA, OwnProbabilities).with_delay("fnc")


def test_weights_multiply_losses_of_any_kind() -> None:
    """The log loss, and a loss of each example; a mean of them cannot be weighted."""

    class OwnLoss(Net):
        def loss(self, batch: Batch, output: Any) -> Any:
            losses = nn.functional.binary_cross_entropy_with_logits(
                output.reshape(-1), batch.labels, reduction="none"
            )
            return losses.mean() if is_mean else losses

        def probabilities(self, batch: Batch, output: Any) -> Any:
            return output.reshape(-1).sigmoid()

    is_mean = False
    weights = np.float32([0, 3, 1, 0.5, 2])
    case = ModelCase(TorchModel(SCHEMA, Net), SCHEMA, seed=3)
    case.batch = replace(case.batch, weights=weights)
    expected = case.gradient()
    case.model = TorchModel(SCHEMA, OwnLoss)
    found = case.gradient()

    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    np.testing.assert_allclose(found.dense, expected.dense, rtol=1e-4, atol=1e-6)
    is_mean = True
    with pytest.raises(ModelInputError, match="the examples have weights: return float32"):
        case.gradient()


def test_rows_of_a_slot_may_be_left_apart() -> None:
    class Apart(nn.Module):
        def __init__(self, schema: Any) -> None:
            super().__init__()
            self.history = SlotEmbedding(["C2"], dim=2, pooling="none", table="items")
            self.item = SlotEmbedding(["C4"], dim=2, table="items")

        def forward(self, batch: Batch) -> Any:
            found.append((self.history(batch), self.item(batch)))
            return self.item(batch).sum((1, 2))

    found: list[Any] = []
    model = TorchModel(SCHEMA, Apart)
    case = ModelCase(model, SCHEMA, seed=1)
    case.predict()

    ((rows, is_there), item), lookup = found[0], case.lookups["items"]
    assert model.tables == (EmbeddingTable(name="items", dim=2, init_range=0.01, slots=(1, 3)),)
    for b in range(case.batch.size):
        first, second, end = lookup.offsets[2 * b : 2 * b + 3]
        own = lookup.rows[lookup.inverse[first:second]]
        assert is_there[b, 0].sum() == second - first
        np.testing.assert_array_equal(rows[b, 0, : second - first], own)
        assert not rows[b, 0, second - first :].any()
        pooled = lookup.rows[lookup.inverse[second:end]].sum(0)
        np.testing.assert_allclose(item[b, 0], pooled, rtol=1e-6)


class Rows(nn.Module):
    """Without dense parameters."""

    def __init__(self, schema: Any, *, pooling: Any) -> None:
        super().__init__()
        self.embedding = SlotEmbedding(dim=2, pooling=pooling)

    def forward(self, batch: Batch) -> Any:
        found = self.embedding(batch)
        found = found[0].sum(2) if self.embedding.pooling == "none" else found
        return found.sum((1, 2))


@pytest.mark.parametrize("module", [Net, Rows])
def test_batch_without_any_key_has_zeros(module: Any) -> None:
    for pooling in ("sum", "mean", "max", "none"):
        if pooling == "none" and module is Net:
            continue
        case = ModelCase(TorchModel(SCHEMA, module, {"pooling": pooling}), SCHEMA, seed=0)
        offsets = np.zeros_like(case.lookups["embedding"].offsets)
        case.change_lookup(
            "embedding",
            rows=np.empty((0, 2), np.float32),
            inverse=np.empty(0, np.int32),
            offsets=offsets,
        )

        found = case.gradient()

        assert found.sparse["embedding"].shape == (0, 2)
        assert np.isfinite(found.dense).all()


def test_a_module_names_the_biases_of_its_logits() -> None:
    class Named(Net):
        logit_biases = ("layer.bias",)

    class Unknown(Net):
        logit_biases = ("layer.bais",)

    model = TorchModel(SCHEMA, Named)

    assert initial_biases_of(model, [0.2]) == {"layer.bias": (math.log(0.25),)}
    assert initial_biases_of(TorchModel(SCHEMA, Net), [0.2]) == {}
    with pytest.raises(
        ValueError, match=r"logit_biases has 'layer.bais', .* parameters: layer.weight"
    ):
        TorchModel(SCHEMA, Unknown)


def test_what_is_behind_the_rows_of_a_slot_does_not_matter() -> None:
    """Not even if it is infinite, or its gradient not a number."""

    class Norms(nn.Module):
        def __init__(self, schema: Any) -> None:
            super().__init__()
            self.history = SlotEmbedding(["C2"], dim=2, pooling="none", table="items")
            self.others = SlotEmbedding(dim=2, table="items")

        def forward(self, batch: Batch) -> Any:
            rows, is_there = self.history(batch)
            longest.append(rows.shape[2])
            return rows.square().sum(-1).sqrt().masked_fill(~is_there, 0).sum((1, 2))

    longest: list[int] = []
    case = ModelCase(TorchModel(SCHEMA, Norms), SCHEMA, seed=1)
    lookup = case.lookups["items"]
    expected = case.predict()
    assert longest == [np.diff(lookup.offsets).reshape(-1, 4)[:, 1].max()], "of its own slot"

    assert np.isfinite(case.gradient().sparse["items"]).all()
    own = np.concatenate([keys_of(lookup, b, 1) for b in range(case.batch.size)])
    rows = lookup.rows.copy()
    rows[np.setdiff1d(np.arange(len(rows)), own)] = np.inf
    case.change_lookup("items", rows=rows)
    np.testing.assert_array_equal(case.predict(), expected)


def keys_of(lookup: Any, b: int, slot: int) -> Any:
    first, end = lookup.offsets[4 * b + slot : 4 * b + slot + 2]
    return lookup.inverse[first:end]


def test_loss_of_the_module_is_its_mean_or_one_of_each_example() -> None:
    class Mean(Net):
        def loss(self, batch: Batch, output: Any) -> Any:
            return (output.reshape(-1) - batch.labels).square().mean()

    class Each(Net):
        def loss(self, batch: Batch, output: Any) -> Any:
            return (output.reshape(-1) - batch.labels).square()

    class Column(Net):
        def loss(self, batch: Batch, output: Any) -> Any:
            labels = batch.labels.unsqueeze(1)
            return nn.functional.mse_loss(output.reshape(-1, 1), labels, reduction="none")

    cases = [ModelCase(TorchModel(SCHEMA, each), SCHEMA, seed=2) for each in (Mean, Each, Column)]
    first, *others = (case.gradient() for case in cases)

    for each in others:
        assert each.loss == pytest.approx(first.loss, rel=1e-6)
        np.testing.assert_allclose(each.dense, first.dense, rtol=1e-5)
    assert not cases[0].model.has_log_loss  # type: ignore[attr-defined]


def test_parameters_that_a_loss_does_not_need_have_no_gradient() -> None:
    class Unused(Net):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.unused = nn.Linear(2, 2)
            self.other = SlotEmbedding(dim=3)

    found = ModelCase(TorchModel(SCHEMA, Unused), SCHEMA, seed=2).gradient()

    assert found.dense[:3].any()
    assert not found.dense[3:].any()
    assert not found.sparse["other"].any()


def test_frozen_parameters_stay_as_they_are() -> None:
    class Frozen(Net):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.layer.weight.requires_grad_(False)

    found = ModelCase(TorchModel(SCHEMA, Frozen), SCHEMA, seed=2).gradient()

    assert found.dense[:2].tolist() == [0, 0]
    assert found.dense[2] != 0
    assert found.sparse["embedding"].any()


def test_dropout_is_for_training_alone() -> None:
    case = ModelCase(TorchModel(SCHEMA, Net, {"layer": None}), SCHEMA, seed=2)

    class Dropped(Net):
        def forward(self, batch: Batch) -> Any:
            return nn.functional.dropout(super().forward(batch), 1.0, training=self.training)

    dropped = ModelCase(TorchModel(SCHEMA, Dropped), SCHEMA, seed=2)

    workspace = dropped.model.workspace(dropped.batch.size)

    for _ in range(2):  # also after a prediction
        assert not dropped.gradient(workspace).dense.any()
        np.testing.assert_array_equal(dropped.predict(workspace), case.predict())


def counting() -> nn.Module:
    layer = nn.Linear(2, 1)
    layer.register_buffer("count", torch.zeros(1))
    return layer


def net_with(name: str, part: Any) -> Any:
    """A `Net` whose attribute `name` is what `part()` returns."""

    class Own(Net):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            setattr(self, name, part())

    return Own


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("layer", lambda: nn.BatchNorm1d(2), r"Own: layer normalizes over the batch, .*LayerNorm"),
        (
            "layer",
            lambda: nn.BatchNorm1d(2, track_running_stats=False),
            r"layer normalizes over the",
        ),
        ("layer", lambda: nn.Embedding(3, 2, max_norm=1.0), r"layer has max_norm"),
        ("layer", counting, r"Own has the buffers \['layer.count'\], which servers"),
        ("layer", lambda: nn.Linear(2, 1, device="meta"), r"layer.weight is torch.float32 on meta"),
        ("layer", lambda: 1 / 0, r"Own\(schema, ...\) failed: ZeroDivisionError: division by zero"),
        ("layer", lambda: nn.LazyLinear(1), r"layer.weight has no shape yet"),
        ("layer", lambda: nn.Linear(2, 1, dtype=torch.float64), r"layer.weight is torch.float64"),
        ("dense", lambda: SlotEmbedding(dim=2), "cannot be called 'dense'"),
        ("loss", nn.BCEWithLogitsLoss, r"loss is a layer, .*rename"),
        ("rows", lambda: SlotEmbedding(dim=2).requires_grad_(False), "cannot be frozen"),
    ],
)
def test_what_servers_cannot_keep_is_refused(name: str, part: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchModel(SCHEMA, net_with(name, part))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda batch: None, r"Wrong.forward returned a NoneType for B = 5 .*, expected logits"),
        (lambda batch: torch.ones(5, 2), r"returned float32\[5, 2\]"),
    ],
)
def test_other_output_without_a_loss_is_refused(returned: Any, message: str) -> None:
    class Wrong(Net):
        def forward(self, batch: Batch) -> Any:
            return returned(batch)

    with pytest.raises(ModelInputError, match=message):
        ModelCase(TorchModel(SCHEMA, Wrong), SCHEMA, seed=2).gradient()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim is 0"),
        ({"dim": 1, "init_range": -1.0}, "init_range is -1"),
        ({"dim": 1, "pooling": "sums"}, "pooling is 'sums'"),
    ],
)
def test_wrong_embedding_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlotEmbedding(**changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dim": 3}, "have dim 2 and 3"), ({"optimizer": {"name": "sgd"}}, "have optimizer")],
)
def test_embeddings_of_one_table_must_agree(options: dict[str, Any], message: str) -> None:
    class Both(nn.Module):
        def __init__(self, schema: Any) -> None:
            super().__init__()
            self.one = SlotEmbedding(dim=2, table="items")
            self.other = SlotEmbedding(**{"dim": 2, "table": "items", **options})

    with pytest.raises(ValueError, match=f"table 'items' {message}"):
        TorchModel(SCHEMA, Both)


def test_embedding_outside_the_module_is_said_to_be() -> None:
    class InAList(Net):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.embeddings = [SlotEmbedding(dim=2)]

        def forward(self, batch: Batch) -> Any:
            return self.embeddings[0](batch)

    with pytest.raises(ModelInputError, match=r"is not part of the module: .*nn.ModuleList"):
        ModelCase(TorchModel(SCHEMA, InAList), SCHEMA, seed=2).predict()


def test_embeddings_of_a_list_have_tables_of_their_own() -> None:
    def fields() -> nn.ModuleList:
        return nn.ModuleList([SlotEmbedding(["C1"], dim=2), SlotEmbedding(["C3"], dim=5)])

    tables = {table.name: table for table in TorchModel(SCHEMA, net_with("fields", fields)).tables}
    assert (tables["fields_0"].slots, tables["fields_0"].dim) == ((0,), 2)
    assert (tables["fields_1"].slots, tables["fields_1"].dim) == ((2,), 5)


@pytest.mark.parametrize("use", ["predict", "gradient"])
def test_probabilities_are_from_0_to_1(use: str) -> None:
    """Also those of a step: a mistake shows in the first one, not after training."""

    class Logits(Net):
        def probabilities(self, batch: Batch, output: Any) -> Any:
            return output.reshape(-1) + 7

    case = ModelCase(TorchModel(SCHEMA, Logits), SCHEMA, seed=2)
    with pytest.raises(ModelInputError, match=r"probabilities returned .*, expected 0 to 1"):
        getattr(case, use)()


@pytest.mark.parametrize("spoil", [torch.no_grad(), None], ids=["no_grad", "detached"])
def test_loss_without_a_gradient_is_refused(spoil: Any) -> None:
    class Silent(Net):
        def forward(self, batch: Batch) -> Any:
            if spoil is None:
                return super().forward(batch).detach()
            with spoil:
                return super().forward(batch)

    with pytest.raises(ModelInputError, match="nothing would be trained"):
        ModelCase(TorchModel(SCHEMA, Silent), SCHEMA, 0, 5).gradient()


def test_what_no_gradient_reaches_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Forgets(Net):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.forgotten = nn.Linear(2, 2, bias=False)
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.other = SlotEmbedding(dim=2)

    model = TorchModel(SCHEMA, Forgets)
    for seed in range(2):
        ModelCase(model, SCHEMA, seed, 5).gradient()

    (message,) = caplog.messages
    assert message.startswith(
        "no gradient reaches forgotten.weight, table other in the first batch"
    )


class Buffered(Net):
    def __init__(self, schema: Any) -> None:
        super().__init__(schema)
        self.register_buffer("mean", torch.zeros(2), persistent=False)


def adds_in_place(module: Any, batch: Batch) -> None:
    module.mean.add_(1)


def replaces(module: Any, batch: Batch) -> None:
    module.mean = module.mean + 1


def clamps(module: Any, batch: Batch) -> None:
    with torch.no_grad():
        module.layer.weight.clamp_(-0.01, 0.01)


def scales_the_batch(module: Any, batch: Batch) -> None:
    batch.dense.mul_(0.5)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (adds_in_place, "mean"),
        (replaces, "mean"),
        (clamps, "layer.weight"),
        (scales_the_batch, "batch.dense"),
    ],
)
def test_forward_that_changes_what_is_shared_or_lost_is_refused(change: Any, name: str) -> None:
    class Changes(Buffered):
        def forward(self, batch: Batch) -> Any:
            change(self, batch)
            return super().forward(batch)

    with pytest.raises(ModelInputError, match=f"Changes.forward changed {name}: "):
        ModelCase(TorchModel(SCHEMA, Changes), SCHEMA, 0, 5).gradient()


def test_buffer_may_be_a_cache() -> None:
    class Cached(Buffered):
        def forward(self, batch: Batch) -> Any:
            self.mean = torch.arange(5.0) if self.mean.numel() == 2 else self.mean.clone()
            return super().forward(batch)

    case = ModelCase(TorchModel(SCHEMA, Cached), SCHEMA, 0, 5)
    for _ in range(2):
        case.gradient()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schema": "criteo"}, "schema is 'criteo'"),
        ({"module_class": Net(SCHEMA)}, "module_class is a Net, expected a class"),
        ({"options": [4]}, "options are"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
    ],
)
def test_arguments_of_another_type_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        TorchModel(**{"schema": SCHEMA, "module_class": Net, **wrong})


def test_sparse_gradients_of_layers_are_gradients() -> None:
    class Positions(Net):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.bias = nn.Embedding(3, 1, sparse=True)

        def forward(self, batch: Batch) -> Any:
            return super().forward(batch) + self.bias(torch.tensor(1))

    found = ModelCase(TorchModel(SCHEMA, Positions), SCHEMA, seed=2).gradient()

    assert TorchModel(SCHEMA, Positions).segments[2].name == "bias.weight"
    assert (found.dense[3:] != 0).tolist() == [False, True, False]


def test_tied_parameters_are_one() -> None:
    class Tied(Net):
        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            self.again = self.layer

        def forward(self, batch: Batch) -> Any:
            pooled = self.embedding(batch).sum(1)
            return self.layer(pooled) + self.again(pooled)

    case, twice = (ModelCase(TorchModel(SCHEMA, each), SCHEMA, seed=2) for each in (Net, Tied))
    assert twice.model.num_params == 3
    half = ModelCase(twice.model, SCHEMA, seed=2)
    half.params = case.params / 2
    np.testing.assert_allclose(half.predict(), case.predict(), rtol=1e-6)


def test_module_in_a_file_is_a_model() -> None:
    name = "tests/support/torch_models.py:CtrDnn"

    model = build_model(name, SCHEMA, {"dim": 2, "hidden": [3]}, seed=4)

    assert isinstance(model, TorchModel)
    assert str(name_of(model)).endswith("/tests/support/torch_models.py:CtrDnn")
    assert (
        name_of(TorchModel(SCHEMA, net_with("layer", lambda: nn.Linear(2, 1)))) is None
    )  # in a function: none can build it again
    with pytest.raises(ValueError, match="did you mean 'hidden'"):
        build_model(name, SCHEMA, {"dim": 2, "hidden": [3], "hiden": 1})


def test_embeddings_of_one_table_have_the_order_of_their_own_slots() -> None:
    class Both(nn.Module):
        def __init__(self, schema: Any) -> None:
            super().__init__()
            self.one = SlotEmbedding(["C2", "C4"], dim=2, table="items")
            self.other = SlotEmbedding(["C4", "C2"], dim=2, table="items")

        def forward(self, batch: Batch) -> Any:
            torch.testing.assert_close(self.other(batch), self.one(batch).flip(1))
            return self.one(batch).sum((1, 2))

    assert ModelCase(TorchModel(SCHEMA, Both), SCHEMA, seed=1).predict().any()


@pytest.mark.parametrize(
    "squash",
    [
        lambda logits: logits.sigmoid(),
        lambda logits: logits.sigmoid().squeeze(1),
        lambda logits: torch.cat([logits, -logits], 1).softmax(1)[:, 0],
    ],
)
def test_forward_that_returns_probabilities_is_told_once(
    squash: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Squashed(Net):
        def forward(self, batch: Batch) -> Any:
            return squash(super().forward(batch).reshape(-1, 1))

    class Own(Squashed):
        def loss(self, batch: Batch, output: Any) -> Any:
            return nn.functional.binary_cross_entropy(output.reshape(-1), batch.labels)

        def probabilities(self, batch: Batch, output: Any) -> Any:
            return output.reshape(-1)

    model = TorchModel(SCHEMA, Squashed)
    for each in (model, model, TorchModel(SCHEMA, Own), TorchModel(SCHEMA, Net)):
        ModelCase(each, SCHEMA, 0, 5).gradient()

    (message,) = caplog.messages
    assert message.startswith("Squashed.forward returns the output of a sigmoid or softmax")


def test_table_whose_gradient_is_exactly_zero_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Product(nn.Module):
        def __init__(self, schema: Any, init_range: float) -> None:
            super().__init__()
            self.rows = SlotEmbedding(dim=2, init_range=init_range)

        def forward(self, batch: Batch) -> Any:
            rows = self.rows(batch)
            return (rows[:, 0] * rows[:, 1]).sum(1)

    for value, num_told in ((0.0, 1), (0.01, 0)):
        caplog.clear()
        case = ModelCase(TorchModel(SCHEMA, Product, {"init_range": value}), SCHEMA, 0, 5)
        case.change_lookup("rows", rows=np.full_like(case.lookups["rows"].rows, value))
        workspace = case.model.workspace(5)
        for _ in range(9):
            case.gradient(workspace)
        assert caplog.messages == []
        for _ in range(9):
            case.gradient(workspace)
        told = [each for each in caplog.messages if "table 'rows' is exactly zero in 10" in each]
        assert len(told) == len(caplog.messages) == num_told
