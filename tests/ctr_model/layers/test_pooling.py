"""Pooling of slots, with nn.EmbeddingBag of PyTorch as the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.layers.pooling import PooledSlots
from ctr_ps.ctr_model.parameters import select_slots
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.training.lookups import keys_of_batch
from tests.support.model_cases import random_batch
from tests.support.slot_keys import Slots, lookup_of, slots_of

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

NUM_SLOTS, NUM_UNIQUE, BATCH = 3, 5, 4
SCHEMA = Schema.numbered(num_dense=2, num_slots=NUM_SLOTS)
DENSE = np.arange(2 * BATCH, dtype=np.float32).reshape(BATCH, 2)

SLOTS = slots_of(NUM_UNIQUE, BATCH * NUM_SLOTS, most=4)
# Few values, so that rows are often equal.
ROWS = st.lists(st.sampled_from([-1.5, -0.0, 0.25, 2.0]), min_size=10, max_size=10).map(
    lambda values: np.array(values, np.float32).reshape(NUM_UNIQUE, 2)
)
POOLINGS = st.sampled_from(["sum", "mean", "max"])


def of_torch(
    mode: str, rows: np.ndarray, slots: Slots, grad: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what nn.EmbeddingBag makes of the slots, [len(slots), D], and the gradient of the rows."""
    bag = torch.nn.EmbeddingBag.from_pretrained(torch.tensor(rows), mode=mode, freeze=False)
    keys = torch.tensor([key for slot in slots for key in slot], dtype=torch.int64)
    offsets = torch.tensor(np.cumsum([0, *(len(slot) for slot in slots[:-1])]))
    pooled = bag(keys, offsets)
    pooled.backward(torch.tensor(grad))
    return pooled.detach().numpy(), bag.weight.grad.numpy()


@given(SLOTS, ROWS, st.tuples(POOLINGS, POOLINGS, POOLINGS))
def test_values_and_gradients_are_those_of_embedding_bag(
    slots: Slots, rows: np.ndarray, poolings: tuple[str, str, str]
) -> None:
    layer = PooledSlots(
        SCHEMA,
        dim=2,
        init_range=0.0,
        slots={f"C{i}": {"pooling": name} for i, name in enumerate(poolings, start=1)},
    )
    lookups = {"embedding": lookup_of(rows, slots, NUM_SLOTS)}
    grad = np.random.default_rng(1).normal(size=(BATCH, layer.width)).astype(np.float32)
    out, rows_grad = np.full_like(grad, np.nan), np.full_like(rows, np.nan)

    layer.forward(DENSE, lookups, out)
    layer.backward(grad, lookups, {"embedding": rows_grad})

    np.testing.assert_array_equal(out[:, :2], DENSE)
    expected_grad = np.zeros_like(rows)
    for s, mode in enumerate(poolings):
        pooled, of_slot = of_torch(
            mode, rows, slots[s::NUM_SLOTS], grad[:, layer.columns[s]].copy()
        )
        np.testing.assert_allclose(out[:, layer.columns[s]], pooled, rtol=1e-6)
        expected_grad += of_slot
    np.testing.assert_allclose(rows_grad, expected_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_what_is_not_a_number_is_not_hidden(pooling: str) -> None:
    """Training notices it by the loss, and in the gradient of the row by its optimizer."""
    rows = np.array([[1.0, np.nan], [np.nan, 1.0], [9.0, 9.0], [0, 0], [0, 0]], np.float32)
    layer = PooledSlots(SCHEMA, dim=2, init_range=0.0, pooling=pooling)
    lookups = {"embedding": lookup_of(rows, [[0, 1, 2]] * (BATCH * NUM_SLOTS), NUM_SLOTS)}
    out, rows_grad = np.empty((BATCH, layer.width), np.float32), np.empty_like(rows)

    layer.forward(DENSE, lookups, out)
    layer.backward(np.ones_like(out), lookups, {"embedding": rows_grad})

    assert np.isnan(out[:, 2:]).all()
    assert rows_grad[1, 0] > 0
    assert rows_grad[0, 1] > 0


def test_slots_of_another_dim_are_in_a_table_of_that_dim() -> None:
    layer = PooledSlots(
        SCHEMA,
        dim=4,
        init_range=0.1,
        table="ads",
        slots={"C2": {"dim": 2}, "C3": {"pooling": "max"}},
    )

    assert [(table.name, table.dim, table.slots) for table in layer.tables] == [
        ("ads", 4, (0, 2)),
        ("ads_2", 2, (1,)),
    ]
    assert layer.width == 2 + 4 + 2 + 4
    assert layer.columns == [slice(2, 6), slice(6, 8), slice(8, 12)]


def test_slots_keep_their_order_across_tables() -> None:
    rng = np.random.default_rng(3)
    batch = random_batch(SCHEMA, BATCH, rng)
    layer = PooledSlots(SCHEMA, dim=4, init_range=0.1, slots={"C1": {"dim": 1}, "C3": {"dim": 2}})
    keys = keys_of_batch(batch, layer.tables)
    rows = {
        table.name: rng.normal(size=(keys.unique[table.name].size, table.dim)).astype(np.float32)
        for table in layer.tables
    }
    out = np.full((BATCH, layer.width), np.nan, np.float32)

    layer.forward(batch.dense, keys.lookups(rows), out)

    for s, table in enumerate(["embedding_1", "embedding", "embedding_2"]):
        own = select_slots(batch, (s,))
        row_of = dict(zip(keys.unique[table].tolist(), rows[table], strict=True))
        for b in range(BATCH):
            found = [row_of[key] for key in own.keys[own.offsets[b] : own.offsets[b + 1]].tolist()]
            of_slot = np.array(found).reshape(-1, rows[table].shape[1])
            np.testing.assert_allclose(out[b, layer.columns[s]], of_slot.sum(axis=0), rtol=1e-6)


def test_a_table_in_which_no_slot_is_left_is_not_made() -> None:
    slots = {name: {"dim": 3} for name in SCHEMA.slots}

    layer = PooledSlots(SCHEMA, dim=4, init_range=0.0, slots=slots)

    assert [(table.name, table.slots) for table in layer.tables] == [("embedding_3", None)]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"C9": {"dim": 2}}, "no slot 'C9', did you mean"),
        ({"C1": {"dims": 2}}, "slots.C1.dims is unknown, did you mean 'dim'"),
        ({"C1": {"dim": 0}}, "slots.C1.dim is 0, expected a width of at least 1"),
        ({"C1": {"dim": "2"}}, "slots.C1.dim is '2'"),
        ({"C1": {"pooling": "avg"}}, "slots.C1.pooling is 'avg', expected sum, mean or max"),
        ({"C1": {"pooling": 1}}, "slots.C1.pooling is 1, expected sum, mean or max"),
    ],
)
def test_what_is_wrong_with_a_slot_is_named(slots: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PooledSlots(SCHEMA, dim=4, init_range=0.0, slots=slots)


def test_an_unknown_pooling_is_refused() -> None:
    with pytest.raises(ValueError, match="pooling is 'min', expected sum, mean or max"):
        PooledSlots(SCHEMA, dim=4, init_range=0.0, pooling="min")  # type: ignore[arg-type]
