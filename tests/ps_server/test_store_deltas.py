"""Deltas: rows that changed since the last checkpoint, on the chain of those before."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ctr_ps.protos.errors import CheckpointError, UnknownChangesError
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.spec import ExpirySpec, InitializerSpec, OptimizerSpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.publish import keep_last, write_latest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import compact, import_rows
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.store import ParameterStore
from tests.support.local_transport import LocalTransport, joined_client
from tests.support.stores import (
    DEEP,
    NEWEST,
    TOWER,
    WIDE,
    assert_same_parameters,
    declare,
    in_process,
    push_id,
    random_gradients,
    train,
    trained_chain,
)
from tests.support.stores import KEYS as ALL_KEYS

COUNTING = TableSpec(
    name="counting",
    dim=2,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
    num_shards=2,
    statistics=StatisticsSpec(nonclk_coeff=0.5, decay=0.5),
    expiry=ExpirySpec(delete_threshold=0.5),
)
NOW = 1000.0
KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)


def rows_of(checkpoint: Checkpoint, table: str) -> dict[int, tuple[list[float], list[float]]]:
    found = {}
    for _, rows in checkpoint.read_shards(table, range(checkpoint.tables[table].num_shards)):
        assert np.all(np.diff(rows.keys.astype(np.float64)) > 0)
        for i, key in enumerate(rows.keys.tolist()):
            found[key] = rows.weights[i].tolist(), rows.statistics[i, :3].tolist()
    return found


def test_a_chain_of_deltas_is_the_model_of_its_moment(tmp_path: Path) -> None:
    stores = {0: in_process()}
    train(stores[0], 0)
    trained_chain(tmp_path, 5)

    for i in range(6):
        expected, loaded = in_process(), in_process()
        train(expected, *range(i + 1))
        loaded.load(str(tmp_path / str(i)))
        checkpoint = Checkpoint.open(tmp_path / str(i))

        assert_same_parameters(expected, loaded)
        assert checkpoint.digest_of_files() == expected.digest()
        assert len(checkpoint.chain) == i + 1
        assert checkpoint.attachment("note") == str(i).encode()
        checkpoint.verify()


def test_a_chain_stands_anywhere() -> None:
    store = in_process()
    train(store, 0)
    store.save(SaveRequest(url="memory://deltas/0"))
    train(store, 1)
    store.save(SaveRequest(url="memory://deltas/1", base="memory://deltas/0"))

    checkpoint = Checkpoint.open("memory://deltas/1")
    assert checkpoint.digest_of_files() == store.digest()
    assert SavedModel(checkpoint).read("deep", ALL_KEYS).any(axis=1).sum() > 60


def test_a_delta_has_only_the_rows_that_changed(tmp_path: Path) -> None:
    trained_chain(tmp_path, 1)

    delta = Checkpoint.open(tmp_path / "1").manifest
    changed = sum(batch.rows for entry in delta.files_of_table("deep") for batch in entry.batches)
    assert changed == np.unique(random_gradients(1).sparse["deep"].keys).size
    assert delta.model_digest == ""
    assert (delta.kind, delta.base) == ("delta", "0")


@pytest.mark.parametrize("is_declared_first", [True, False])
def test_rows_that_a_load_has_rounded_are_in_no_delta_but_in_a_full_checkpoint(
    is_declared_first: bool, tmp_path: Path
) -> None:
    exact, half, again = in_process(), ParameterStore(), in_process()
    urls = [str(tmp_path / name) for name in "0123"]
    train(exact, 0)
    exact.save(SaveRequest(url=urls[0]))

    def declare_half() -> None:
        half.create_table(replace(DEEP, is_bfloat16=True))
        half.create_table(WIDE)
        half.create_dense(TOWER)

    if is_declared_first:
        declare_half()
    half.load(urls[0])
    declare_half()
    with pytest.raises(UnknownChangesError, match="save a full checkpoint"):
        half.save(SaveRequest(url=urls[1], base=urls[0]))
    half.save(SaveRequest(url=urls[2]))
    again.load(urls[2])
    again.save(SaveRequest(url=urls[3], base=urls[2]))

    assert half.digest() != exact.digest()
    assert again.digest() == half.digest()
    assert Checkpoint.open(urls[3]).digest_of_files() == half.digest()
    of_deep = Checkpoint.open(urls[3]).manifest.files_of_table("deep")
    assert sum(batch.rows for entry in of_deep for batch in entry.batches) == 0


def test_no_delta_is_saved_on_imported_rows_that_a_load_has_rounded(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in "012"]
    half = replace(DEEP, is_bfloat16=True)
    saved, loaded = ParameterStore(), ParameterStore()
    saved.create_table(half)
    saved.save(SaveRequest(url=urls[0]))
    import_rows(
        Checkpoint.open(urls[0]), urls[1], "deep", ALL_KEYS[:1], np.full((1, 5), 0.1, np.float32)
    )
    loaded.create_table(half)
    loaded.load(urls[1])

    with pytest.raises(UnknownChangesError, match="save a full checkpoint"):
        loaded.save(SaveRequest(url=urls[2], base=urls[1]))


def test_rows_of_bfloat16_are_rounded_alike_whichever_of_two_pushes_arrives_first() -> None:
    digests = set()
    for order in (0, 1), (1, 0):
        store = ParameterStore(num_workers=2)
        store.create_table(replace(DEEP, is_bfloat16=True))
        for worker in order:
            keys = ALL_KEYS[worker::2]
            grad = SparseGrad(keys, np.full((keys.size, 5), 0.3, np.float32), 7)
            pushed = push_id(worker=worker, sequence=0, pulled=NEWEST)
            store.push_grad(Gradients({"deep": grad}), pushed).result()
        digests.add(store.digest())

    assert len(digests) == 1


def test_a_delta_of_one_row_in_a_hundred_is_under_a_fiftieth(tmp_path: Path) -> None:
    spec = TableSpec(
        name="large", dim=10, initializer=InitializerSpec(), optimizer=OptimizerSpec(name="adagrad")
    )
    store = ParameterStore()
    store.create_table(spec)
    for sequence, keys in enumerate((np.arange(200_000), np.arange(0, 200_000, 100))):
        grad = SparseGrad(keys.astype(np.uint64), np.ones((keys.size, 10), np.float32), 1)
        store.push_grad(Gradients({"large": grad}), push_id(sequence=sequence)).result()
        base = str(tmp_path / str(sequence - 1)) if sequence else ""
        store.save(SaveRequest(url=str(tmp_path / str(sequence)), base=base))

    full, delta = (
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in ("0", "1")
    )
    assert delta < 0.02 * full


def test_compacted_is_what_a_full_checkpoint_would_be(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 3)

    compact(Checkpoint.open(tmp_path / "3"), tmp_path / "compact")

    compacted = Checkpoint.open(tmp_path / "compact")
    assert (compacted.manifest.kind, compacted.manifest.base) == ("full", None)
    assert compacted.model_digest == store.save(SaveRequest(url=str(tmp_path / "full")))
    assert compacted.manifest.version == Checkpoint.open(tmp_path / "3").manifest.version
    compacted.verify()


def test_going_on_from_a_loaded_checkpoint_saves_deltas_of_it(tmp_path: Path) -> None:
    trained_chain(tmp_path, 2)
    stores = [in_process(server_index=i, num_servers=3) for i in range(3)]
    client = joined_client(LocalTransport(stores))
    client.load(str(tmp_path / "2"))
    declare(client)
    train(client, 3)

    client.save(SaveRequest(url=str(tmp_path / "3"), base=str(tmp_path / "2")))

    checkpoint = Checkpoint.open(tmp_path / "3")
    assert checkpoint.digest_of_files() == client.digest()
    changed = sum(
        batch.rows
        for entry in checkpoint.manifest.files_of_table("deep")
        for batch in entry.batches
    )
    assert changed == np.unique(random_gradients(3).sparse["deep"].keys).size


def test_a_failed_save_gives_its_changes_to_the_next(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 0)
    train(store, 1)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()

    def fail() -> None:
        train(store, 2)
        raise KeyError

    with pytest.raises(KeyError):
        store.save(SaveRequest(url=str(tmp_path / "1"), base=str(tmp_path / "0"), on_snapshot=fail))
    store.save(SaveRequest(url=str(tmp_path / "2"), base=str(tmp_path / "0")))

    assert Checkpoint.open(tmp_path / "2").digest_of_files() == store.digest()


def test_deltas_are_of_their_moments_while_rows_change_come_and_go(tmp_path: Path) -> None:
    """A twin that nobody pushes to while it is saved says what each delta has to be; shards are full."""
    spec = replace(COUNTING, expiry=ExpirySpec(max_rows=128))
    pushed, twin = (ParameterStore(clock=lambda: NOW) for _ in range(2))
    random = np.random.default_rng(2)

    def some_push() -> Gradients:
        keys = random.choice(400, 30, replace=False).astype(np.uint64)
        values = random.integers(-3, 4, (30, 2)).astype(np.float32)
        return Gradients({"counting": SparseGrad(keys, values, 1, np.ones((30, 2), np.uint32))})

    for store in (pushed, twin):
        store.create_table(spec)
    sequence = 0
    for i in range(8):
        late = [some_push() for _ in range(3)]

        def push_all(store: ParameterStore, late=late, first=sequence) -> None:
            for j, gradients in enumerate(late):
                store.push_grad(gradients, push_id(sequence=first + j)).result()

        base = str(tmp_path / str(i - 1)) if i else ""
        twin.save(SaveRequest(url=str(tmp_path / "twin")))
        pushed.save(
            SaveRequest(url=str(tmp_path / str(i)), base=base, on_snapshot=lambda: push_all(pushed))
        )
        push_all(twin)
        sequence += len(late)

        delta, expected = Checkpoint.open(tmp_path / str(i)), Checkpoint.open(tmp_path / "twin")
        assert rows_of(delta, "counting") == rows_of(expected, "counting")
    assert pushed.status().tables["counting"].evicted > 0


def test_a_base_that_the_store_did_not_save_last_is_refused(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 1)

    with pytest.raises(CheckpointError, match=r"cannot save a delta .* save a full"):
        store.save(SaveRequest(url=str(tmp_path / "2"), base=str(tmp_path / "0")))
    with pytest.raises(CheckpointError, match=r"cannot save a delta .* is none: save a full"):
        in_process().save(SaveRequest(url=str(tmp_path / "2"), base=str(tmp_path / "1")))

    assert not (tmp_path / "2").exists()
    store.save(SaveRequest(url=str(tmp_path / "2"), base=str(tmp_path / "1")))


def test_a_table_that_is_newer_than_the_base_is_refused(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 0)
    store.create_table(COUNTING)

    with pytest.raises(
        CheckpointError,
        match="table 'counting' since the last checkpoint are unknown: since then it was created",
    ):
        store.save(SaveRequest(url=str(tmp_path / "1"), base=str(tmp_path / "0")))

    store.save(SaveRequest(url=str(tmp_path / "1")))
    store.save(SaveRequest(url=str(tmp_path / "2"), base=str(tmp_path / "1")))


def test_a_delta_stands_beside_its_base_and_replaces_nothing_it_needs(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 1)

    with pytest.raises(CheckpointError, match="both must be in one folder"):
        store.save(SaveRequest(url=str(tmp_path / "elsewhere" / "2"), base=str(tmp_path / "1")))
    for needed in ("0", "1"):
        with pytest.raises(CheckpointError, match="which it needs: choose another name"):
            store.save(SaveRequest(url=str(tmp_path / needed), base=str(tmp_path / "1")))


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    trained_chain(tmp_path, 3)
    shutil.rmtree(tmp_path / "1")

    for name in ("2", "3"):
        with pytest.raises(CheckpointError, match=rf"the base {tmp_path}/1 of .*2 was removed"):
            Checkpoint.open(tmp_path / name)
    Checkpoint.open(tmp_path / "0")


def test_a_base_that_was_replaced_is_named(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 2)
    store.save(SaveRequest(url=str(tmp_path / "0")))

    with pytest.raises(CheckpointError, match=rf"the base {tmp_path}/0 of .*1 was replaced"):
        Checkpoint.open(tmp_path / "2")


def test_a_damaged_base_is_named(tmp_path: Path) -> None:
    trained_chain(tmp_path, 1)
    [file] = (tmp_path / "0").rglob("table.deep*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    with pytest.raises(CheckpointError, match=str(file)):
        Checkpoint.open(tmp_path / "1").verify()
    with pytest.raises(CheckpointError, match=str(file)):
        in_process().load(str(tmp_path / "1"))

    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing from the checkpoint"):
        Checkpoint.open(tmp_path / "1")


def test_old_checkpoints_that_a_kept_delta_needs_stay(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 2)
    write_latest(tmp_path, "2")

    assert keep_last(tmp_path, 1, "012") == []

    store.save(SaveRequest(url=str(tmp_path / "3")))
    write_latest(tmp_path, "3")
    assert sorted(keep_last(tmp_path, 1, "0123")) == ["0", "1", "2"]


def test_more_removed_keys_than_rows_ask_for_a_full_checkpoint(tmp_path: Path) -> None:
    spec = replace(COUNTING, expiry=None, num_shards=1)
    store = ParameterStore()
    store.create_table(spec)
    store.save(SaveRequest(url=str(tmp_path / "0")))
    keys = np.arange(5000, dtype=np.uint64)
    grad = SparseGrad(keys, np.zeros((5000, 2), np.float32), 1, np.ones((5000, 2), np.uint32))
    for sequence in range(2):
        store.push_grad(Gradients({"counting": grad}), push_id(sequence=sequence)).result()
        store.shrink(max_norm=0.0)

    with pytest.raises(CheckpointError, match=r"lost more rows than it has; save a full"):
        store.save(SaveRequest(url=str(tmp_path / "1"), base=str(tmp_path / "0")))


def test_rows_that_nobody_pushes_age_from_base_to_delta(tmp_path: Path) -> None:
    """Also over two deltas; a shrink changes all rows, and yet a delta has only those that were pushed."""
    store = ParameterStore(clock=lambda: NOW)
    store.create_table(COUNTING)
    keys = np.arange(8, dtype=np.uint64)
    counts = np.array([[64, 32]] * 8, np.uint32)
    grad = SparseGrad(keys, np.ones((8, 2), np.float32), 1, counts)
    store.push_grad(Gradients({"counting": grad}), push_id()).result()
    store.save(SaveRequest(url=str(tmp_path / "0")))
    for i in (1, 2):
        store.shrink()
        store.shrink()
        pushed = SparseGrad(keys[:i], np.ones((i, 2), np.float32), 1, counts[:i])
        store.push_grad(Gradients({"counting": pushed}), push_id(sequence=i)).result()
        store.shrink(dry_run=True)
        store.save(SaveRequest(url=str(tmp_path / str(i)), base=str(tmp_path / str(i - 1))))

    store.save(SaveRequest(url=str(tmp_path / "full")))
    delta, full = Checkpoint.open(tmp_path / "2"), Checkpoint.open(tmp_path / "full")
    assert rows_of(delta, "counting") == rows_of(full, "counting")
    assert rows_of(delta, "counting")[7][1] == [4.0, 2.0, 4.0]
    [entry] = delta.manifest.files_of_table("counting")
    assert sum(batch.rows for batch in entry.batches) == 2


def test_a_failed_save_gives_its_passes_and_removals_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass before the failed save and one after it; the first removes a key with a single show."""
    store = ParameterStore(clock=lambda: NOW)
    store.create_table(COUNTING)
    keys = np.arange(9, dtype=np.uint64)
    counts = np.array([[64, 32]] * 8 + [[1, 0]], np.uint32)
    grad = SparseGrad(keys, np.ones((9, 2), np.float32), 1, counts)
    store.push_grad(Gradients({"counting": grad}), push_id()).result()
    store.save(SaveRequest(url=str(tmp_path / "0")))
    base = str(tmp_path / "0")

    def fail(*_: object, **__: object) -> None:
        raise KeyError

    store.shrink()
    with monkeypatch.context() as patch:
        patch.setattr("ctr_ps.ps_server.engine.engine.write_share", fail)
        with pytest.raises(KeyError):
            store.save(SaveRequest(url=str(tmp_path / "1"), base=base))
    store.shrink()
    store.save(SaveRequest(url=str(tmp_path / "2"), base=base))

    store.save(SaveRequest(url=str(tmp_path / "full")))
    delta, full = Checkpoint.open(tmp_path / "2"), Checkpoint.open(tmp_path / "full")
    assert rows_of(delta, "counting") == rows_of(full, "counting")
    assert rows_of(delta, "counting").keys() == set(range(8))
    assert rows_of(delta, "counting")[7][1] == [16.0, 8.0, 2.0]


