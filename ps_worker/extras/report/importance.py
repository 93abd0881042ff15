"""Permutation importance: what a saved model loses when the values of one feature go to other examples.

    importance of a feature = AUC - AUC with its values permuted among the examples     (likewise of log loss)

(Breiman, "Random Forests", 2001, section 10.) The model is not trained again, so of two features that say
the same each may seem to matter little. All are permuted alike, in an order that depends on `SEED` alone.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.ctr_model.models.model import Model
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, counted
from ctr_ps.protos.store import ParameterReader
from ctr_ps.ps_worker.data.blocks import rows_between
from ctr_ps.ps_worker.data.rows_in_memory import RowsInMemory, SlotSwap
from ctr_ps.ps_worker.training.evaluation.evaluator import evaluate

SEED = 1

LOG_EVERY_S = 10.0
"""Between two lines on how far it is."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureImportance:
    """What a model loses without the values of one slot or dense column.

    Attributes:
        name: Of the slot or column.
        auc_lost: AUC with the values minus AUC without; nan with one class only.
        log_loss_gained: Log loss without the values minus log loss with them.
    """

    name: str
    auc_lost: float
    log_loss_gained: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Importance of all features of a model.

    Attributes:
        features: Those that lose most first.
        examples: Among which values were permuted.
        auc: Of these examples as they are; nan with one class only.
        log_loss: Likewise, mean.
    """

    features: tuple[FeatureImportance, ...]
    examples: int
    auc: float
    log_loss: float


def importance_of_features(
    store: ParameterReader,
    model: Model,
    schema: Schema,
    batches: Iterable[Batch],
    *,
    rows: int,
    batch_size: int,
) -> Importance:
    """Returns the importance of each slot and dense column over the first `rows` examples.

    They stay in memory, and are predicted once for each feature and once as they are.

    Args:
        store: The parameters; only read.
        model: Predicts with them.
        schema: Names of slots and columns.
        batches: Examples; those without labels are passed over, and no more are read than needed.
        rows: Most examples to take.
        batch_size: Examples that are predicted at a time.

    Raises:
        DataError: If there are fewer than 2 labelled examples.
    """
    kept = RowsInMemory(schema.num_dense, len(schema.slots))
    for batch in _first(batches, rows):
        kept.extend(batch, source=0)
    if kept.size < 2:
        raise DataError(f"{counted(kept.size, 'row')} with a label: nothing can be permuted")
    order = np.random.default_rng(SEED).permutation(kept.size)
    num_features = len(schema.slots) + len(schema.dense)
    logger.info(
        "feature importance: %s predicted %d times, once for each feature and once as they are; "
        "--importance-rows 0 leaves it out",
        counted(kept.size, "row"),
        num_features + 1,
    )
    progress = _Progress(kept.size * (num_features + 1))

    def measured(*, slot: int | None = None, inputs: Sequence[int] = ()) -> ClickMetrics:
        examples = _examples(kept, order, batch_size, slot=slot, inputs=inputs)
        return evaluate(store, model, progress.watch(examples), batch_size=batch_size)

    whole = measured()

    def importance(name: str, without: ClickMetrics) -> FeatureImportance:
        return FeatureImportance(
            name=name,
            auc_lost=whole.auc() - without.auc(),
            log_loss_gained=without.log_loss() - whole.log_loss(),
        )

    features = [importance(name, measured(slot=i)) for i, name in enumerate(schema.slots)]
    features += [
        importance(column.name, measured(inputs=schema.inputs_of_dense(i)))
        for i, column in enumerate(schema.dense)
    ]
    features.sort(key=lambda each: (-np.nan_to_num(each.auc_lost), -each.log_loss_gained))
    return Importance(
        features=tuple(features), examples=kept.size, auc=whole.auc(), log_loss=whole.log_loss()
    )


class _Progress:
    """Logs the share of predictions that are made."""

    def __init__(self, predictions: int) -> None:
        """Takes the number of all."""
        self._all = predictions
        self._done = 0
        self._logged_at = time.monotonic()

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches, each of which has been predicted when the next one is asked for."""
        for batch in batches:
            yield batch
            self._done += batch.size
            if time.monotonic() - self._logged_at >= LOG_EVERY_S:
                self._logged_at = time.monotonic()
                logger.info(
                    "feature importance: %.0f %% of %d predictions",
                    100 * self._done / self._all,
                    self._all,
                )


def _first(batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
    """Yields the first `rows` examples that have a label."""
    missing = rows
    for batch in batches:
        if batch.labels is None:
            continue
        yield rows_between(batch, 0, min(batch.size, missing))
        missing -= batch.size
        if missing <= 0:
            return


def _examples(
    rows: RowsInMemory,
    order: NDArray[np.int64],
    batch_size: int,
    *,
    slot: int | None,
    inputs: Sequence[int],
) -> Iterator[Batch]:
    """Yields all rows, row i with the slot or dense inputs of row `order[i]`."""
    swap = None
    if slot is not None:
        swap = SlotSwap(order, np.arange(rows.num_slots) == slot)
    for start in range(0, rows.size, batch_size):
        index = np.arange(start, min(start + batch_size, rows.size))
        batch = rows.gather(index, swap)
        if inputs:
            dense = batch.dense.copy()
            dense[:, inputs] = rows.gather(order[index]).dense[:, inputs]
            batch = replace(batch, dense=dense)
        yield batch
