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
from ctr_ps.protos.errors import DataError, JobError, counted
from ctr_ps.protos.store import ParameterReader
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_worker.checkpoints.attachments import (
    job_of_checkpoint,
    model_of_checkpoint,
    require_consent,
    schema_of_checkpoint,
)
from ctr_ps.ps_worker.data.blocks import rows_between
from ctr_ps.ps_worker.data.files.listing import matching_files
from ctr_ps.ps_worker.data.rows_in_memory import RowsInMemory, SlotSwap
from ctr_ps.ps_worker.job.datasets import streamed
from ctr_ps.ps_worker.job.model import errors_of_model
from ctr_ps.ps_worker.training.evaluation.evaluator import SavedStore, evaluate

SEED = 1

_BATCH_SIZE = 4096
"""Examples that are predicted at a time, at least: with 32 it takes nine times as long."""

LOG_EVERY_S = 10.0  # between two lines on how far it is

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureImportance:
    """What a model loses without the values of one slot, dense column or vector.

    `auc_lost` is nan with one class only.
    """

    name: str
    auc_lost: float
    log_loss_gained: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """Importance of features, the largest first, among so many examples with this AUC and log loss."""

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
    """Returns the importance of each slot, dense column and vector over the first `rows` examples.

    They stay in memory, and are predicted once for each feature and once as they are. Examples without labels
    are passed over, and no more are read than needed. Raises DataError if there are fewer than 2 labelled
    examples.
    """
    kept = RowsInMemory(schema.num_dense, len(schema.slots))
    for batch in _first(batches, rows):
        kept.extend(batch, source=0)
    if kept.size < 2:
        raise DataError(f"{counted(kept.size, 'row')} with a label: too few to permute")
    order = np.random.default_rng(SEED).permutation(kept.size)
    vectors = {f"{v}[{i}]": v for v, width in schema.vectors.items() for i in range(width)}
    dense: dict[str, list[int]] = {}
    for i, column in enumerate(schema.dense):
        name = vectors.get(column.name, column.name)
        dense.setdefault(name, []).extend(schema.inputs_of_dense(i))
    num_features = len(schema.slots) + len(dense)
    logger.info(
        "feature importance: predicting %s %d times, once for each feature and once unchanged",
        counted(kept.size, "row"),
        num_features + 1,
    )
    predictions = kept.size * (num_features + 1)
    done, logged_at = 0, time.monotonic()

    def predicted(batches: Iterable[Batch]) -> Iterator[Batch]:
        """Logs how far it is: each batch has been predicted when the next one is asked for."""
        nonlocal done, logged_at
        for batch in batches:
            yield batch
            done += batch.size
            if time.monotonic() - logged_at >= LOG_EVERY_S:
                logged_at, share = time.monotonic(), 100 * done / predictions
                logger.info("feature importance: %.0f %% of %d predictions", share, predictions)

    def measured(*, slot: int | None = None, inputs: Sequence[int] = ()) -> ClickMetrics:
        examples = _examples(kept, order, batch_size, slot=slot, inputs=inputs)
        return evaluate(store, model, predicted(examples), batch_size=batch_size)

    whole = measured()

    def importance(name: str, without: ClickMetrics) -> FeatureImportance:
        return FeatureImportance(
            name=name,
            auc_lost=whole.auc() - without.auc(),
            log_loss_gained=without.log_loss() - whole.log_loss(),
        )

    features = [importance(name, measured(slot=i)) for i, name in enumerate(schema.slots)]
    features += [importance(name, measured(inputs=inputs)) for name, inputs in dense.items()]
    features.sort(key=lambda each: (-np.nan_to_num(each.auc_lost), -each.log_loss_gained))
    return Importance(
        features=tuple(features), examples=kept.size, auc=whole.auc(), log_loss=whole.log_loss()
    )


def importance_of_checkpoint(
    checkpoint: Checkpoint,
    # patterns; empty: data.test of the job that trained it, else data.valid
    files: Sequence[str] = (),
    *,
    rows: int,
    overrides: Sequence[str] = (),  # `section.key=value`, over that job
    allow_code: bool = False,  # run the model's file and the command for data that it names
) -> Importance:
    """Returns the importance of the features of a saved model, as `importance_of_features`.

    Raises CtrPsError if there are no files, or one cannot be read, or code is needed and not allowed.
    """
    job, schema = job_of_checkpoint(checkpoint, overrides), schema_of_checkpoint(checkpoint)
    code = ["model.name", "data.pipe_command"]
    require_consent(checkpoint.url, job, code, allow_code=allow_code, overrides=overrides)
    if not (patterns := files or job.data.test or job.data.valid):
        raise JobError("no rows to predict: give --data, or train with data.test or data.valid")
    dataset = streamed(job, schema)
    dataset.set_filelist(matching_files(patterns))
    with errors_of_model(job):
        return importance_of_features(
            SavedStore(SavedModel(checkpoint, maps=True)),
            model_of_checkpoint(checkpoint, job, schema),
            schema,
            dataset,
            rows=rows,
            batch_size=max(job.train.batch_size, _BATCH_SIZE),
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
