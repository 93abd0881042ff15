"""Passes on a device, here the CPU: the model that training on the store gives, and when rows move."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402

from ctr_ps.ctr_model.batch import Batch  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import Batch as SeenBatch  # noqa: E402
from ctr_ps.ctr_model.torch import SlotEmbedding, TorchModel  # noqa: E402
from ctr_ps.protos.errors import AbortedError, GradientError, UsageError  # noqa: E402
from ctr_ps.protos.keys import Keys  # noqa: E402
from ctr_ps.protos.store import ModelState, PushId, SaveRequest, Store  # noqa: E402
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS  # noqa: E402
from ctr_ps.ps_server.store import ParameterStore  # noqa: E402
from ctr_ps.ps_worker.extras.device_pass import pass_steps, pass_trainer  # noqa: E402
from ctr_ps.ps_worker.extras.device_pass.pass_steps import StepGraph, StepResults  # noqa: E402
from ctr_ps.ps_worker.extras.device_pass.pass_table import PassBlock, PassTable  # noqa: E402
from ctr_ps.ps_worker.job import Job  # noqa: E402
from ctr_ps.ps_worker.job.model import DENSE_BLOCK  # noqa: E402
from ctr_ps.ps_worker.run.run import Run  # noqa: E402
from tests.support.cluster import cluster  # noqa: E402
from tests.support.training import NUM_DENSE, NUM_SLOTS, job, random_batches, worker_run  # noqa: E402

SCHEMA = Schema.numbered(NUM_DENSE, NUM_SLOTS)
BATCH_SIZE = 16
LIMIT_S = 20.0
SPARSE = sorted(OPTIMIZERS.keys() - {"sum"})
DENSE = [name for name in SPARSE if OPTIMIZERS[name].is_elementwise]


class Net(nn.Module):
    """Every pooling, tables of several slots, and one that two embeddings share."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        first, second, *_ = schema.slots
        self.all = SlotEmbedding(dim=3, init_range=0.1, table="shared")
        self.largest = SlotEmbedding([first], dim=3, init_range=0.1, pooling="max", table="shared")
        self.mean = SlotEmbedding([second, first], dim=2, init_range=0.1, pooling="mean")
        self.apart = SlotEmbedding([first], dim=2, init_range=0.1, pooling="none", table="mean")
        self.out = nn.Linear(schema.num_dense + NUM_SLOTS * 3 + 3 + 4 + 2, 1)

    def forward(self, batch: SeenBatch) -> Tensor:
        parts = [
            self.all(batch),
            self.largest(batch),
            self.mean(batch),
            self.apart(batch)[0].sum(2),
        ]
        flat = [part.flatten(1) for part in parts]
        return self.out(torch.cat([batch.dense, *flat], dim=1))


