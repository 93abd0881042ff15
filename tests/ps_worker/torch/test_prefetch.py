"""Rows asked for a batch ahead: in sync those that a look-up would read, in async a push older at most."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.protos.errors import UsageError  # noqa: E402
from ctr_ps.ps_worker.torch import Embedding, PushOptimizer, Tables, open_tables  # noqa: E402
from tests.support.torch_loop import (  # noqa: E402
    NUM_KEYS,
    Net,
    net_batches,
    on_cluster,
    rows_of,
    train_net,
)

SGD = {"name": "sgd", "learning_rate": 0.5}
ADAGRAD = {"name": "adagrad", "learning_rate": 0.1}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_batch_is_asked_for_once_with_all_its_tables(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tables(mode=mode) as tables:
        net = Net(ADAGRAD)
        tables.attach(net)
        asked: list[set[str]] = []
        pull = tables._store.pull_sparse

        def noted(keys: Any, **options: Any) -> Any:
            asked.append(set(keys))
            return pull(keys, **options)

        monkeypatch.setattr(tables._store, "pull_sparse", noted)
        train_net(tables, net, tables.prefetching(net_batches(5, 1), lambda each: each.keys()))

    both = {"items", "words"}
    first = [{"items"}, {"words"}] if mode == "sync" else [both]
    rest = [both] * 4
    assert sorted(map(sorted, asked)) == sorted(map(sorted, first + rest))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            torch.tensor([1]),
            "returned a Tensor, expected keys by table",
        ),
        ({"items": [1]}, "returned a list for the table 'items', expected a tensor"),
        ({"item": torch.tensor([1])}, "keys of the table 'item', but the tables are items, words$"),
        ({"items": torch.tensor([1.0])}, "keys are torch.float32"),
    ],
)
def test_keys_of_a_batch_that_cannot_be_are_refused_before_it_is_trained(
    answer: Any, message: str
) -> None:
    with open_tables() as tables:
        tables.attach(Net(ADAGRAD))

        with pytest.raises(UsageError, match=message):
            next(tables.prefetching([0, 1], lambda _: answer))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 2], ids=["in process", "cluster"])
def test_prefetching_in_sync_changes_no_bit(every: int, num_workers: int) -> None:
    """Also where a step comes after several batches only."""
    ends: list[list[Any]] = []

    def work(tables: Tables, is_ahead: bool) -> None:
        net = nets[tables.worker]
        tables.attach(net)
        optimizer = PushOptimizer(tables)
        own = net_batches(10, seed=tables.worker)
        batches = tables.prefetching(own, lambda each: each.keys()) if is_ahead else own
        for number, batch in enumerate(batches, start=1):
            net.loss(batch).backward()
            if number % every == 0:
                optimizer.step()
        tables.barrier()
        if tables.worker == 0:
            ends.append(rows_of(net))

    for is_ahead in (False, True):
        nets = [Net(ADAGRAD), Net(ADAGRAD)]
        if num_workers:
            on_cluster(lambda tables, ahead=is_ahead: work(tables, ahead), num_servers=2)
        else:
            with open_tables() as tables:
                work(tables, is_ahead)

    for plain, ahead in zip(*ends, strict=True):
        assert torch.equal(plain, ahead)


def test_rows_that_others_changed_before_a_barrier_are_asked_for_again() -> None:
    """Worker 1 takes three steps alone while worker 0, whose next rows are here already, is at a barrier."""
    keys = torch.tensor([5])
    seen: list[float] = []

    def work(tables: Tables) -> None:
        embedding = Embedding(1, table="items", init_range=0.0, optimizer=SGD)
        tables.attach(embedding)
        optimizer = PushOptimizer(tables)

        def train(steps: int) -> None:
            for _ in range(steps):
                embedding(keys).sum().backward()
                optimizer.step()

        if tables.worker == 1:
            train(4)
            tables.barrier()
            return
        for number, batch in enumerate(
            tables.prefetching([keys] * 2, lambda each: {"items": each})
        ):
            if number == 0:
                train(1)
                tables.barrier()
                seen.append(embedding(batch).item())
            else:
                seen.append(embedding(batch).item())

    on_cluster(work)

    assert seen == [-2.0, -2.0]


@pytest.mark.parametrize("steps_of_a_batch", [1, 2])
def test_rows_in_async_miss_one_push_at_most(steps_of_a_batch: int) -> None:
    """Each step takes 0.5 off the row, so its value counts the pushes that a look-up has seen."""
    with open_tables(mode="async", optimizer=SGD) as tables:
        embedding = Embedding(1, table="items", init_range=0.0)
        tables.attach(embedding)
        optimizer = PushOptimizer(tables)
        missed: list[int] = []

        for keys in tables.prefetching([torch.tensor([5])] * 4, lambda each: {"items": each}):
            for _ in range(steps_of_a_batch):
                row = embedding(keys)
                missed.append(len(missed) + round(row.item() / 0.5))
                row.sum().backward()
                optimizer.step()

    assert missed == {1: [0, 1, 1, 1], 2: [0, 1, 0, 0, 0, 0, 0, 0]}[steps_of_a_batch]


def test_keys_that_were_not_asked_for_are_pulled() -> None:
    with open_tables(mode="async") as tables:
        embedding = Embedding(2, table="items", init_range=0.5)
        tables.attach(embedding)
        expected = embedding(torch.arange(NUM_KEYS))
        asked = torch.tensor([9, 1, 4, 7])

        for _ in tables.prefetching([asked], lambda keys: {"items": keys}):
            for keys in ([9, 1, 4, 7], [1, 9], [4, 4, 1], [0], [11, 1], []):
                places = torch.tensor(keys, dtype=torch.int64)
                assert torch.equal(embedding(places), expected[places])


def test_evaluation_reads_zeros_for_new_keys_though_they_were_asked_for() -> None:
    with open_tables(mode="async") as tables:
        embedding = Embedding(2, table="items", init_range=0.5)
        tables.attach(embedding)

        for keys in tables.prefetching([torch.tensor([1, 2])], lambda keys: {"items": keys}):
            assert embedding(keys).any()
            assert not embedding.eval()(keys).any()


def test_loop_that_ends_early_leaves_nothing_ahead() -> None:
    with open_tables(mode="async", optimizer=SGD) as tables:
        embedding = Embedding(1, table="items", init_range=0.0)
        tables.attach(embedding)
        keys = torch.tensor([5])

        batches = tables.prefetching([keys, keys, keys], lambda each: {"items": each})
        next(batches)
        embedding(keys).sum().backward()
        PushOptimizer(tables).step()
        batches.close()

        assert embedding(keys).item() == -0.5


def test_rows_that_were_asked_for_before_a_load_are_not_used(tmp_path: Path) -> None:
    batches, url = net_batches(2, seed=1), str(tmp_path / "rows")
    with open_tables() as tables:
        net = Net(ADAGRAD)
        tables.attach(net)
        train_net(tables, net, net_batches(3, seed=2))
        tables.save(url)

    with open_tables(mode="async") as tables, torch.no_grad():
        net = Net(ADAGRAD)
        tables.attach(net)
        ahead = tables.prefetching(batches, lambda each: each.keys())
        next(ahead)
        tables.load(url)
        found = net(next(ahead))
        ahead.close()

        assert torch.equal(found, net(batches[1]))


def test_second_step_of_a_batch_in_sync_reads_what_the_first_wrote() -> None:
    ends: list[list[Any]] = []
    for is_ahead in (False, True):
        with open_tables() as tables:
            net = Net(ADAGRAD)
            tables.attach(net)
            own = net_batches(3, seed=1)
            for batch in tables.prefetching(own, lambda each: each.keys()) if is_ahead else own:
                train_net(tables, net, [batch, batch])
            ends.append(rows_of(net))

    for plain, ahead in zip(*ends, strict=True):
        assert torch.equal(plain, ahead)
