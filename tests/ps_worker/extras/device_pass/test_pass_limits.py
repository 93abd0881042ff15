"""What a pass on a device must not exceed, here on the CPU: limits of servers, of memory, of a norm."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from ctr_ps.ctr_model.batch import Batch  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import Batch as SeenBatch  # noqa: E402
from ctr_ps.ctr_model.torch import SlotEmbedding, TorchModel  # noqa: E402
from ctr_ps.protos.errors import GradientError, UsageError  # noqa: E402
from ctr_ps.protos.spec import InitializerSpec, TableSpec  # noqa: E402
from ctr_ps.ps_server.store import ParameterStore  # noqa: E402
from ctr_ps.ps_worker.extras.device_pass import pass_trainer, preparation  # noqa: E402
from ctr_ps.ps_worker.extras.device_pass.pass_steps import StepResults  # noqa: E402
from ctr_ps.ps_worker.extras.device_pass.pass_table import PassTable  # noqa: E402
from ctr_ps.ps_worker.extras.device_pass.preparation import device_bytes, row_bytes  # noqa: E402
from ctr_ps.ps_worker.job import Job  # noqa: E402
from ctr_ps.ps_worker.training.lookups import keys_of_batch  # noqa: E402
from tests.ps_worker.extras.device_pass.test_pass_trainer import (  # noqa: E402
    SCHEMA,
    Product,
    batches,
    on_device,
    settings,
    train,
)
from tests.support.cluster import cluster  # noqa: E402
from tests.support.optimizers import plain_optimizer  # noqa: E402
from tests.support.training import NUM_DENSE, NUM_SLOTS, random_batches, worker_run  # noqa: E402


def test_many_processors_push_no_more_at_once_than_a_server_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server refuses a push in chunks once one that is 32 newer has begun."""
    monkeypatch.setattr(pass_trainer, "num_processors", lambda: 64)
    monkeypatch.setattr(preparation, "num_processors", lambda: 64)
    monkeypatch.setattr(preparation, "_MIN_PART_ROWS", 1)
    size, rng = 100_000, np.random.default_rng(0)
    data = [
        replace(batch, keys=rng.integers(0, 2**63, size * NUM_SLOTS).astype(np.uint64))
        for batch in random_batches(2, size, seed=0)
    ]

    with cluster(wait_limit_s=60) as servers:
        client = servers.client(joins=False, chunk_bytes=2**15)
        train(client, on_device(2), [data], is_in_process=False)

        keys = np.unique(np.concatenate([batch.keys for batch in data]))
        assert client.status().tables["shared"].rows == keys.size


def test_clipped_norm_is_that_of_the_sum_where_terms_cancel() -> None:
    """Of the sum as it was rounded, which is what rows are updated by."""
    terms = np.array([2.0**25, *[1.5] * 8, -(2.0**25), -8.0], np.float32)
    batch = Batch(
        labels=np.zeros(terms.size, np.float32),
        dense=np.repeat(terms[:, None], NUM_DENSE, axis=1),
        keys=np.zeros(terms.size * NUM_SLOTS, np.uint64),
        offsets=np.arange(terms.size * NUM_SLOTS + 1, dtype=np.int32),
        num_slots=NUM_SLOTS,
    )

    def weight(how: Job) -> float:
        store = ParameterStore()
        with worker_run(store, TorchModel(SCHEMA, Product), how) as run:
            run.train([batch])
        rows = store.pull_state({"t": np.zeros(1, np.uint64)}, []).result().rows["t"]
        return float(rows.weights[0, 0])

    clip = "train.clip_norm=0.05"
    assert weight(on_device(1, clip)) == pytest.approx(weight(settings(clip)))


@pytest.mark.parametrize(
    ("slot_keys", "expected"),
    [(True, r"has \[nan, "), (False, "dense block 'dense' is not finite: element 0 is nan;")],
)
def test_errors_show_plain_numbers(slot_keys: bool, expected: str) -> None:
    data = batches(1)
    dense = data[0].dense.copy()
    dense[0, 0] = np.nan
    data[0] = replace(data[0], dense=dense)
    if not slot_keys:
        data[0] = replace(data[0], keys=data[0].keys[:0], offsets=np.zeros_like(data[0].offsets))

    with pytest.raises(GradientError, match=expected):
        train(ParameterStore(), on_device(1), [data])


