"""What a batch asks of tables, and how often each key is in it."""

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.parameters import EmbeddingTable, select_slots
from ctr_ps.ps_worker.training.lookups import keys_of_batch
from tests.reference.feature_life import occurrences_of

TABLES = (
    EmbeddingTable(name="all", dim=2, init_range=0.1),
    EmbeddingTable(name="same", dim=1, init_range=0.1),
    EmbeddingTable(name="some", dim=1, init_range=0.1, slots=(2, 0)),
    EmbeddingTable(name="crossed", dim=1, init_range=0.1, slots=(1,), crosses=((0, 2),)),
    EmbeddingTable(name="none", dim=1, init_range=0.1, slots=()),
)


def random_batch(seed: int, size: int = 50, num_slots: int = 3) -> Batch:
    """Slots have no, one or several values, and share keys."""
    random = np.random.default_rng(seed)
    offsets = np.cumsum([0, *random.integers(0, 4, size * num_slots)]).astype(np.int32)
    return Batch(
        labels=random.integers(0, 2, size).astype(np.float32),
        dense=np.zeros((size, 1), np.float32),
        keys=random.integers(0, 40, offsets[-1]).astype(np.uint64),
        offsets=offsets,
        num_slots=num_slots,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_counts_are_those_of_all_occurrences_in_the_slots_of_a_table(
    table: EmbeddingTable, seed: int
) -> None:
    batch = random_batch(seed)
    assert batch.labels is not None
    slots = select_slots(batch, table.slots, table.crosses)
    keys = keys_of_batch(batch, TABLES)

    counts = keys.counts(batch.labels, [table.name])[table.name]

    expected = occurrences_of(slots.keys, slots.offsets, slots.num_slots, batch.labels)
    unique = keys.unique[table.name].tolist()
    assert dict(zip(unique, map(tuple, counts.tolist()), strict=True)) == expected
    assert counts.dtype == np.uint32
    assert counts.shape == (len(unique), 2)


def test_only_tables_that_are_asked_for_are_counted() -> None:
    batch = random_batch(0)
    assert batch.labels is not None

    counts = keys_of_batch(batch, TABLES).counts(batch.labels, {"same", "some"})

    assert counts.keys() == {"same", "some"}
