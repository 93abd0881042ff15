"""Statistics, admission and expiry of rows in a loop of one's own."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.protos.errors import GradientError, JobError, UsageError  # noqa: E402
from ctr_ps.ps_server.checkpoint.reader import Checkpoint  # noqa: E402
from ctr_ps.ps_server.table.rows.statistics import CLICK, SHOW, UNSEEN  # noqa: E402
from ctr_ps.ps_worker.torch import Embedding, PushOptimizer, Tables, open_tables  # noqa: E402
from tests.support.torch_loop import NetBatch, net_batches, on_cluster  # noqa: E402

SGD = {"name": "sgd", "learning_rate": 0.5}


def saved_statistics(url: Path) -> dict[int, tuple[float, float, float]]:
    """Returns shows, clicks and passes since the last push of each row of "items"."""
    return {
        int(key): (float(numbers[SHOW]), float(numbers[CLICK]), float(numbers[UNSEEN]))
        for _, rows in Checkpoint.open(url).read_shards("items", range(64))
        for key, numbers in zip(rows.keys, rows.statistics, strict=True)
    }


def rows_saved(url: Path) -> dict[int, float]:
    """Returns the first weight of each row of "items"."""
    return {
        int(key): float(weights[0])
        for _, rows in Checkpoint.open(url).read_shards("items", range(64))
        for key, weights in zip(rows.keys, rows.weights, strict=True)
    }


def clicked_items(batch: NetBatch) -> Any:
    """Returns the keys of the examples with a click; each has three."""
    return batch.items.view(-1, 3)[batch.labels == 1]


def train(tables: Tables, batches: list[NetBatch], *, clicks: bool = True) -> None:
    module, rows = Embedding(2, table="items", optimizer=SGD), PushOptimizer(tables)
    tables.attach(module)
    for batch in batches:
        rows.zero_grad()
        for part in (batch.items[:10], batch.items[10:]):  # several look-ups of a step
            module(part).sum().backward()
        rows.step(clicked={"items": clicked_items(batch)} if clicks else None)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_shows_and_clicks_are_those_of_the_keys(mode: str, tmp_path: Path) -> None:
    batches = [net_batches(4, seed=index) for index in range(2)]

    def work(tables: Tables) -> None:
        train(tables, batches[tables.worker])
        tables.save(str(tmp_path / "rows"))

    on_cluster(work, num_servers=2, mode=mode, life={"statistics": True})

    every = [batch for each in batches for batch in each]
    shows = Counter(key for batch in every for key in batch.items.tolist())
    clicks = Counter(key for batch in every for key in clicked_items(batch).flatten().tolist())
    assert saved_statistics(tmp_path / "rows") == {
        key: (shows[key], clicks[key], 0.0) for key in shows
    }


def test_several_backwards_of_one_look_up_count_it_once(tmp_path: Path) -> None:
    with open_tables(life={"statistics": True}) as tables:
        module = Embedding(2, table="items")
        tables.attach(module)
        found = module(torch.tensor([5, 5, 7]))
        found.sum().backward(retain_graph=True)
        found.sum().backward()
        tables.push()
        tables.save(str(tmp_path / "rows"))

    assert saved_statistics(tmp_path / "rows") == {5: (2.0, 0.0, 0.0), 7: (1.0, 0.0, 0.0)}


def test_key_gets_its_row_when_it_was_shown_often(tmp_path: Path) -> None:
    life = {"admission": {"policy": "count", "threshold": 3}}
    with open_tables(life=life) as tables:
        module = Embedding(2, table="items", optimizer=SGD)
        tables.attach(module)
        for keys in ([1, 2, 2], [1, 3], [1, 2]):  # the third show of 1 and 2 is in the last step
            module(torch.tensor(keys)).sum().backward()
            tables.push()
        tables.save(str(tmp_path / "rows"))

    assert sorted(saved_statistics(tmp_path / "rows")) == [1, 2]


def test_pass_ends_with_shrink_on_all_workers(tmp_path: Path) -> None:
    def work(tables: Tables) -> None:
        module = Embedding(2, table="items", optimizer=SGD)
        tables.attach(module)
        for keys in ([1, 2], [1], [1]):
            for each in tables.prefetching([keys], lambda keys: {"items": torch.tensor(keys)}):
                module(torch.tensor(each)).sum().backward()
                tables.push()
            tables.shrink()
        tables.save(str(tmp_path / "rows"))

    on_cluster(work, num_servers=2, life={"max_unseen": 1, "decay": 0.5})

    # 2 was pushed in the first of three passes. Two workers show 1 once a pass, and a half is left.
    assert saved_statistics(tmp_path / "rows") == {1: (2 * (0.5 + 0.25 + 0.125), 0.0, 1.0)}


def test_pass_ends_when_all_workers_have_ended_it(tmp_path: Path) -> None:
    """Worker 1 pushes while worker 0 waits in `shrink`."""
    waits = threading.Event()

    def work(tables: Tables) -> None:
        module = Embedding(2, table="items", optimizer=SGD)
        tables.attach(module)
        if tables.worker == 1:
            waits.wait(0.3)  # in vain: worker 0 could not be heard
            module(torch.tensor([1])).sum().backward()
            tables.push()
        tables.shrink()
        tables.save(str(tmp_path / "rows"))

    on_cluster(work, num_servers=2, mode="async", life={"statistics": True, "decay": 0.5})

    assert saved_statistics(tmp_path / "rows") == {1: (0.5, 0.0, 1.0)}


def test_rows_that_a_pass_removed_are_not_those_prefetched_before(tmp_path: Path) -> None:
    life = {"delete_threshold": 100.0}
    with open_tables(life=life) as tables:
        module = Embedding(1, table="items", init_range=0.0, optimizer=SGD)
        tables.attach(module)
        seen = []
        batches = [torch.tensor([1]), torch.tensor([1]), torch.tensor([1])]
        for keys in tables.prefetching(batches, lambda keys: {"items": keys}):
            found = module(keys)
            seen.append(found.item())
            found.sum().backward()
            tables.push()  # asks for the next batch's rows
            tables.shrink()  # and removes them

    assert seen == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("life", "clicked", "error", "message"),
    [
        ({}, {"items": [1]}, UsageError, r"'items', which keeps no statistics: open_tables\(life="),
        ({"statistics": True}, {"items": [1, 9]}, UsageError, "key 9 of table 'items'"),
        ({"statistics": True}, {"words": [1]}, UsageError, "key 1 of table 'words'"),
        ({"statistics": True}, {"items": [1, 1]}, GradientError, "more clicks than shows of key 1"),
    ],
)
def test_clicks_that_cannot_be_are_refused_before_the_push(
    life: Any, clicked: dict[str, list[int]], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with open_tables(life=life) as tables:
        module = Embedding(2, table="items")
        tables.attach(module)
        module(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(error, match=message):
            tables.push(clicked={table: torch.tensor(keys) for table, keys in clicked.items()})
        assert tables.version == 0
        tables.push()  # the gradients still wait
        tables.save(str(tmp_path / "rows"))
    assert sorted(key for key in rows_saved(tmp_path / "rows")) == [1, 2]


def test_clicks_of_a_step_that_is_refused_are_not_those_of_the_next() -> None:
    with open_tables(life={"statistics": True}) as tables:
        modules = [Embedding(2, table=name) for name in ("items", "words")]
        for module in modules:
            tables.attach(module)
            module(torch.tensor([1, 2])).sum().backward()

        with pytest.raises(UsageError, match="key 9 of table 'words'"):
            tables.push(clicked={"items": torch.tensor([1]), "words": torch.tensor([9])})

        counts = {name: grad.counts.tolist() for name, grad in tables.pending.merged().items()}
        assert counts == {"items": [[1, 0], [1, 0]], "words": [[1, 0], [1, 0]]}
        tables.push()


def test_gradients_that_are_dropped_count_nothing_and_those_pushed_once(tmp_path: Path) -> None:
    with open_tables(life={"statistics": True}) as tables:
        module, rows = Embedding(2, table="items"), PushOptimizer(tables)
        tables.attach(module)
        output = module(torch.tensor([1, 1, 2])).sum()
        for _ in range(3):
            rows.zero_grad()
            output.backward(retain_graph=True)
        rows.step(clicked={"items": torch.tensor([1])})
        output.backward(retain_graph=True)
        rows.zero_grad()
        output.backward()
        rows.step()
        tables.save(str(tmp_path / "rows"))

    assert {key: found[:2] for key, found in saved_statistics(tmp_path / "rows").items()} == {
        1: (2.0, 1.0),
        2: (1.0, 0.0),
    }


def test_rules_are_checked_as_those_of_a_job() -> None:
    with pytest.raises(JobError, match="life"), open_tables(life={"max_unsen": 3}):
        pass


def test_padding_has_no_row_and_is_not_counted(tmp_path: Path) -> None:
    with open_tables(life={"statistics": True}) as tables:
        module = Embedding(2, table="items", padding_idx=0, optimizer=SGD)
        tables.attach(module)
        module(torch.tensor([[5, 0], [5, 7]])).sum().backward()
        PushOptimizer(tables).step(clicked={"items": torch.tensor([7])})
        tables.save(str(tmp_path / "rows"))

    assert saved_statistics(tmp_path / "rows") == {5: (2, 0, 0), 7: (1, 1, 0)}