@dataclass
class Saved:
    name: str
    rows: dict[int, tuple[list[float], list[float]]]


class DeltaMachine(RuleBasedStateMachine):
    folder: Path

    @initialize(num_servers=st.integers(1, 3))
    def start(self, num_servers: int) -> None:
        self.rows: dict[int, tuple[list[float], list[float]]] = {}
        self.saved: list[Saved] = []
        self.sequence = 0
        self.root = self.folder / str(len(list(self.folder.iterdir())))
        self.root.mkdir()
        self.base = ""
        self.serve(num_servers)

    def serve(self, num_servers: int) -> None:
        stores = [
            ParameterStore(server_index=i, num_servers=num_servers, clock=lambda: NOW)
            for i in range(num_servers)
        ]
        self.client = joined_client(LocalTransport(stores))
        self.client.create_table(COUNTING)

    @rule(keys=KEYS, value=st.integers(-3, 3), click=st.integers(0, 1))
    def push(self, keys: list[int], value: int, click: int) -> None:
        column = np.array(keys, np.uint64)
        values = np.full((column.size, 2), value, np.float32)
        counts = np.tile(np.array([[1, click]], np.uint32), (column.size, 1))
        grad = SparseGrad(column, values, 1, counts)
        self.client.push_grad(
            Gradients({"counting": grad}), push_id(sequence=self.sequence)
        ).result()
        self.sequence += 1
        for key in keys:
            weights, (show, clicks, _) = self.rows.get(key, ([0.0, 0.0], [0.0, 0.0, 0.0]))
            self.rows[key] = [weight - value for weight in weights], [show + 1, clicks + click, 0.0]

    @rule()
    def shrink(self) -> None:
        self.client.shrink()
        aged = {
            key: (weights, [0.5 * show, 0.5 * click, unseen + 1])
            for key, (weights, (show, click, unseen)) in self.rows.items()
        }
        self.rows = {
            key: (weights, [show, click, unseen])
            for key, (weights, [show, click, unseen]) in aged.items()
            if 0.5 * (show - click) + click >= 0.5
        }

    @rule(is_delta=st.booleans())
    def save(self, is_delta: bool) -> None:
        name = str(len(self.saved))
        base = f"{self.root}/{self.base}" if is_delta and self.base else ""
        self.client.save(SaveRequest(url=f"{self.root}/{name}", base=base))
        self.base = name
        self.saved.append(Saved(name, dict(self.rows)))

        checkpoint = Checkpoint.open(self.root / name)
        assert rows_of(checkpoint, "counting") == self.rows
        assert checkpoint.digest_of_files() == self.client.digest()
        keys = np.arange(12, dtype=np.uint64)
        expected = [self.rows.get(key, ([0.0, 0.0], []))[0] for key in range(12)]
        assert SavedModel(checkpoint).read("counting", keys).tolist() == expected

    @rule(data=st.data(), num_servers=st.integers(1, 3))
    def load(self, data: st.DataObject, num_servers: int) -> None:
        if not self.saved:
            return
        saved = data.draw(st.sampled_from(self.saved))
        self.serve(num_servers)
        self.client.load(f"{self.root}/{saved.name}")
        self.rows, self.base = dict(saved.rows), saved.name


def test_deltas_agree_with_a_dictionary_in_any_order(tmp_path: Path) -> None:
    machine = type("Machine", (DeltaMachine,), {"folder": tmp_path})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=15, stateful_step_count=15, deadline=None)
    )
