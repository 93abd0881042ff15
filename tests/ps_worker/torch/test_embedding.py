"""Embeddings on tables compute what those of torch.nn compute, to the last bit: values and gradients."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.protos.errors import SpecConflictError, UsageError  # noqa: E402
from ctr_ps.ps_worker.torch import Embedding, EmbeddingBag, PushOptimizer, Tables, open_tables  # noqa: E402
from tests.support.cluster import cluster  # noqa: E402
from tests.support.torch_loop import (  # noqa: E402
    NUM_KEYS,
    LookUp,
    OnTable,
    OnWeight,
    coefficients,
    dense_gradient,
)

KEYS = st.integers(0, NUM_KEYS - 1)


@st.composite
def look_ups(draw: st.DrawFn) -> LookUp:
    """Any look-up: bags by offsets, some of them empty, or in rows; keys of any shape."""
    mode = draw(st.sampled_from(["none", "sum", "mean", "max"]))
    dtype = draw(st.sampled_from([torch.int64, torch.uint64, torch.int32]))
    shape = draw(st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4)))
    size = shape[0] * shape[1] if shape else None
    found = draw(st.lists(KEYS, min_size=size or 0, max_size=size or 12))
    keys = torch.tensor(found, dtype=torch.int64)
    keys = keys.reshape(shape) if shape else keys
    offsets = None
    if mode != "none" and shape is None:
        cuts = draw(st.lists(st.integers(0, len(found)), max_size=4))
        offsets = torch.tensor([0, *sorted(cuts)])
    weights = None
    if mode == "sum" and draw(st.booleans()):
        weights = coefficients(keys.shape, draw(st.integers(0, 99)))
    return LookUp(mode, keys.to(dtype), offsets, weights)


def of_torch(lookup: LookUp) -> LookUp:
    return LookUp(lookup.mode, lookup.keys.long(), lookup.offsets, lookup.weights)


class Case:
    """A table, and the same rows as a weight."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.on_table = OnTable()
        tables.attach(self.on_table)

    def fresh(self) -> tuple[OnTable, OnWeight]:
        self.tables.pending.clear()
        return self.on_table, OnWeight(self.on_table.weight())