@pytest.mark.parametrize("is_late", [False, True])
def test_fault_of_an_earlier_batch_is_told_before_missing_labels(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_late:
        monkeypatch.setattr(StepResults, "_is_here", lambda _: False)
    data = batches(4)
    dense = data[1].dense.copy()
    dense[0, 0] = np.nan
    data[1] = replace(data[1], dense=dense)
    data[3] = replace(data[3], labels=None)

    with pytest.raises(GradientError, match="batch 2: "):
        train(ParameterStore(), on_device(4), [data])


def test_missing_labels_behind_the_end_are_no_error() -> None:
    data = batches(4)
    data[3] = replace(data[3], labels=None)
    told = iter([False, False, True, True, True])
    store = ParameterStore()

    train(store, on_device(4), [data], is_told_to_end=lambda: next(told))

    assert store.status().batches == 1


def test_device_without_memory_when_rows_return_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nMore")

    monkeypatch.setattr(PassTable, "trained", trained)
    with pytest.raises(UsageError, match=r"device\.pass_rows"):
        train(ParameterStore(), on_device(4), [batches(4)])


class Memory(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and storage.nbytes():
                place = storage.data_ptr()
                if place not in self._sizes:
                    self._sizes[place] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, place, None)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return found


@contextmanager
def counted() -> Iterator[Memory]:
    with Memory() as memory:
        yield memory


NUM_ROWS = 100_000
DIM = 10
SPEC = TableSpec(
    name="t", dim=DIM, initializer=InitializerSpec(), optimizer=plain_optimizer("adagrad")
)


def test_rows_return_within_the_memory_that_a_pass_promises() -> None:
    """A table is limited to 4/5 of the free memory: more than 5/4 of it there is not."""
    with counted() as memory:
        table = PassTable(SPEC, NUM_ROWS, torch.device("cpu"))
        table._is_trained[:-1] = True
        rows = table.trained()
        for start in range(0, NUM_ROWS, NUM_ROWS // 20):
            table.fetch(rows[start : start + NUM_ROWS // 20])

    assert memory.peak < 1.25 * NUM_ROWS * device_bytes(SPEC)


def test_rows_move_within_the_memory_that_a_pass_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pass and what it keeps of the one before; the host's own copies are here on the device, too."""
    monkeypatch.setattr(preparation, "_MIN_PART_ROWS", 1000)
    monkeypatch.setattr(preparation, "PART_BYTES", 80_000)
    limits: list[int] = []
    require = preparation.Preparation._require_memory

    def noted(of: Any, tables: Any, running: Any, examples: int) -> None:
        kept = sum(each.kept.size * row_bytes(of._specs[name]) for name, each in tables.items())
        limits.append(of._device_bytes(tables) + kept)
        require(of, tables, running, examples)

    monkeypatch.setattr(preparation.Preparation, "_require_memory", noted)
    move, peaks = pass_trainer.PassTrainer._move, []

    def counted_move(*args: Any) -> None:
        with counted() as memory:
            move(*args)
        peaks.append(memory.peak)

    monkeypatch.setattr(pass_trainer.PassTrainer, "_move", counted_move)
    rng = np.random.default_rng(0)
    data = [
        replace(batch, keys=rng.integers(0, 40_000, 5000 * NUM_SLOTS).astype(np.uint64))
        for batch in random_batches(4, 5000, seed=0)
    ]

    train(ParameterStore(), on_device(1, "train.batch_size=5000", "device.pass_rows=5000"), [data])

    assert len(peaks) == 4
    assert all(peak < 1.25 * limit for peak, limit in zip(peaks, limits, strict=True))


def test_probabilities_are_contiguous_where_a_module_returns_a_column() -> None:
    """Else the kernels of the metrics are compiled once more, in the midst of training."""

    class Softmax(nn.Module):
        def __init__(self, schema: Schema) -> None:
            super().__init__()
            self.out = nn.Linear(schema.num_dense, 2)
            self.embedding = SlotEmbedding(dim=1)

        def forward(self, batch: SeenBatch) -> Tensor:
            return self.out(batch.dense) + self.embedding(batch).sum(1)

        def loss(self, batch: SeenBatch, output: Tensor) -> Tensor:
            assert batch.labels is not None
            return nn.functional.cross_entropy(output, batch.labels.long(), reduction="none")

        def probabilities(self, batch: SeenBatch, output: Tensor) -> Tensor:
            return output.softmax(1)[:, 1]

    of, batch = TorchModel(SCHEMA, Softmax), batches(1)[0]
    keys = keys_of_batch(batch, of.tables)
    rows = {table: np.zeros((each.size, 1), np.float32) for table, each in keys.unique.items()}

    found = of.predict(of.initial_values, batch, keys.lookups(rows), of.workspace(16))

    assert found.flags.c_contiguous
