"""Steps: exactly once, as torch.optim's with the same formulas, and bounded without any."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.protos.errors import GradientError, UsageError  # noqa: E402
from ctr_ps.ps_worker.torch import Embedding, PushOptimizer, Tables, open_tables  # noqa: E402
from tests.support.torch_loop import (  # noqa: E402
    NUM_KEYS,
    LookUp,
    OnTable,
    OnWeight,
    coefficients,
    dense_gradient,
)

SGD = {"name": "sgd", "learning_rate": 0.5}
ALL = LookUp("none", torch.arange(NUM_KEYS))
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "momentum": (
        {"name": "momentum", "learning_rate": 0.1, "momentum": 0.9},
        lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    ),
    "adagrad": (
        {"name": "adagrad", "learning_rate": 0.1},
        lambda each: torch.optim.Adagrad(each, lr=0.1),
    ),
    "adam": (
        {"name": "adam", "learning_rate": 0.1},
        lambda each: torch.optim.Adam(each, lr=0.1),
    ),
}


def mean_loss(output: Any, seed: int) -> Any:
    return ((output - coefficients(output.shape, seed)) ** 2).mean()


@pytest.fixture
def opened() -> Iterator[tuple[Tables, OnTable, PushOptimizer]]:
    """Tables in process with SGD of rate 0.5, a module on them and its optimizer."""
    with open_tables(optimizer=SGD) as tables:
        on_table = OnTable()
        tables.attach(on_table)
        yield tables, on_table, PushOptimizer(tables)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_sgd_is_that_of_torch_to_the_last_bit(mode: Any) -> None:
    """A learning rate that is a power of two: whether the product is rounded makes no difference."""
    with open_tables(mode=mode, optimizer=SGD) as tables:
        on_table = OnTable()
        tables.attach(on_table)
        on_weight = OnWeight(on_table.weight())
        ours, theirs = PushOptimizer(tables), torch.optim.SGD(on_weight.parameters(), lr=0.5)

        for step in range(20):
            keys = torch.randint(NUM_KEYS, (9,), generator=torch.Generator().manual_seed(step))
            lookup = LookUp(["sum", "mean"][step % 2], keys, torch.tensor([0, 3, 3, 5]))
            for module, optimizer in ((on_table, ours), (on_weight, theirs)):
                optimizer.zero_grad()
                mean_loss(module(lookup), step).backward()
                optimizer.step()

            assert torch.equal(on_table.weight(), on_weight.weight)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_those_of_torch_where_every_row_is_updated(name: str) -> None:
    """Rows that a step does not touch keep their state here, which torch.optim's dense ones change."""
    own, make = OPTIMIZERS[name]
    with open_tables(optimizer=own) as tables:
        on_table = OnTable()
        tables.attach(on_table)
        on_weight = OnWeight(on_table.weight())
        ours, theirs = PushOptimizer(tables), make(on_weight.parameters())

        for step in range(20):
            for module, optimizer in ((on_table, ours), (on_weight, theirs)):
                optimizer.zero_grad()
                mean_loss(module(ALL), step).backward()
                optimizer.step()

        expected = on_weight.weight.detach()
        torch.testing.assert_close(on_table.weight(), expected, rtol=1e-5, atol=1e-6)


def test_second_backward_through_a_graph_pushes_its_own_gradient_only(
    opened: tuple[Tables, OnTable, PushOptimizer],
) -> None:
    _, on_table, optimizer = opened
    before = on_table.weight()

    loss = on_table(ALL).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        optimizer.step()

    assert torch.equal(on_table.weight(), before - 0.5 - 0.5)


def test_closure_is_called_before_the_push(opened: tuple[Tables, OnTable, PushOptimizer]) -> None:
    _, on_table, optimizer = opened
    before = on_table.weight()

    def closure() -> Any:
        loss = on_table(ALL).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)

    assert torch.equal(loss, before.sum())
    assert torch.equal(on_table.weight(), before - 0.5)


def test_gradients_are_clipped_together_with_those_of_the_dense_part(
    opened: tuple[Tables, OnTable, PushOptimizer],
) -> None:
    tables, on_table, optimizer = opened
    on_weight = OnWeight(on_table.weight())
    norms = []

    for module in (on_table, on_weight):
        dense = torch.nn.Parameter(torch.ones(3))
        for step in range(2):
            output = module(LookUp("sum", torch.tensor([1, 2, 1, 4]), torch.tensor([0, 2])))
            (dense * output * coefficients(output.shape, step)).sum().backward()
        rows = optimizer.rows() if module is on_table else [on_weight.weight]
        norms.append(torch.nn.utils.clip_grad_norm_([dense, *rows], 0.01))

    torch.testing.assert_close(*norms)
    assert norms[0] > 0.01
    torch.testing.assert_close(torch.from_numpy(dense_gradient(tables)), on_weight.weight.grad)


def test_gradient_that_is_not_finite_is_refused_and_can_be_dropped(
    opened: tuple[Tables, OnTable, PushOptimizer],
) -> None:
    _, on_table, optimizer = opened
    before = on_table.weight()

    (on_table(ALL) * float("inf")).sum().backward()
    with pytest.raises(GradientError, match="table 'items' is not finite"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()

    assert torch.equal(on_table.weight(), before)


def test_look_ups_without_backward_leave_nothing(
    opened: tuple[Tables, OnTable, PushOptimizer],
) -> None:
    _, on_table, optimizer = opened

    def num_tensors() -> int:
        gc.collect()
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    on_table(ALL)
    before = num_tensors()
    for _ in range(20):
        on_table(ALL)

    assert num_tensors() == before
    assert optimizer.rows() == []


def train_without_step(*, is_distinct: bool) -> None:
    with open_tables(max_pending_mb=1) as tables:
        embedding = Embedding(64, table="items")
        tables.attach(embedding)
        for step in range(40):
            keys = torch.arange(1000) + (1000 * step if is_distinct else 0)
            embedding(keys).sum().backward()
            assert tables.pending.num_bytes <= 2**20 + 1000 * (8 + 4 * 64)


def test_gradients_of_equal_keys_take_bounded_memory_without_step() -> None:
    train_without_step(is_distinct=False)


def test_gradients_of_ever_more_keys_without_step_are_an_error_that_names_the_cause() -> None:
    with pytest.raises(
        UsageError, match=r"1 MB of gradients wait to be pushed, .*call PushOptimizer.step\(\)"
    ):
        train_without_step(is_distinct=True)


def test_loop_that_forgets_step_is_warned_once(
    opened: tuple[Tables, OnTable, PushOptimizer], caplog: pytest.LogCaptureFixture
) -> None:
    _, on_table, optimizer = opened

    for _ in range(19):
        (on_table(ALL).sum() + on_table(ALL).sum()).backward()
    optimizer.step()
    for _ in range(19):
        on_table(ALL).sum().backward()
    assert caplog.messages == []
    for _ in range(10):
        on_table(ALL).sum().backward()

    (message,) = caplog.messages
    assert message.startswith("20 backward passes without PushOptimizer.step() or zero_grad()")
    optimizer.zero_grad()


def test_gradients_that_wait_are_told_at_a_barrier_a_save_and_the_end(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with open_tables() as tables:
        items = Embedding(2, table="items")
        tables.attach(items)
        items(torch.tensor([3, 5, 5])).sum().backward()

        tables.barrier()
        tables.save(str(tmp_path / "rows"))

    expected = "gradients of 2 keys of 'items' wait: push them with PushOptimizer.step()"
    assert [expected in each for each in caplog.messages] == [True] * 3
