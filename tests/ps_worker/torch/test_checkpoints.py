"""Saving and loading of tables, and what `state_dict` says of them."""

import copy
import io
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import nn  # noqa: E402

from ctr_ps.protos.errors import CheckpointError, UsageError  # noqa: E402
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel  # noqa: E402
from ctr_ps.ps_worker.torch import Embedding, PushOptimizer, Tables, open_tables, swap_embeddings  # noqa: E402
from tests.support.commands import run  # noqa: E402
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


def through_a_file(state: Any) -> Any:
    """Returns what torch.save and torch.load make of it, the latter without running code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_training_goes_on_from_a_checkpoint_as_if_never_stopped(tmp_path: Path) -> None:
    batches, url = net_batches(8, seed=1), str(tmp_path / "rows")
    states: list[Any] = []
    expected: list[Any] = []

    def work(tables: Tables) -> None:
        net = Net(ADAGRAD)
        tables.attach(net)
        train_net(tables, net, batches[:4])
        tables.save(url)
        states.extend(copy.deepcopy([net.state_dict(), PushOptimizer(tables).state_dict()]))
        train_net(tables, net, batches[4:])
        expected.extend(rows_of(net))

    on_cluster(work, num_servers=2, num_workers=1)

    with open_tables() as tables:
        net = Net(ADAGRAD, seed=9)
        tables.attach(net)
        tables.load(url)
        for part, state in zip((net, PushOptimizer(tables)), states, strict=True):
            part.load_state_dict(through_a_file(state))
        train_net(tables, net, batches[4:])

        for found, wanted in zip(rows_of(net), expected, strict=True):
            assert torch.equal(found, wanted)


def rates_of(tables: Tables, steps: int) -> list[float]:
    """Returns the learning rates at which a row of an SGD table changes in each step, of gradient 1."""
    module = Embedding(1, table="items", optimizer={"name": "sgd", "learning_rate": 1.0})
    optimizer, rates = PushOptimizer(tables), []
    tables.attach(module)
    key = torch.zeros(1, dtype=torch.int64)
    for _ in range(steps):
        optimizer.zero_grad()
        before = module(key)
        before.sum().backward()
        optimizer.step()
        with torch.no_grad():
            rates.append((before - module(key)).item())
    return rates


@pytest.mark.parametrize(("mode", "batches"), [("sync", 2), ("async", 1)])
@pytest.mark.parametrize("resume", [True, False])
def test_schedule_goes_on_from_a_checkpoint_that_is_resumed(
    resume: bool, mode: str, batches: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of two workers is two batches; one worker trains them one by one."""
    url, steps = str(tmp_path / "rows"), 3
    schedule = {"kind": "linear", "total_steps": 16}
    settings: dict[str, Any] = {"mode": mode, "schedule": schedule, "num_workers": batches}
    expected = [1 - batches * step / 16 for step in range(2 * steps)]
    seen: list[list[float]] = []

    def work(tables: Tables) -> None:
        seen.append(rates_of(tables, steps))
        tables.save(url)

    def go_on(tables: Tables) -> None:
        tables.attach(Embedding(1, table="items", optimizer={"name": "sgd", "learning_rate": 1.0}))
        tables.load(url, resume=resume)
        seen.append(rates_of(tables, steps))

    on_cluster(work, num_servers=2, **settings)
    assert not caplog.text
    with caplog.at_level("INFO", "ctr_ps.ps_worker.torch.tables"):
        on_cluster(go_on, num_servers=2, **settings)

    for found in seen[:batches]:
        np.testing.assert_allclose(found, expected[:steps], rtol=1e-5)
    for found in seen[batches:]:
        np.testing.assert_allclose(
            found, expected[steps:] if resume else expected[:steps], rtol=1e-5
        )
    assert (f"to continue it at step {batches * steps}" in caplog.text) == (not resume)


def test_checkpoint_is_read_as_any_other(tmp_path: Path) -> None:
    url = str(tmp_path / "rows")
    rows: list[Any] = []

    def work(tables: Tables) -> None:
        net = Net(SGD)
        tables.attach(net)
        train_net(tables, net, net_batches(3, seed=tables.worker))
        tables.save(url)
        if tables.worker == 0:
            rows.append(net.eval().words(torch.arange(NUM_KEYS)))

    on_cluster(work, num_servers=2)

    keys = np.arange(NUM_KEYS, dtype=np.uint64)
    np.testing.assert_array_equal(SavedModel.open(url).read("words", keys), rows[0].numpy())
    for command in ("inspect", "verify"):
        done = run("ps-ckpt", command, url)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("num_servers", [1, 2])
