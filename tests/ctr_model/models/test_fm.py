"""FM and DeepFM against their oracles, and the interactions of their features."""

import numpy as np
import pytest

from ctr_ps.ctr_model.models.summed import DeepFm, Fm, add_interactions
from ctr_ps.ctr_model.schema import Schema, criteo_schema
from tests.reference import models as oracle
from tests.support.model_cases import SCHEMA, ModelCase, assert_gradients_agree
from tests.support.slot_keys import Slots, lookup_of


@pytest.mark.parametrize("schema", [Schema.numbered(0, 3), Schema.numbered(13, 1)])
def test_any_columns_will_do(schema: Schema) -> None:
    assert_gradients_agree(ModelCase(Fm(schema, dim=3), schema, seed=1), oracle.fm)


def test_weights_start_at_zero_and_embeddings_do_not() -> None:
    model = Fm(criteo_schema())

    assert [(table.name, table.dim) for table in model.tables] == [("linear", 1), ("embedding", 10)]
    assert [table.init_range for table in model.tables] == [0.0, 0.01]
    assert model.num_params == 13 + 1
    assert all(segment.init_std == 0 for segment in model.segments)


def test_any_number_of_hidden_layers_and_numbers_will_do() -> None:
    for schema, hidden in [(Schema.numbered(0, 3), (5,)), (SCHEMA, (4, 5, 6))]:
        case = ModelCase(DeepFm(schema, dim=2, hidden=hidden), schema, seed=1)

        assert_gradients_agree(case, oracle.deepfm)


def test_both_parts_share_one_table_of_embeddings() -> None:
    model = DeepFm(criteo_schema())

    assert [(table.name, table.dim) for table in model.tables] == [("linear", 1), ("embedding", 10)]
    assert model.num_params == 13 + 1 + 273 * 400 + 400 + 2 * (400 * 400 + 400) + 400 + 1


NUM_SLOTS = 3
BEFORE = 8.0  # what stood in the output, to which is added


def forward(rows: np.ndarray, slots: Slots) -> tuple[np.ndarray, np.ndarray]:
    batch = len(slots) // NUM_SLOTS
    sums = np.full((batch, rows.shape[1]), np.nan, np.float32)
    out = np.full(batch, BEFORE, np.float32)
    add_interactions(lookup_of(rows, slots, NUM_SLOTS), sums, out)
    return sums, out


@pytest.mark.parametrize("dim", [1, 10, 17, 64])
def test_every_width_is_summed_whole(dim: int) -> None:
    rows = np.random.default_rng(1).random((5, dim), np.float32)

    sums, out = forward(rows, [[4], [2, 2], []])

    np.testing.assert_allclose(sums[0], rows[4] + 2 * rows[2], rtol=1e-6)
    assert out[0] - BEFORE == pytest.approx(oracle.interactions(rows[[4, 2, 2]]), rel=1e-4)


def test_one_large_feature_has_no_interactions_at_all() -> None:
    """Not even those of rounding, as a difference of squares would have."""
    rows = np.random.default_rng(1).normal(0, 1e6, (1, 10)).astype(np.float32)

    _, out = forward(rows, [[0], [], []])

    assert out.tolist() == [BEFORE]