@pytest.fixture(scope="module", params=["in process", "cluster"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param == "in process":
        with open_tables() as tables:
            yield Case(tables)
        return
    with cluster(num_servers=2) as servers, open_tables(servers=servers.endpoints) as tables:
        yield Case(tables)


class TestBitEqual:
    @settings(max_examples=50)
    @given(program=st.lists(look_ups(), min_size=1, max_size=4))
    def test_look_ups_of_one_backward(self, case: Case, program: list[LookUp]) -> None:
        self.compare(case, [program])

    @settings(max_examples=50)
    @given(program=st.lists(st.lists(look_ups(), min_size=1, max_size=3), min_size=2, max_size=4))
    def test_accumulation_over_several_forwards(
        self, case: Case, program: list[list[LookUp]]
    ) -> None:
        self.compare(case, program)

    @settings(max_examples=50)
    @given(program=st.lists(look_ups(), min_size=1, max_size=3))
    def test_several_losses_of_one_forward(self, case: Case, program: list[LookUp]) -> None:
        on_table, on_weight = case.fresh()

        for module, convert in ((on_table, lambda each: each), (on_weight, of_torch)):
            outputs = [module(convert(lookup)) for lookup in program]
            for seed in (7, 8):
                loss = sum(
                    (output * coefficients(output.shape, seed + place)).sum()
                    for place, output in enumerate(outputs)
                )
                loss.backward(retain_graph=True)

        assert_same_gradient(case, on_weight)

    def compare(self, case: Case, program: list[list[LookUp]]) -> None:
        on_table, on_weight = case.fresh()

        for step, lookups in enumerate(program):
            losses: list[list[Any]] = [[], []]
            for place, lookup in enumerate(lookups):
                found, expected = on_table(lookup), on_weight(of_torch(lookup))
                assert torch.equal(found, expected)
                factors = coefficients(expected.shape, 10 * step + place)
                losses[0].append((found * factors).sum())
                losses[1].append((expected * factors).sum())
            for loss in losses:
                sum(loss).backward()

        assert_same_gradient(case, on_weight)


def assert_same_gradient(case: Case, on_weight: OnWeight) -> None:
    np.testing.assert_array_equal(dense_gradient(case.tables), on_weight.weight.grad.numpy())


def test_gradients_of_weights_of_samples_are_those_of_torch(case: Case) -> None:
    on_table, on_weight = case.fresh()
    keys, offsets = torch.tensor([3, 1, 3]), torch.tensor([0, 2])
    weights = [torch.tensor([0.5, 2.0, -1.0], requires_grad=True) for _ in range(2)]

    for module, own in zip((on_table, on_weight), weights, strict=True):
        output = module(LookUp("sum", keys, offsets, own))
        (output * coefficients(output.shape, 1)).sum().backward()

    assert torch.equal(weights[0].grad, weights[1].grad)


def test_key_of_64_bits_is_the_same_as_int64_and_uint64(case: Case) -> None:
    embedding = case.on_table.by_mode["none"]

    unsigned = embedding(torch.tensor([2**64 - 5], dtype=torch.uint64))

    assert torch.equal(embedding(torch.tensor([-5])), unsigned)
    assert not torch.equal(embedding(torch.tensor([5])), unsigned)


def test_negative_keys_of_32_bits_are_those_of_64(case: Case) -> None:
    embedding = case.on_table.by_mode["none"]
    keys = torch.tensor([-5, 7])

    assert torch.equal(embedding(keys.int()), embedding(input=keys))


PADDED = torch.tensor([[2, 0, 0], [0, 0, 0], [3, 2, 0]])


@pytest.mark.parametrize("mode", ["none", "sum", "mean", "max"])
def test_padding_reads_zeros_is_in_no_bag_and_is_not_trained(mode: str) -> None:
    with open_tables(optimizer={"name": "sgd", "learning_rate": 0.5}) as tables:
        options: dict[str, Any] = {"table": "items", "init_range": 0.5, "padding_idx": 0}
        ours = Embedding(2, **options) if mode == "none" else EmbeddingBag(2, mode=mode, **options)
        tables.attach(ours)
        weight = torch.zeros(4, 2)
        keys = torch.tensor([2, 3])
        weight[keys] = ours(keys if mode == "none" else keys[:, None]).detach()
        theirs = (
            torch.nn.Embedding(4, 2, padding_idx=0, _weight=weight)
            if mode == "none"
            else torch.nn.EmbeddingBag(4, 2, padding_idx=0, mode=mode, _weight=weight)
        )
        sgd = torch.optim.SGD(theirs.parameters(), lr=0.5)

        for step in range(3):
            outputs = [ours(PADDED), theirs(PADDED)]
            assert torch.equal(*outputs)
            for output in outputs:
                (output * coefficients(output.shape, step)).sum().backward()
            PushOptimizer(tables).step()
            sgd.step()
            sgd.zero_grad()

        assert tables._store.status().tables["items"].rows == 2


def test_last_offset_may_be_the_number_of_keys() -> None:
    with open_tables() as tables:
        ours = EmbeddingBag(2, table="items", mode="sum", init_range=0.5, include_last_offset=True)
        tables.attach(ours)
        keys, offsets = torch.tensor([5, 6, 7], dtype=torch.int32), torch.tensor([0, 2, 3])

        found = ours(keys, offsets.int())

        rows = ours(torch.tensor([5, 6, 7]), torch.arange(4)).detach()
        assert torch.equal(found, torch.stack([rows[0] + rows[1], rows[2]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_output_has_the_type_of_the_module_and_gradients_are_float32(dtype: Any) -> None:
    with open_tables() as tables:
        net = torch.nn.Sequential(EmbeddingBag(2, table="items", mode="sum"), torch.nn.Linear(2, 1))
        tables.attach(net)
        keys, weights = torch.tensor([[5, 6]]), torch.tensor([[0.5, 2.0]])
        expected = net[0](keys, per_sample_weights=weights).detach()

        net.to(dtype)
        found = net[0](keys, per_sample_weights=weights.to(dtype))
        net(keys).sum().backward()

        assert torch.equal(found, expected.to(dtype))
        (rows,) = PushOptimizer(tables).rows()
        assert torch.equal(rows.grad, net[1].weight.float().expand(2, 2))
        PushOptimizer(tables).step()


@pytest.mark.parametrize("mode", ["none", "sum"])
def test_output_may_be_changed_in_place(case: Case, mode: str) -> None:
    on_table, on_weight = case.fresh()

    for module in (on_table, on_weight):
        output = module(LookUp(mode, torch.tensor([[1, 2], [2, 3]])))
        output *= 3
        output.relu_().sum().backward()

    assert_same_gradient(case, on_weight)


def test_key_without_dimension_has_one_row(case: Case) -> None:
    on_table, on_weight = case.fresh()
    key = LookUp("none", torch.tensor(3))

    assert torch.equal(on_table(key), on_weight(key))


@pytest.mark.parametrize("quiet", ["no_grad", "inference_mode", "eval"])
def test_nothing_is_recorded_and_no_row_made_where_nothing_is_trained(quiet: str) -> None:
    with open_tables() as tables:
        embedding = Embedding(2, table="items", init_range=0.5)
        tables.attach(embedding)
        optimizer = PushOptimizer(tables)
        keys = torch.tensor([1, 2, 1])

        if quiet == "eval":
            output = embedding.eval()(keys)
        else:
            with getattr(torch, quiet)():
                output = embedding(keys)

        assert not output.requires_grad
        optimizer.step()
        assert optimizer.rows() == []
        assert tables._store.status().tables["items"].rows == 0
        assert bool(output.any()) == (quiet != "eval"), "untrained rows are zeros in eval()"


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.bool])
def test_keys_of_other_types_are_refused(case: Case, dtype: Any) -> None:
    with pytest.raises(
        UsageError, match=r"keys are torch\.\w+, expected torch.int64, torch.uint64"
    ):
        case.on_table.by_mode["none"](torch.zeros(2).to(dtype))


def test_module_that_is_not_attached_says_how() -> None:
    with pytest.raises(UsageError, match=r"table='items'.* is not attached: call attach\(model\)"):
        Embedding(2, table="items")(torch.tensor([1]))


def test_modules_of_one_table_that_do_not_agree_are_refused() -> None:
    model = torch.nn.ModuleList([Embedding(2, table="items"), EmbeddingBag(3, table="items")])

    with open_tables() as tables, pytest.raises(SpecConflictError, match="items"):
        tables.attach(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0, "table": "t"}, "dim is 0, expected widths of at least 1"),
        ({"dim": 1, "table": ""}, "expected the name of the table"),
        ({"dim": 1, "table": "t", "init_range": -1.0}, "init_range is -1.0"),
        ({"dim": 1, "table": "t", "mode": "min"}, "mode is 'min', expected 'sum', 'mean' or 'max'"),
    ],
)
def test_impossible_embedding_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBag(**options)