class Product(nn.Module):
    """The gradient of a row of the first slot is the sum of the first dense input."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        sgd: dict[str, str | float] = {"name": "sgd", "learning_rate": 1.0}
        self.t = SlotEmbedding([schema.slots[0]], dim=1, init_range=0.0, optimizer=sgd)

    def forward(self, batch: SeenBatch) -> Tensor:
        return self.t(batch).flatten(1).sum(1)

    def loss(self, batch: SeenBatch, output: Tensor) -> Tensor:
        return output * batch.dense[:, 0]

    def probabilities(self, batch: SeenBatch, output: Tensor) -> Tensor:
        return torch.full((batch.size,), 0.5)


def model(seed: int = 0) -> TorchModel:
    return TorchModel(SCHEMA, Net, seed=seed)


def batches(num_batches: int = 12, *, seed: int = 0, num_values: int = 150) -> list[Batch]:
    """Returns batches whose slots have none to three keys, most of them in several batches."""
    rng = np.random.default_rng(seed)
    found = []
    for batch in random_batches(num_batches, BATCH_SIZE, seed=seed):
        counts = rng.integers(0, 4, BATCH_SIZE * NUM_SLOTS)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        keys = rng.integers(0, num_values, offsets[-1]).astype(np.uint64)
        # Above the largest int64, too.
        spread = keys * np.uint64(2**64 // num_values)
        found.append(replace(batch, keys=spread, offsets=offsets))
    return found


def settings(*overrides: str, mode: str = "half_async") -> Job:
    return job(mode, f"train.batch_size={BATCH_SIZE}", "train.seed=3", *overrides)


def on_device(
    pass_batches: int, *overrides: str, mode: str = "half_async", kind: str = "cpu"
) -> Job:
    where = ("device.tables=pass", f"device.kind={kind}", "data.in_memory=true")
    return settings(*where, f"device.pass_rows={pass_batches * BATCH_SIZE}", *overrides, mode=mode)


def train(
    store: Store,
    how: Job,
    epochs: Sequence[Sequence[Batch]],
    *,
    is_in_process: bool = True,
    **callbacks: Callable[[], Any],
) -> Run:
    with worker_run(store, model(), how, is_in_process=is_in_process) as run:
        for number, epoch in enumerate(epochs):
            run.train(epoch, **callbacks)
            run.barrier(f"epoch-{number}")
    return run


def keys_of(data: Sequence[Sequence[Batch]]) -> Keys:
    return np.unique(np.concatenate([batch.keys for epoch in data for batch in epoch]))


def assert_same_model(expected: Store, actual: Store, keys: Keys) -> None:
    """Weights and optimizer state within 1e-5, the same rows, and the same progress."""
    names = {"shared": keys, "mean": keys}
    wanted, found = (each.pull_state(names, [DENSE_BLOCK]).result() for each in (expected, actual))
    for name in names:
        for what in ("weights", "state"):
            close(getattr(found.rows[name], what), getattr(wanted.rows[name], what))
    for what in ("weights", "element_state", "scalars"):
        close(getattr(found.blocks[DENSE_BLOCK], what), getattr(wanted.blocks[DENSE_BLOCK], what))
    statuses = expected.status(), actual.status()
    rows = [{name: table.rows for name, table in each.tables.items()} for each in statuses]
    assert rows[0] == rows[1]
    assert [each.version for each in statuses] == [statuses[0].version] * 2
    assert statuses[0].examples == statuses[1].examples
    assert statuses[0].progress[0].step == statuses[1].progress[0].step


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def trained_alike(data: Sequence[Sequence[Batch]], on_store: Job, by_passes: Job) -> Run:
    """Returns the run by passes, which has to give the model of training on the store."""
    expected, actual = ParameterStore(), ParameterStore()
    train(expected, on_store, data)
    run = train(actual, by_passes, data)
    assert_same_model(expected, actual, keys_of(data))
    return run


@pytest.mark.parametrize(
    ("sparse", "dense"),
    [(name, DENSE[i % len(DENSE)]) for i, name in enumerate(SPARSE)]
    + [("adagrad", name) for name in DENSE],
)
def test_passes_give_the_model_of_training_on_the_store(sparse: str, dense: str) -> None:
    """Three passes an epoch, which share most of their keys, and two epochs."""
    optimizers = [
        f"optimizer.{kind}={{name='{name}', learning_rate=0.1}}"
        for kind, name in (("sparse", sparse), ("dense", dense))
    ]
    data = [batches(seed=1), batches(seed=2)]
    trained_alike(data, settings(*optimizers), on_device(5, *optimizers))


def test_clipping_is_that_of_training_on_the_store() -> None:
    """Of the norm over all rows and dense parameters, each row once."""
    data = [batches(seed=1)]
    stores = [ParameterStore() for _ in range(3)]

    train(stores[0], settings("train.clip_norm=0.05"), data)
    train(stores[1], on_device(5, "train.clip_norm=0.05"), data)
    train(stores[2], settings(), data)

    assert_same_model(stores[0], stores[1], keys_of(data))
    norms = [
        np.linalg.norm(
            store.pull_state({}, [DENSE_BLOCK]).result().blocks[DENSE_BLOCK].element_state
        )
        for store in stores
    ]
    assert norms[0] < 0.9 * norms[2]


def single_keys(num_batches: int, *, seed: int) -> list[Batch]:
    """Returns batches whose slots have one key each, the last of them smaller."""
    found = random_batches(num_batches, BATCH_SIZE, seed=seed)
    return [*found, *random_batches(1, BATCH_SIZE // 2, seed=seed + 50)]


def test_slots_of_one_key_give_the_model_of_training_on_the_store() -> None:
    data = [single_keys(11, seed=1), single_keys(11, seed=2)]
    trained_alike(data, settings(), on_device(5))


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
@pytest.mark.parametrize("sparse", SPARSE)
def test_passes_on_a_gpu_give_the_same_model(sparse: str) -> None:
    optimizer = f"optimizer.sparse={{name='{sparse}', learning_rate=0.1}}"
    data = [batches(seed=1), batches(seed=2)]
    trained_alike(data, settings(optimizer), on_device(5, optimizer, kind="cuda"))


@on_a_gpu
@pytest.mark.parametrize("sparse", SPARSE)
def test_graphs_on_a_gpu_give_the_same_model(sparse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With clipping, a batch that is skipped, and one that is smaller."""
    replayed: list[StepGraph] = []
    run = StepGraph.run

    def noted(graph: StepGraph, batch: Any) -> Tensor:
        replayed.append(graph)
        return run(graph, batch)

    monkeypatch.setattr(StepGraph, "run", noted)
    how = (
        f"optimizer.sparse={{name='{sparse}', learning_rate=0.1}}",
        "train.non_finite=skip",
        "train.clip_norm=0.3",
    )
    data = [single_keys(40, seed=1), single_keys(40, seed=2)]
    broken = data[1][9].dense.copy()
    broken[0, 0] = np.nan
    data[1][9] = replace(data[1][9], dense=broken)

    by_graphs = on_device(20, "device.cuda_graph=true", *how, kind="cuda")
    trained = trained_alike(data, settings(*how), by_graphs)

    assert trained.non_finite.skipped == 1
    assert len(replayed) > 60
    assert len(set(map(id, replayed))) < 12