def test_state_is_saved_and_loaded_with_the_rows(tmp_path: Path, num_servers: int) -> None:
    """Two workers save after each step; a run that was cut off goes on from the folder's latest."""
    batches, folder = net_batches(6, seed=1), tmp_path / "run"
    ended: dict[str, list[Any]] = {"whole": [], "cut": []}

    def work(tables: Tables, name: str, steps: range) -> None:
        net = Net(ADAGRAD)
        nn.init.constant_(net.linear.weight, 0.1 * steps.start)  # equal on both, as no DDP is here
        nn.init.zeros_(net.linear.bias)
        tables.attach(net)
        dense = torch.optim.Adam(net.linear.parameters(), lr=0.1)
        if steps.start:
            state = tables.load(str(folder), resume=True)
            net.load_state_dict(state["model"])
            dense.load_state_dict(state["dense"])
            assert state["step"] == steps.start == tables.version
        rows = PushOptimizer(tables)
        for step in steps:
            dense.zero_grad(), rows.zero_grad()
            net.loss(batches[step]).backward()
            dense.step(), rows.step()
            state = {"model": net.state_dict(), "dense": dense.state_dict(), "step": step + 1}
            if name == "cut" and tables.worker == 0:
                state["noise"] = torch.rand(3)
            if name == "cut":
                tables.save(str(folder / f"step-{step + 1}"), state=state)
        if tables.worker == 0:
            ended[name].append(rows_of(net))

    on_cluster(partial(work, name="whole", steps=range(6)))
    on_cluster(partial(work, name="cut", steps=range(4)), num_servers=num_servers)
    assert (folder / "LATEST").read_text().strip() == "step-4"
    on_cluster(partial(work, name="cut", steps=range(4, 6)), num_servers=num_servers)

    for found, wanted in zip(ended["cut"][1], ended["whole"][0], strict=True):
        assert torch.equal(found, wanted)
    with open_tables() as tables:
        tables.attach(Net(ADAGRAD))
        assert tables.load(str(folder / "step-2"))["step"] == 2


def test_state_of_a_checkpoint_that_came_while_loading_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tables() as tables:
        tables.attach(Net(SGD))
        for name in ("old", "new"):
            tables.save(str(tmp_path / name), state={"name": name})

    with open_tables() as tables:
        tables.attach(Net(SGD))
        load = tables._store.load

        def load_and_lose(*args: Any, **kwargs: Any) -> None:
            load(*args, **kwargs)
            shutil.rmtree(tmp_path / "old")
            (tmp_path / "new").rename(tmp_path / "old")

        monkeypatch.setattr(tables._store, "load", load_and_lose)
        with pytest.raises(CheckpointError, match="old was replaced while it was loaded"):
            tables.load(str(tmp_path / "old"))


def test_state_that_no_load_would_take_is_refused(tmp_path: Path) -> None:
    with open_tables() as tables:
        tables.attach(Net(SGD))
        with pytest.raises(
            UsageError, match=r"state has pathlib\.PosixPath, expected only tensors"
        ):
            tables.save(str(tmp_path / "rows"), state={"folder": tmp_path})
        for state in ({"rate": lambda: 0}, [1], {"lock": threading.Lock()}):
            with pytest.raises(UsageError, match="state has a Python object, expected only"):
                tables.save(str(tmp_path / "rows"), state=state)  # type: ignore[arg-type]
        assert not (tmp_path / "rows").exists()
        tables.save(str(tmp_path / "rows"))

    with open_tables() as tables:
        tables.attach(Net(SGD))
        assert tables.load(str(tmp_path / "rows")) == {}


def test_delta_is_loaded_with_its_base(tmp_path: Path) -> None:
    with open_tables() as tables:
        net = Net(SGD)
        tables.attach(net)
        train_net(tables, net, net_batches(2, seed=1))
        tables.save(str(tmp_path / "base"))
        train_net(tables, net, net_batches(1, seed=2))
        tables.save(str(tmp_path / "delta"), base=str(tmp_path / "base"))
        expected = rows_of(net)[:2]

    with open_tables() as tables:
        net = Net(SGD)
        tables.attach(net)
        tables.load(str(tmp_path / "delta"))

        for found, wanted in zip(rows_of(net), expected, strict=False):
            assert torch.equal(found, wanted)


def test_checkpoint_that_cannot_be_loaded_is_an_error_of_all_workers(tmp_path: Path) -> None:
    def work(tables: Tables) -> None:
        tables.attach(Net(SGD))
        cause = "no checkpoint" if tables.worker == 0 else "worker 0 could not load"
        with pytest.raises(CheckpointError, match=cause):
            tables.load(str(tmp_path / "nothing"))
        tables.barrier()

    on_cluster(work)