def freeze_embedding(net: Any, is_trained: bool) -> None:
    net[0].requires_grad_(is_trained)


def freeze_module(net: Any, is_trained: bool) -> None:
    net.requires_grad_(is_trained)


def freeze_parameters(net: Any, is_trained: bool) -> None:
    for parameter in net[0].parameters():
        parameter.requires_grad = is_trained


@pytest.mark.parametrize("freeze", [freeze_embedding, freeze_module, freeze_parameters])
def test_frozen_rows_stay(freeze: Any) -> None:
    keys = torch.tensor([5, 7])
    with open_tables(optimizer={"name": "sgd", "learning_rate": 1.0}) as tables:
        net = torch.nn.Sequential(Embedding(2, table="items"), torch.nn.Linear(2, 1))
        tables.attach(net)
        optimizer = PushOptimizer(tables)
        before = net[0](keys).detach().clone()

        for is_trained in (False, True):
            freeze(net, is_trained)
            (net[0](keys) + torch.zeros(1, requires_grad=True)).sum().backward()
            optimizer.step()
            now = net[0](keys).detach()
            assert torch.equal(now, before) is not is_trained
        assert before.abs().max() > 0  # initial values, as of keys that are trained


def test_embedding_has_a_parameter_without_numbers() -> None:
    net = EmbeddingBag(2, table="items")

    assert [tuple(each.shape) for each in net.parameters()] == [(0, 2)]
    state = net.state_dict()
    assert list(state) == ["_extra_state"]
    assert state["_extra_state"].dtype == torch.uint8  # tools save tensors alone
    net.load_state_dict({"_extra_state": {"table": "items", "dim": 2}})  # as it was once