@on_a_gpu
def test_step_that_waits_for_the_gpu_cannot_be_a_graph() -> None:
    class Waiting(Net):
        def forward(self, batch: SeenBatch) -> Tensor:
            assert batch.dense.sum().item() == batch.dense.sum().item()
            return super().forward(batch)

    how = on_device(20, "device.cuda_graph=true", kind="cuda")
    with (
        worker_run(ParameterStore(), TorchModel(SCHEMA, Waiting), how) as run,
        pytest.raises(UsageError, match=r"cannot be recorded.*leave out device\.cuda_graph"),
    ):
        run.train(single_keys(40, seed=1))


@on_a_gpu
def test_deterministic_algorithms_of_pytorch_repeat_a_run_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch asks for it
    data = [batches(seed=1), batches(seed=2)]
    stores = [ParameterStore(), ParameterStore()]
    torch.use_deterministic_algorithms(True)
    try:
        for store in stores:
            train(store, on_device(5, kind="cuda"), data)
    finally:
        torch.use_deterministic_algorithms(False)

    assert stores[0].digest() == stores[1].digest()


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_passes_on_a_cluster_give_the_same_model(num_servers: int, mode: str) -> None:
    data = [batches(seed=1), batches(seed=2)]
    expected = ParameterStore()
    train(expected, settings(), data)

    with cluster(num_servers=num_servers) as servers:
        client = servers.client(joins=False)
        train(client, on_device(4, mode=mode), data, is_in_process=False)

        assert_same_model(expected, client, keys_of(data))


