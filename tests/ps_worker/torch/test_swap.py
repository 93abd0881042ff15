"""Embeddings of any module move into tables and back, and nothing else of it changes."""

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import nn  # noqa: E402

from ctr_ps.protos.errors import UsageError  # noqa: E402
from ctr_ps.ps_worker.torch import (  # noqa: E402
    Embedding,
    EmbeddingBag,
    PushOptimizer,
    open_tables,
    restore_embeddings,
    swap_embeddings,
)
from tests.support.cluster import cluster  # noqa: E402
from tests.support.torch_loop import on_cluster  # noqa: E402

RATE = 2.0**-4
SGD = {"name": "sgd", "learning_rate": RATE}


class Net(nn.Module):
    """Embeddings in containers, with options, shared as instances, by a weight, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fields = nn.ModuleDict(
            {
                "user": nn.Embedding(9, 4, padding_idx=0),
                "words": nn.EmbeddingBag(9, 4, mode="max", padding_idx=1),
                "tags": nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True),
            }
        )
        self.shared = nn.ModuleList([self.fields["user"], nn.Embedding(9, 4)])
        self.tied = nn.Embedding(9, 4)
        self.tied.weight = self.shared[1].weight
        self.listed = [self.tied]
        self.linear = nn.Linear(16, 1)
        self.scores = nn.Parameter(torch.ones(4))

    def forward(self, keys: Any, offsets: Any) -> Any:
        parts = [
            self.fields["user"](keys[:, 0]),
            self.fields["words"](keys),
            self.fields["tags"](keys.flatten(), offsets),
            self.shared[0](input=keys[:, 1]) + self.shared[1](keys[:, 0].int()),
        ]
        all_items = self.listed[0].weight @ self.scores
        return self.linear(torch.cat(parts, 1)).squeeze(1) + all_items.logsumexp(0)


def steps(net: nn.Module, *optimizers: Any, number: int = 10) -> list[float]:
    random = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(number):
        keys = torch.randint(9, (5, 3), generator=random)
        loss = net(keys, torch.arange(0, 16, 3)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net()


@pytest.mark.parametrize("num_servers", [0, 1, 3])
def test_swapped_module_learns_as_before_and_comes_back(net: Net, num_servers: int) -> None:
    swapped = swap_embeddings(copy.deepcopy(net))
    sgd = torch.optim.SGD(net.parameters(), lr=RATE)
    dense = torch.optim.SGD(swapped.parameters(), lr=RATE)  # before the weights are rows
    expected = steps(net, sgd)

    def compare(**options: Any) -> None:
        with open_tables(optimizer=SGD, **options) as tables:
            tables.attach(swapped)
            found = steps(swapped, dense, PushOptimizer(tables))
            assert tables._store.status().tables.keys() == {
                "fields.user", "fields.words", "fields.tags", "shared.1"
            }  # fmt: skip
            restored = restore_embeddings(copy.deepcopy(swapped))
            assert isinstance(swapped.shared[1], Embedding)
        assert found == pytest.approx(expected, rel=1e-6)
        assert restored.state_dict().keys() == net.state_dict().keys()
        for name, weight in net.state_dict().items():
            torch.testing.assert_close(restored.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
        assert all(each.weight.grad is None for each in (restored.tied, restored.shared[0]))
        assert restored.shared[0] is restored.fields["user"]
        assert steps(restored) == pytest.approx(steps(net), rel=1e-6)

    if num_servers:
        with cluster(num_servers=num_servers) as servers:
            compare(servers=servers.endpoints)
    else:
        compare()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_are_those_of_worker_0_and_come_before_the_first_look_up(mode: str) -> None:
    found: dict[int, Any] = {}

    def work(tables: Any) -> None:
        module = nn.Embedding(5, 2)
        nn.init.constant_(module.weight, 1.0 + tables.worker)
        tables.attach(swap_embeddings(module))
        found[tables.worker] = module(torch.arange(5)).detach()

    on_cluster(work, num_servers=2, mode=mode)

    assert all(torch.equal(each, torch.ones(5, 2)) for each in found.values())


def test_weights_may_be_initialized_until_they_are_rows() -> None:
    with open_tables() as tables:
        module = swap_embeddings(nn.Embedding(3, 2))
        nn.init.constant_(module.weight, 7.0)
        tables.attach(module)
        assert torch.equal(module(torch.tensor([2])), torch.full((1, 2), 7.0))
        assert torch.equal(module.weight, torch.full((3, 2), 7.0))
        assert (module.num_embeddings, module.embedding_dim) == (3, 2)
        assert [tuple(each.shape) for each in module.parameters()] == [(0, 2)]


def test_write_to_weights_that_are_rows_is_told() -> None:
    with open_tables() as tables:
        module = swap_embeddings(nn.Embedding(3, 2))
        tables.attach(module)
        expected = module.weight.detach().clone()

        nn.init.ones_(module.weight)
        with pytest.raises(UsageError, match="weight is a copy of rows: write to it before attach"):
            module(torch.tensor([1]))

        assert torch.equal(module.weight, expected)
        module.weight.mul(2).sum().backward()
        for other in (copy.deepcopy(module), module):
            assert torch.equal(other(torch.arange(3)), expected)
        PushOptimizer(tables).zero_grad()


@pytest.mark.parametrize("call", ["look-up", "save", "push", "end"])
def test_write_that_hides_from_autograd_is_told_by_each_call(call: str, tmp_path: Path) -> None:
    module = swap_embeddings(nn.Embedding(3, 2, dtype=torch.float64))
    calls: dict[str, Any] = {
        "look-up": lambda tables: module(torch.tensor([1])),
        "save": lambda tables: tables.save(str(tmp_path / "rows")),
        "push": lambda tables: tables.push(),
        "end": lambda tables: None,
    }

    def write() -> None:
        with open_tables() as tables:
            tables.attach(module)
            _ = module.weight
            module(torch.tensor([1]))  # which was only read before
            module.weight.data.fill_(7.0)
            calls[call](tables)

    with pytest.raises(UsageError, match=r"embedding\.weight is a copy of rows"):
        write()
    assert not (tmp_path / "rows").exists()


def test_weight_is_not_replaced_once_it_is_rows() -> None:
    module, new = swap_embeddings(nn.Embedding(3, 2)), nn.Parameter(torch.full((3, 2), 7.0))
    module.weight = new
    with open_tables() as tables:
        tables.attach(module)

        with pytest.raises(UsageError, match=r"weight is in a table: set it before attach"):
            module.weight = nn.Parameter(torch.zeros(3, 2))

        assert torch.equal(module(torch.arange(3)), torch.full((3, 2), 7.0))


@pytest.mark.parametrize("assign", [False, True])
def test_weights_are_loaded_until_they_are_rows(assign: bool) -> None:
    pretrained = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1))
    expected = pretrained[0].weight.detach().clone()
    for change in (lambda other: other, swap_embeddings):
        module = swap_embeddings(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)))
        state = copy.deepcopy(change(pretrained).state_dict())  # with the weight, then with both
        module.load_state_dict(state, assign=assign)
        with open_tables() as tables:
            tables.attach(module)
            assert torch.equal(module[0](torch.arange(3)), expected)
            module.load_state_dict(module.state_dict())
    small = swap_embeddings(nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 1)))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        small.load_state_dict(nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)).state_dict())


def test_module_without_its_rows_is_told_at_the_first_look_up(tmp_path: Path) -> None:
    module, url = swap_embeddings(nn.Sequential(nn.Embedding(3, 2))), str(tmp_path / "rows")
    with open_tables() as tables:
        tables.attach(module)
        expected = module(torch.arange(3)).detach()
        tables.save(url)
        torch.save(module, tmp_path / "module.pt")
    saved = torch.load(tmp_path / "module.pt", weights_only=False)
    for each in (module, saved):
        with open_tables() as tables:
            tables.attach(each)
            for look_up in (
                lambda each=each: each(torch.tensor([0])),
                lambda each=each: each[0].weight,
            ):
                with pytest.raises(UsageError, match=r"table '0' has no rows here.*load"):
                    look_up()

            tables.load(url)

            assert torch.equal(each(torch.arange(3)), expected)


def test_hooks_frozen_weights_and_dtype_stay() -> None:
    calls = []
    module = nn.Sequential(nn.Embedding(3, 2, dtype=torch.float64), nn.Embedding(3, 2))
    module[0].register_forward_hook(lambda *_: calls.append(1))
    module[0].requires_grad_(False)
    before = module[0].weight.detach().clone()
    with open_tables(optimizer=SGD) as tables:
        tables.attach(swap_embeddings(module))

        output = module[0](torch.arange(3))

        assert calls == [1]
        assert not output.requires_grad
        assert torch.equal(output, before.float().double())


@pytest.mark.parametrize("key", [-1, 3])
def test_key_beyond_the_weight_is_refused(key: int) -> None:
    with open_tables() as tables:
        module = swap_embeddings(nn.Embedding(3, 2))
        tables.attach(module)
        with pytest.raises(UsageError, match=f"has no key {key}: expected 0 to 2"):
            module(torch.tensor([1, key]))


def test_trained_rows_are_not_replaced_by_those_of_another_module() -> None:
    with open_tables() as tables:
        tables.attach(swap_embeddings(nn.Sequential(nn.Embedding(3, 2))))
        other = nn.Sequential(nn.Embedding(3, 2))
        before = other[0].weight.detach().clone()

        with pytest.raises(UsageError, match=r"the table '0' has rows already.*another name"):
            tables.attach(swap_embeddings(other))

        assert torch.equal(other[0].weight, before)


def test_table_of_all_rows_has_no_rules_for_rows() -> None:
    life = {"admission": {"policy": "count", "threshold": 3}}
    with open_tables(life=life) as tables:
        module = nn.Sequential(nn.Embedding(3, 2))
        with pytest.raises(UsageError, match="life has the table '0', which starts with all rows"):
            tables.attach(swap_embeddings(module))
        assert len(module[0].weight) == 3


class Custom(nn.Embedding):
    def forward(self, input: Any) -> Any:
        return 2 * super().forward(input)


class Doubled:
    def __call__(self, *args: Any) -> Any:
        return 2 * super().__call__(*args)  # type: ignore[misc]  # of the module beside it


class OwnCall(Doubled, nn.EmbeddingBag):
    pass


class OwnState(nn.Embedding):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class OwnValues(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


def tied_to_linear() -> nn.Module:
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3))
    module[1].weight = module[0].weight
    return module


TIED = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2))
TIED[1].weight = TIED[0].weight
PAIR = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2))


@pytest.mark.parametrize(
    ("module", "names", "message"),
    [
        (nn.Embedding(3, 2, max_norm=1.0), None, "embedding has max_norm = 1.0"),
        (nn.EmbeddingBag(3, 2, scale_grad_by_freq=True), None, "scale_grad_by_freq = True"),
        (nn.Sequential(Custom(3, 2)), None, "0, a Custom, looks up in a way of its own"),
        (nn.Sequential(OwnCall(3, 2)), None, "0, a OwnCall, looks up in a way of its own"),
        (nn.Sequential(OwnState(3, 2)), None, "0, a OwnState, looks up in a way of its own"),
        (tied_to_linear(), None, r"the weight in '0' is also 1.weight"),
        (nn.Linear(1, 1), None, "Linear is or has no embedding of torch.nn"),
        (TIED, {"0": "a", "1": "b"}, "1 would be in 'b', its weight in 'a'"),
        (PAIR, {"2": "items"}, r"Sequential.2 is or has no embedding.*only \['0', '1'\]"),
        (PAIR, {"0": "items", "1": "items"}, "expected a table of its own for each weight"),
    ],
)
def test_module_without_a_counterpart_is_refused_and_stays(
    module: nn.Module, names: Any, message: str
) -> None:
    before = repr(module)

    with pytest.raises(UsageError, match=message):
        swap_embeddings(module, names)

    assert repr(module) == before


def test_values_of_ones_own_are_no_obstacle() -> None:
    module = nn.Sequential(OwnValues(3, 2))
    with open_tables() as tables:
        tables.attach(swap_embeddings(module))
        assert torch.equal(module(torch.arange(3)), torch.ones(3, 2))
        assert type(restore_embeddings(module)[0]) is OwnValues


def test_chosen_embeddings_alone_are_swapped_into_named_tables() -> None:
    module = nn.Sequential(nn.Embedding(3, 2), nn.EmbeddingBag(3, 2))

    swap_embeddings(module, {"1": "items"})

    assert type(module[0]) is nn.Embedding
    assert isinstance(module[1], EmbeddingBag)
    assert module[1].spec.name == "items"


def test_module_that_is_not_swapped_or_not_attached_is_not_restored() -> None:
    with pytest.raises(UsageError, match="no embedding of swap_embeddings"):
        restore_embeddings(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="not attached"):
        restore_embeddings(swap_embeddings(nn.Embedding(3, 2)))


def test_state_before_the_attach_has_the_weights() -> None:
    module = nn.Embedding(3, 2)
    weight = module.weight.detach().clone()

    assert torch.equal(swap_embeddings(module).state_dict()["weight"], weight)