@pytest.mark.parametrize("exists", [True, False])
def test_load_after_a_step_is_refused_and_changes_nothing(exists: bool, tmp_path: Path) -> None:
    def train(*, loads: bool) -> list[Any]:
        with open_tables() as tables:
            net = Net(ADAGRAD)
            tables.attach(net)
            if exists:
                tables.save(str(tmp_path / "rows"), overwrite=True)
            train_net(tables, net, net_batches(1, seed=1))
            if loads:
                with pytest.raises(UsageError, match="cannot be loaded after 1 step"):
                    tables.load(str(tmp_path / "rows"))
            train_net(tables, net, net_batches(2, seed=2))
            return rows_of(net)

    for found, expected in zip(train(loads=True), train(loads=False), strict=True):
        assert torch.equal(found, expected)


def test_save_that_fails_leaves_the_checkpoint_that_it_would_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, keys = str(tmp_path / "rows"), np.arange(NUM_KEYS, dtype=np.uint64)

    def fail(*_: object) -> str:
        raise CheckpointError("the disk is full")

    with open_tables() as tables:
        net = Net(ADAGRAD)
        tables.attach(net)
        train_net(tables, net, net_batches(2, seed=1))
        tables.save(url, state={"step": 2})
        before = SavedModel.open(url).read("words", keys)
        train_net(tables, net, net_batches(2, seed=2))
        with monkeypatch.context() as patch:
            patch.setattr("ctr_ps.ps_server.checkpoint.publish.manifest_to_json", fail)
            with pytest.raises(CheckpointError, match="disk is full"):
                tables.save(url, state={"step": 4})
        np.testing.assert_array_equal(SavedModel.open(url).read("words", keys), before)
        tables.save(url, state={"step": 4})
        assert not np.array_equal(SavedModel.open(url).read("words", keys), before)

    with open_tables() as tables:
        tables.attach(Net(ADAGRAD))
        assert tables.load(url) == {"step": 4}


def test_state_of_another_table_is_refused() -> None:
    state = Embedding(2, table="items").state_dict()

    Embedding(2, table="items").load_state_dict(state)
    for other in (Embedding(2, table="words"), Embedding(3, table="items")):
        with pytest.raises(
            CheckpointError, match=r"the state is of {'table': 'items', 'dim': 2}, but"
        ):
            other.load_state_dict(state)


def test_state_of_another_number_of_keys_is_refused() -> None:
    state = swap_embeddings(nn.Embedding(5, 2)).state_dict()

    swap_embeddings(nn.Embedding(5, 2)).load_state_dict(state)
    del state["weight"]  # as after an attach
    swap_embeddings(nn.Embedding(5, 2)).load_state_dict(state)
    for other in (swap_embeddings(nn.Embedding(3, 2)), Embedding(2, table="embedding")):
        with pytest.raises(CheckpointError, match=r"state is of .*'num_embeddings': 5}, but"):
            other.load_state_dict(state)


def test_checkpoint_of_other_tables_is_refused_both_ways(tmp_path: Path) -> None:
    both, one = str(tmp_path / "both"), str(tmp_path / "one")
    with open_tables() as tables:
        tables.attach(Embedding(2, table="items"))
        tables.save(one)
        tables.attach(Embedding(2, table="words"))
        tables.save(both)

    with open_tables() as tables:
        with pytest.raises(UsageError, match="cannot be loaded before attach"):
            tables.load(one)
        tables.attach(Embedding(2, table="items"))
        with pytest.raises(
            CheckpointError, match=r"rows {'items': 0, 'words': 0}, the model {'items': 0}"
        ):
            tables.load(both)
        tables.load(one)
        tables.attach(Embedding(2, table="words"))
        with pytest.raises(CheckpointError, match="it has no words, only items"):
            tables.load(one)
        tables.load(both)


@pytest.mark.parametrize("number", [4, 6])
def test_checkpoint_of_another_number_of_keys_is_refused(tmp_path: Path, number: int) -> None:
    base, delta = str(tmp_path / "base"), str(tmp_path / "delta")
    module = swap_embeddings(nn.Embedding(5, 2))
    with open_tables(optimizer=SGD) as tables:
        tables.attach(module)
        tables.save(base)
        module(torch.tensor([1])).sum().backward()
        PushOptimizer(tables).step()
        tables.save(delta, base=base)
        expected = module.weight.detach().clone()

    for url in (base, delta):
        with open_tables(optimizer=SGD) as tables:
            other = swap_embeddings(nn.Embedding(number, 2))
            before = other.weight.detach().clone()
            tables.attach(other)
            with pytest.raises(CheckpointError, match=f"rows {{'embedding': 5}}, .*: {number}"):
                tables.load(url)
            assert torch.equal(other.weight, before)

    with open_tables(optimizer=SGD) as tables:
        other = swap_embeddings(nn.Embedding(5, 2))
        tables.attach(other)
        tables.load(delta)
        assert torch.equal(other.weight, expected)