@pytest.mark.parametrize("pass_batches", [1, 12, 50])
def test_size_of_passes_does_not_show(pass_batches: int) -> None:
    """To the bit."""
    data = [batches(seed=1)]
    stores = [ParameterStore(), ParameterStore()]

    for store, size in zip(stores, (pass_batches, 5), strict=True):
        train(store, on_device(size), data)

    assert stores[0].digest() == stores[1].digest()


class Recorder:
    """A store that notes when state moves, and may refuse."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self.pulled: list[Mapping[str, Keys]] = []
        self.second_pull = threading.Event()
        self.pushes = 0
        self.fails_at_push = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def pull_state(self, keys: Mapping[str, Keys], blocks: Sequence[str]) -> Any:
        if keys:
            self.pulled.append(keys)
            if len(self.pulled) > 2:  # of the second pass: the first has two tables
                self.second_pull.set()
        return self._store.pull_state(keys, blocks)

    def push_state(self, state: ModelState, push_id: PushId) -> Any:
        self.pushes += 1
        if self.pushes == self.fails_at_push:
            raise GradientError("refused by the test")
        return self._store.push_state(state, push_id)

    def push_grad(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a gradient was pushed in a pass")

    pull_sparse = pull_dense = push_grad


def test_next_pass_is_prepared_while_this_one_trains() -> None:
    """Its keys are found and its rows pulled before the first pass ends; nothing else is called in a step."""
    store = Recorder(ParameterStore())
    steps: list[bool] = []

    def is_told_to_end() -> bool:
        # The first is asked for before the first pass begins.
        steps.append(not steps or (all(steps) and store.second_pull.wait(LIMIT_S)))
        return False

    data = batches(8)
    train(store, on_device(4), [data], is_told_to_end=is_told_to_end)  # type: ignore[arg-type]

    assert all(steps)
    first, second = (keys_of([part]) for part in (data[:4], data[4:]))
    pulled = [keys["shared"] for keys in store.pulled if "shared" in keys]
    np.testing.assert_array_equal(np.sort(pulled[0]), first)
    np.testing.assert_array_equal(np.sort(pulled[1]), np.setdiff1d(second, first))


@pytest.fixture(params=[False, True], ids=["at-once", "late"])
def lateness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(pass_steps, "MAX_AHEAD", 3)
        monkeypatch.setattr(StepResults, "_is_here", lambda _: False)


@pytest.mark.usefixtures("lateness")
def test_rows_of_a_skipped_batch_are_not_created() -> None:
    data = batches(6, seed=4)
    broken = data[2].dense.copy()
    broken[0, 0] = np.nan
    data[2] = replace(data[2], dense=broken, keys=data[2].keys + np.uint64(5))
    skip = "train.non_finite=skip"

    run = trained_alike([data], settings(skip), on_device(4, skip))

    assert run.non_finite.skipped == 1


@pytest.mark.usefixtures("lateness")
def test_pass_that_fails_leaves_the_store_at_the_pass_before() -> None:
    """The position, too, so that a resumed run repeats the pass."""
    data = batches(8, seed=4)
    labels = data[6].dense.copy()
    labels[0, 0] = np.inf
    data[6] = replace(data[6], dense=labels)
    expected, actual = ParameterStore(), ParameterStore()
    train(expected, on_device(4), [data[:4]])

    with pytest.raises(GradientError, match="batch 7: "):
        train(actual, on_device(4), [data])

    assert actual.digest() == expected.digest()
    assert actual.status().progress[0].step == 4
    assert "batch 7" in actual.engine.job.failure


@pytest.mark.parametrize("push", [1, 2, 3])
def test_error_in_the_middle_of_writing_back_ends_the_job(push: int) -> None:
    inner = ParameterStore()
    store = Recorder(inner)
    store.fails_at_push = push

    with pytest.raises(GradientError, match="refused by the test"):
        train(store, on_device(4), [batches(4)])  # type: ignore[arg-type]

    assert "refused by the test" in inner.engine.job.failure
    assert not inner.status().progress or inner.status().progress[0].step == 0


@pytest.mark.parametrize("push", [1, 2, 3])
def test_part_of_a_pass_is_neither_saved_nor_trained_further(push: int, tmp_path: Path) -> None:
    """By a script that goes on after the error, either."""
    store = Recorder(ParameterStore())
    data = batches(8)
    with worker_run(store, model(), on_device(4)) as run:  # type: ignore[arg-type]
        run.train(data[:4])
        store.fails_at_push = store.pushes + push
        with pytest.raises(GradientError, match="refused by the test"):
            run.train(data[4:])

        for call in (
            lambda: run.save(SaveRequest(url=str(tmp_path / "c"))),
            lambda: run.train(data),
            lambda: run.evaluate(data),
            run.barrier,
            run.leave,
        ):
            with pytest.raises(
                AbortedError,
                match=r"part of that pass .*start the job again from its newest checkpoint.*"
                r"checkpoint\.resume = true \(GradientError: refused by the test\)",
            ):
                call()

    assert store.pushes - store.fails_at_push in (0, 1)  # parts are pushed at once
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("where", ["mean", DENSE_BLOCK])
def test_number_that_an_update_made_infinite_is_found_before_anything_is_pushed(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the last table, and in the dense block: the store stays at the pass before, which may be saved."""
    store = Recorder(ParameterStore())
    data = batches(8)
    with worker_run(store, model(), on_device(4)) as run:  # type: ignore[arg-type]
        run.train(data[:4])
        pushes, digest = store.pushes, store.digest()
        overflow(where, monkeypatch)

        with pytest.raises(GradientError, match=f"{where}.* infinite .*; nothing was written"):
            run.train(data[4:])

        assert (store.pushes, store.digest()) == (pushes, digest)
        assert run.save(SaveRequest(url=str(tmp_path / "c"))) == digest