def test_weight_of_another_module_is_not_taken_for_rows() -> None:
    theirs, ours = torch.nn.EmbeddingBag(3, 2), EmbeddingBag(2, table="items")

    state = {**theirs.state_dict(), **ours.state_dict()}

    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight"):
        ours.load_state_dict(state)
    assert ours.load_state_dict(state, strict=False).unexpected_keys == ["weight"]
    assert ours.weight.shape == (0, 2)


def test_mode_is_that_of_torch() -> None:
    assert EmbeddingBag(2, table="items").mode == torch.nn.EmbeddingBag(3, 2).mode == "mean"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = EmbeddingBag(4, table="items", init_range=0.5)
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, keys: Any, offsets: Any) -> Any:
        return self.linear(self.bag(keys, offsets))


BATCH = torch.tensor([1, 2, 3]), torch.tensor([0, 2])


# PyTorch says so of itself where it leaves a call out.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_module_trains_as_one_that_is_not() -> None:
    rows = []
    for compile_net in (lambda net: net, lambda net: torch.compile(net, backend="eager")):
        torch.manual_seed(1)
        with open_tables() as tables:
            net = Net()
            tables.attach(net)
            optimizer = PushOptimizer(tables)
            compiled = compile_net(net)
            for _ in range(3):
                compiled(*BATCH).sum().backward()
                optimizer.step()
            rows.append(net.bag(torch.arange(4).unsqueeze(1)).detach())

    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0][1], rows[0][1] * 0)


def test_module_that_is_saved_whole_is_attached_again(tmp_path: Any) -> None:
    with open_tables() as tables:
        net = Net()
        tables.attach(net)
        expected = net(*BATCH)
        torch.save(net, tmp_path / "net.pt")

        loaded = torch.load(tmp_path / "net.pt", weights_only=False)

        with pytest.raises(UsageError, match="not attached"):
            loaded(*BATCH)
        tables.attach(loaded)
        assert torch.equal(loaded(*BATCH), expected)


def test_traced_look_up_is_refused() -> None:
    with open_tables() as tables:
        net = Net()
        tables.attach(net)

        with (
            warnings.catch_warnings(action="ignore", category=FutureWarning),  # of torch.jit itself
            pytest.raises(UsageError, match=r"EmbeddingBag\(.*cannot be traced"),
        ):
            torch.jit.trace(net, BATCH, check_trace=False)


def test_look_up_in_a_forked_process_is_refused() -> None:
    """As in a worker of a DataLoader, which would read rows as they were when it was made."""
    with open_tables() as tables:
        net = Embedding(2, table="items")
        tables.attach(net)

        child = os.fork()
        if not child:
            try:
                net(torch.tensor([1]))
            except UsageError as error:
                os._exit("the tables belong to another process" not in str(error))
            finally:
                os._exit(1)

        assert os.waitpid(child, 0)[1] == 0