def test_checkpoint_of_a_loaded_folder_is_the_one_that_was_latest(tmp_path: Path) -> None:
    url = str(tmp_path / "1")
    with open_tables() as tables:
        tables.attach(Embedding(2, table="items"))
        tables.save(url)

    with open_tables() as tables:
        tables.attach(Embedding(2, table="items"))
        tables.load(str(tmp_path))

        assert tables.checkpoint == PushOptimizer(tables).state_dict()["checkpoint"] == url
        tables.save(str(tmp_path / "2"), base=tables.checkpoint)
        tables.load(str(tmp_path))
        tables.save(f"{tmp_path}/../{tmp_path.name}/2")


def test_rows_that_a_pass_changed_are_not_those_of_the_checkpoint(tmp_path: Path) -> None:
    with open_tables(life={"max_unseen": 1}) as tables:
        tables.attach(Embedding(2, table="items"))
        tables.save(str(tmp_path / "1"))
        tables.shrink()
        with pytest.raises(UsageError, match=r"rows have changed since .*call Tables.save"):
            PushOptimizer(tables).state_dict()

        tables.load(str(tmp_path / "1"))

        assert PushOptimizer(tables).state_dict()["checkpoint"] == str(tmp_path / "1")
        tables.shrink()
        tables.save(str(tmp_path / "2"))
        assert PushOptimizer(tables).state_dict()["checkpoint"] == str(tmp_path / "2")


def test_state_of_rows_that_were_not_saved_is_refused() -> None:
    with open_tables() as tables:
        net = Net(SGD)
        tables.attach(net)
        train_net(tables, net, net_batches(1, seed=1))

        with pytest.raises(UsageError, match=r"rows have changed since .*call Tables.save"):
            PushOptimizer(tables).state_dict()


def states_of_two(folder: Path) -> list[dict[str, Any]]:
    """Saves two models as `0` and `1`; returns the state of each one's optimizer."""
    states = []
    for number in range(2):
        with open_tables() as tables:
            net = Net(SGD)
            tables.attach(net)
            train_net(tables, net, net_batches(number + 1, seed=1))
            tables.save(str(folder / str(number)))
            states.append(PushOptimizer(tables).state_dict())
    return states


def test_state_names_what_was_loaded_though_a_newer_checkpoint_came(tmp_path: Path) -> None:
    """Of a folder the newest is loaded; all workers say afterwards which one it was."""
    folder = tmp_path / "all"
    states = states_of_two(tmp_path)
    folder.mkdir()
    shutil.copytree(tmp_path / "0", folder / "0")
    (folder / "LATEST").write_text("0")
    loaded = threading.Barrier(2, timeout=60)

    def work(tables: Tables) -> None:
        tables.attach(Net(SGD))
        tables.load(str(folder))
        if loaded.wait() == 0:
            shutil.copytree(tmp_path / "1", folder / "1")
            (folder / "LATEST").write_text("1")
        loaded.wait()
        PushOptimizer(tables).load_state_dict(states[0])
        with pytest.raises(
            CheckpointError,
            match=r"the state belongs to the rows in .*, but the open tables have the rows of",
        ):
            PushOptimizer(tables).load_state_dict(states[1])

    on_cluster(work)


def test_state_of_another_checkpoint_or_of_other_tables_is_refused(tmp_path: Path) -> None:
    states = states_of_two(tmp_path)

    with open_tables() as tables:
        tables.attach(Net(SGD))
        tables.load(str(tmp_path / "0"))
        optimizer = PushOptimizer(tables)
        optimizer.load_state_dict(states[0])
        with pytest.raises(
            CheckpointError, match=r"rows in '.*/1', but the open tables have the rows of '.*/0'"
        ):
            optimizer.load_state_dict(states[1])
        tables.attach(Embedding(2, table="more"))
        with pytest.raises(
            CheckpointError, match=r"the state is of tables .*, but the open tables are"
        ):
            optimizer.load_state_dict(states[0])


def test_checkpoint_of_others_is_replaced_only_by_overwrite(tmp_path: Path) -> None:
    """A loop that trains nothing cannot lose what an earlier one has learnt."""
    url, other = str(tmp_path / "rows"), str(tmp_path / "other")
    with open_tables() as tables:
        tables.attach(Embedding(2, table="items"))
        tables.save(url)
        tables.save(other)
        with pytest.raises(CheckpointError, match=r"checkpoint at .*/rows: .*overwrite=True"):
            tables.save(url)
    before = (tmp_path / "rows/MANIFEST.json").read_bytes()

    with open_tables() as tables:
        tables.attach(Embedding(2, table="items"))
        with pytest.raises(CheckpointError, match=r"checkpoint at .*/rows: .*overwrite=True"):
            tables.save(url)
        assert (tmp_path / "rows/MANIFEST.json").read_bytes() == before
        tables.load(url)
        tables.save(url)  # goes on
        tables.save(other, overwrite=True)

    assert (tmp_path / "rows/MANIFEST.json").read_bytes() != before
