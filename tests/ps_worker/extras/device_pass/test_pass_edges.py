"""Passes on a device, here the CPU, where they differ easily from training on the store."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402

from ctr_ps.ctr_model.batch import Batch  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import Batch as SeenBatch  # noqa: E402
from ctr_ps.ctr_model.torch import SlotEmbedding, TorchModel  # noqa: E402
from ctr_ps.protos.errors import GradientError, UsageError  # noqa: E402
from ctr_ps.protos.store import Store  # noqa: E402
from ctr_ps.ps_server.store import ParameterStore  # noqa: E402
from ctr_ps.ps_worker.job import Job  # noqa: E402
from ctr_ps.ps_worker.run.run import Run  # noqa: E402
from tests.ps_worker.extras.device_pass.test_pass_trainer import (  # noqa: E402
    BATCH_SIZE,
    SCHEMA,
    Net,
    Product,
    assert_same_model,
    batches,
    close,
    dense_bytes,
    keys_of,
    on_device,
    settings,
    size_of,
    train,
)
from tests.support.training import NUM_DENSE, NUM_SLOTS, worker_run  # noqa: E402


def trained(
    store: Store, module: type[nn.Module], how: Job, data: Sequence[Batch], **callbacks: Any
) -> Run:
    with worker_run(store, TorchModel(SCHEMA, module), how) as run:
        run.train(data, **callbacks)
    return run


def both(
    module: type[nn.Module], data: Sequence[Batch], *overrides: str, pass_batches: int = 2
) -> list[ParameterStore]:
    """Returns the stores after training there, and after training on a device."""
    stores = [ParameterStore(), ParameterStore()]
    for store, how in zip(
        stores, (settings(*overrides), on_device(pass_batches, *overrides)), strict=True
    ):
        trained(store, module, how, data)
    return stores


def assert_same_tables(stores: Sequence[Store], data: Sequence[Batch]) -> None:
    tables = stores[0].status().tables
    keys = keys_of([data])
    found = [store.pull_state(dict.fromkeys(tables, keys), []).result().rows for store in stores]
    for name in tables:
        close(found[1][name].weights, found[0][name].weights)
        close(found[1][name].state, found[0][name].state)
    rows = [{name: each.rows for name, each in store.status().tables.items()} for store in stores]
    assert rows[0] == rows[1]
    assert stores[0].status().examples == stores[1].status().examples


def with_weights(batch: Batch, number: int) -> Batch:
    """Returns a batch with sample weights, some of them 0, and in every third batch all."""
    weights = np.random.default_rng(number).integers(0, 4, batch.size).astype(np.float32)
    return replace(batch, weights=weights * np.float32(number % 3 > 0))


@pytest.mark.parametrize("clip", [(), ("train.clip_norm=0.05",)])
def test_sample_weights_are_those_of_training_on_the_store(clip: tuple[str, ...]) -> None:
    data = [with_weights(batch, number) for number, batch in enumerate(batches(9))]
    stores = [ParameterStore(), ParameterStore()]

    train(stores[0], settings(*clip), [data])
    train(stores[1], on_device(2, *clip), [data])

    assert_same_model(*stores, keys_of([data]))


def test_schedule_and_decay_go_on_through_passes_and_epochs() -> None:
    schedule = "optimizer.schedule={kind='linear', warmup_steps=5, total_steps=24}"
    knobs = (schedule, "train.weight_decay=0.1")
    data = [batches(seed=1), batches(seed=2)]
    stores = [ParameterStore(), ParameterStore()]

    train(stores[0], settings(*knobs), data)
    train(stores[1], on_device(5, *knobs), data)

    assert_same_model(*stores, keys_of(data))


class Crossed(nn.Module):
    """Tables of the same slots, of which two differ in their crosses, and one without any key in a pass."""

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        a, b, c, d = schema.slots
        self.first = SlotEmbedding([a], dim=2, init_range=0.1, crosses=[(a, b)])
        self.second = SlotEmbedding([a], dim=2, init_range=0.1, crosses=[(b, c)])
        self.third = SlotEmbedding([a], dim=3, init_range=0.1)
        self.fourth = SlotEmbedding([a], dim=1, init_range=0.1, pooling="mean")
        self.rare = SlotEmbedding([d], dim=1, init_range=0.1, pooling="max")
        self.out = nn.Linear(schema.num_dense + 4 + 4 + 3 + 1 + 1, 1)

    def forward(self, batch: SeenBatch) -> Tensor:
        parts = [self.first, self.second, self.third, self.fourth, self.rare]
        return self.out(torch.cat([batch.dense, *(part(batch).flatten(1) for part in parts)], 1))


def without_slot(batch: Batch, slot: int) -> Batch:
    counts = np.diff(batch.offsets).reshape(-1, NUM_SLOTS)
    is_kept = np.repeat(np.arange(counts.size) % NUM_SLOTS != slot, counts.reshape(-1))
    counts[:, slot] = 0
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return replace(batch, keys=batch.keys[is_kept], offsets=offsets)


def test_crosses_and_passes_without_a_key_of_a_table() -> None:
    data = batches(8)
    data = [without_slot(each, 3) if i in (2, 3) else each for i, each in enumerate(data)]

    assert_same_tables(both(Crossed, data), data)


def test_batch_whose_loss_alone_is_infinite_is_skipped() -> None:
    class Infinite(Net):
        def forward(self, batch: SeenBatch) -> Tensor:
            return super().forward(replace(batch, dense=batch.dense.clamp(-1, 1)))

        def loss(self, batch: SeenBatch, output: Tensor) -> Tensor:
            return output.squeeze(1).masked_fill(batch.dense[:, 0] > 50, torch.inf)

        def probabilities(self, batch: SeenBatch, output: Tensor) -> Tensor:
            return output.squeeze(1).sigmoid()

    data = batches(6)
    dense = data[2].dense.copy()
    dense[1, 0] = 100.0
    data[2] = replace(data[2], dense=dense, keys=data[2].keys + np.uint64(5))

    assert_same_tables(both(Infinite, data, "train.non_finite=skip"), data)


def only_key_faulty(place: int) -> tuple[Batch, int]:
    """Returns a batch of one key a slot, and the key whose gradient alone is not finite."""
    keys = np.arange(BATCH_SIZE * NUM_SLOTS, dtype=np.uint64)[::-1] * np.uint64(2**50)
    dense = np.ones((BATCH_SIZE, NUM_DENSE), np.float32)
    dense[place // NUM_SLOTS, 0] = np.inf
    batch = Batch(
        labels=np.ones(BATCH_SIZE, np.float32),
        dense=dense,
        keys=keys.copy(),
        offsets=np.arange(keys.size + 1, dtype=np.int32),
        num_slots=NUM_SLOTS,
    )
    return batch, int(keys[place])


def test_fault_names_the_key() -> None:
    batch, key = only_key_faulty(5 * NUM_SLOTS)

    with pytest.raises(GradientError, match=rf"'t' is not finite: key {key} has "):
        trained(ParameterStore(), Product, on_device(4), [batch])


def test_rows_of_the_pass_before_count_in_the_limit() -> None:
    data = batches(4)
    needed = size_of([data], on_device(4))
    limit = f"device.memory_gb={(1.1 * needed + dense_bytes()) / 2**30!r}"

    train(ParameterStore(), on_device(4, limit), [data])
    with pytest.raises(
        UsageError, match=r"plus [1-9]\d* bytes for the rows in both passes, is more than the"
    ):
        train(ParameterStore(), on_device(4, limit), [[*data, *data]])


def test_padding_is_that_of_the_host() -> None:
    """Its width is the most keys of the slots of the embedding, not of the table."""
    widths: dict[str, list[int]] = {}

    def module(name: str) -> type[nn.Module]:
        class Padded(nn.Module):
            def __init__(self, schema: Schema) -> None:
                super().__init__()
                first, second, *_ = schema.slots
                self.both = SlotEmbedding([first, second], dim=1, table="t", init_range=0.1)
                self.one = SlotEmbedding([first], dim=1, table="t", init_range=0.1, pooling="none")

            def forward(self, batch: SeenBatch) -> Tensor:
                padded, _ = self.one(batch)
                widths.setdefault(name, []).append(padded.shape[2])
                return padded.flatten(1).sum(1) + self.both(batch).flatten(1).sum(1)

        return Padded

    data = []
    for batch in batches(3):
        counts = np.diff(batch.offsets).reshape(-1, NUM_SLOTS)
        counts[:] = [1, 3, 1, 1]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        data.append(replace(batch, keys=np.arange(offsets[-1], dtype=np.uint64), offsets=offsets))
    trained(ParameterStore(), module("host"), settings(), data)
    trained(ParameterStore(), module("device"), on_device(2), data)

    assert widths["host"] == widths["device"] == [1, 1, 1]


def test_slots_with_at_most_one_key() -> None:
    """Not every one has it, so rows need offsets; in the last batch all have."""
    data = []
    for number, batch in enumerate(batches(4)):
        counts = np.minimum(np.diff(batch.offsets), 1)
        counts[:] = 1 if number == 3 else counts
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        data.append(replace(batch, keys=batch.keys[: offsets[-1]].copy(), offsets=offsets))

    assert_same_tables(both(Net, data), data)