def overflow(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the last state of a table, or of the dense block, is infinite when it comes back."""
    trained, fetch = PassTable.trained, PassBlock.fetch

    def rows(table: PassTable) -> Any:
        if table._spec.name == where:
            table._state[table._is_trained[:-1].nonzero()[-1], -1] = np.inf
        return trained(table)

    def block(of: PassBlock) -> Any:
        found = fetch(of)
        if where == DENSE_BLOCK:
            found.element_state[-1, -1] = np.inf
        return found

    monkeypatch.setattr(PassTable, "trained", rows)
    monkeypatch.setattr(PassBlock, "fetch", block)


def test_rows_are_once_on_the_host_and_once_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step finds those that were pulled, the dense block, or the tables of an earlier pass."""
    moved: list[weakref.ref[Any]] = []
    left: list[int] = []
    pull, summed = ParameterStore.pull_state, PassTable.summed

    def pulled(*args: Any) -> Any:
        answer = pull(*args)
        state = answer.result()
        moved.extend(weakref.ref(each.weights) for each in state.rows.values())
        moved.extend(weakref.ref(each.weights) for each in state.blocks.values())
        return answer

    class Noted(PassTable):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            tables.append(weakref.ref(self))

    tables: list[weakref.ref[Noted]] = []

    def noted(*args: Any) -> Any:
        left.append(sum(each() is not None for each in moved[: 1 + 2 * (len(tables) // 2)]))
        assert sum(each() is not None for each in tables) == 2
        return summed(*args)

    monkeypatch.setattr(ParameterStore, "pull_state", pulled)
    monkeypatch.setattr(pass_trainer, "PassTable", Noted)
    monkeypatch.setattr(Noted, "summed", noted)

    train(ParameterStore(), on_device(2), [batches(6)])

    assert len(moved) == 1 + 2 * 3  # two tables and three passes
    assert len(tables) == 2 * 3
    assert not any(left)


def test_worker_that_is_told_to_end_writes_back_what_it_has_trained() -> None:
    data = batches(8)
    expected, actual = ParameterStore(), ParameterStore()
    train(expected, settings(), [data[:6]])
    told = iter([False] * 8 + [True] * 3)

    train(actual, on_device(4), [data], is_told_to_end=lambda: next(told))

    assert_same_model(expected, actual, keys_of([data]))


def test_twice_the_memory_is_refused_with_both_sizes() -> None:
    data = batches(8, num_values=10_000)
    store, needed = ParameterStore(), size_of([data], on_device(8))
    # The dense block is not counted among the tables.
    half = f"device.memory_gb={(needed / 2 + dense_bytes()) / 2**30!r}"

    with pytest.raises(
        UsageError, match=rf"rows need {needed} bytes, .* is more than the \d+ bytes for tables"
    ):
        train(store, on_device(8, half), [data])

    assert store.status().version == 0
    train(ParameterStore(), on_device(2, half), [data])


def test_dense_parameters_that_do_not_fit_are_refused_with_both_sizes() -> None:
    tiny = f"device.memory_gb={10 / 2**30!r}"

    with pytest.raises(UsageError, match=rf"have {dense_bytes()} bytes .* room for 10 bytes"):
        train(ParameterStore(), on_device(8, tiny), [batches(2)])


def test_device_without_memory_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process takes what was free."""
    store = ParameterStore()

    def weights(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nMore")

    monkeypatch.setattr(PassTable, "weights", weights)
    with pytest.raises(UsageError, match=r"device\.pass_rows .* \(CUDA out of memory.*2 GiB\)"):
        train(store, on_device(4), [batches(4)])

    assert store.status().version == 0


def size_of(data: Sequence[Sequence[Batch]], how: Job) -> int:
    """Returns the bytes of the tables of one pass: weights, Adagrad's state, gradient, number and mark."""
    widths = {"shared": 3 * 3, "mean": 3 * 2}
    slots = {"shared": range(NUM_SLOTS), "mean": (0, 1)}
    return sum(
        (keys_of_slots(data[0], slots[name]).size + 1) * (9 + 4 * width)
        for name, width in widths.items()
    )


def keys_of_slots(data: Sequence[Batch], slots: Sequence[int]) -> Keys:
    return np.unique(np.concatenate(list(keys_in(data, slots))))


def keys_in(data: Sequence[Batch], slots: Sequence[int]) -> Iterator[Keys]:
    for batch in data:
        for row in range(batch.size):
            for slot in slots:
                place = row * NUM_SLOTS + slot
                yield batch.keys[batch.offsets[place] : batch.offsets[place + 1]]


def dense_bytes() -> int:
    """Returns those of weights, Adam's state and the gradient."""
    return 4 * (4 * model().num_params + 2)


def test_rows_go_back_in_several_pushes_and_the_last_completes_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ctr_ps.ps_worker.extras.device_pass import preparation

    data = batches(4)
    stores = [ParameterStore(), Recorder(ParameterStore())]
    train(stores[0], on_device(4), [data])
    monkeypatch.setattr(preparation, "PART_BYTES", 300)

    train(stores[1], on_device(4), [data])  # type: ignore[arg-type]

    assert stores[1].pushes > 10
    assert stores[1].digest() == stores[0].digest()


def test_steps_of_a_pass_are_not_single_ones() -> None:
    with (
        worker_run(ParameterStore(), model(), on_device(4)) as run,
        pytest.raises(UsageError, match="which trains passes, not single steps"),
    ):
        run.steps(batches(1))


def test_rows_without_a_gradient_are_updated_as_on_the_store() -> None:
    """By a gradient of zeros: moments decay, and the row is there."""

    class Unused(Net):
        def __init__(self, schema: Schema) -> None:
            super().__init__(schema)
            self.unused = SlotEmbedding(dim=2, init_range=0.1)

    stores, data = (ParameterStore(), ParameterStore()), batches(4)
    for store, how in zip(stores, (settings(), on_device(2)), strict=True):
        with worker_run(store, TorchModel(SCHEMA, Unused), how) as run:
            run.train(data)

    first, second = (store.status().tables["unused"].rows for store in stores)
    assert first == second > 0
