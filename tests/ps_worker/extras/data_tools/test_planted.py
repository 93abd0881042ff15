"""The planted model: its rows follow its own probabilities."""

import numpy as np
import pytest

from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.ps_worker.extras.data_tools.planted import (
    CLICK_RATE,
    LOGIT_DEVIATION,
    PlantedModel,
    PlantedRows,
)


def draw(seed: int, num_rows: int = 20_000, stream: int = 7) -> PlantedRows:
    return PlantedModel(seed).draw(np.random.default_rng(stream), num_rows)


def test_another_seed_is_another_truth() -> None:
    """The same draws meet other values, and other weights."""
    first, second = draw(3, 1000), draw(4, 1000)

    assert not np.isin(first.values[first.values >= 0], second.values).any()
    assert abs(np.corrcoef(first.probabilities, second.probabilities)[0, 1]) < 0.5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_click_rate_and_deviation_of_the_logit_do_not_depend_on_the_seed(seed: int) -> None:
    rows = draw(seed)

    logits = np.log(rows.probabilities / (1 - rows.probabilities))
    assert abs(rows.clicks.mean() - CLICK_RATE) < 0.02
    assert abs(logits.std() - LOGIT_DEVIATION) < 0.1


def test_clicks_come_at_their_probabilities() -> None:
    rows = draw(1)
    tenths = np.array_split(np.argsort(rows.probabilities), 10)

    for tenth in tenths:
        expected = rows.probabilities[tenth].mean()
        deviation = np.sqrt(expected * (1 - expected) / len(tenth))
        assert abs(rows.clicks[tenth].mean() - expected) < 4 * deviation


def test_logit_is_a_sum_over_values_and_scaled_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Least squares over one-hot values and numbers leaves nothing over."""
    monkeypatch.setattr("ctr_ps.ps_worker.extras.data_tools.planted._LARGEST_VOCABULARY", 8)
    rows = draw(2, 1000)
    one_hot = [np.equal.outer(values, np.unique(values)) for values in rows.values.T]
    features = np.hstack([*one_hot, criteo_schema().scale_dense(rows.numbers)])
    logits = np.log(rows.probabilities / (1 - rows.probabilities))

    weights, *_ = np.linalg.lstsq(features, logits, rcond=None)

    assert features.shape[1] < 250
    np.testing.assert_allclose(features @ weights, logits, atol=1e-5)


def test_numbers_are_counts_spread_as_the_schema_scales_them() -> None:
    rows = draw(1)
    present = rows.numbers[~np.isnan(rows.numbers)]
    scaled = criteo_schema().scale_dense(rows.numbers)

    assert (present >= 0).all()
    assert (present == np.rint(present)).all()
    assert (np.abs(scaled.mean(axis=0)) < 0.5).all()


def test_some_numbers_and_some_values_are_missing() -> None:
    rows = draw(1)

    for is_missing in (np.isnan(rows.numbers), rows.values < 0):
        rates = is_missing.mean(axis=0)
        assert 0 < (rates > 0).sum() < len(rates)
        assert rates.max() < 0.55


def test_vocabularies_grow_from_slot_to_slot() -> None:
    rows = draw(1)

    sizes = [len(np.unique(column)) for column in rows.values.T]

    assert sizes[0] <= 5
    assert sizes[-1] > 1000
