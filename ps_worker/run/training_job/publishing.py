"""The gate before publishing: whether readers of a run's folder may take the checkpoint of a pass.

    each batch: predicted --> a sample of rows, with these predictions (worker 0)
              ` trained on
    end of a pass: figures of all workers, and of the served model on the sample --> why_held --> Saver

The served model is the one that PUBLISHED names, whoever wrote that.
"""

import logging
import math
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.delayed_labels import rates_of_rows
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.protos.errors import CtrPsError
from ctr_ps.ps_server.checkpoint.publish import published_name
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.checkpoint.storage.folders import folder_at
from ctr_ps.ps_worker.checkpoints.retention import name_after_epoch
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.sections import PublishSection
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import MetricsWriter
from ctr_ps.ps_worker.training.evaluation.evaluator import SavedStore

logger = logging.getLogger(__name__)

Predicted = tuple[Batch, NDArray[np.float32]]
"""Rows, and the probability of a click of each, float32[B]."""


class RowSample:
    """At most `limit` rows of a pass, evenly from all of it, with their predictions. Thread-safe.

    Those of each batch at first; whenever there are too many, every other batch goes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forgets all rows, as at the start of a pass."""
        with self._lock:
            self._kept: list[Predicted] = []
            self._seen, self._every = 0, 1

    def add(self, batch: Batch, probabilities: NDArray[np.float32]) -> None:
        """Copies rows of a batch with labels, if it is its turn."""
        with self._lock:
            if self._seen % self._every == 0:
                rows = min(batch.size, self._limit)
                self._kept.append((_first_rows(batch, rows), probabilities[:rows].copy()))
                while sum(each.size for each, _ in self._kept) > self._limit:
                    self._kept, self._every = self._kept[::2], 2 * self._every
            self._seen += 1

    def rows(self) -> list[Predicted]:
        """Returns the rows kept, in their order."""
        with self._lock:
            return list(self._kept)


def _first_rows(batch: Batch, rows: int) -> Batch:
    offsets = batch.offsets[: rows * batch.num_slots + 1]
    return Batch(
        labels=None if batch.labels is None else batch.labels[:rows].copy(),
        dense=batch.dense[:rows].copy(),
        keys=batch.keys[: offsets[-1]].copy(),
        offsets=offsets.copy(),
        num_slots=batch.num_slots,
        weights=None if batch.weights is None else batch.weights[:rows].copy(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two models on the same rows."""

    live: ClickMetrics  # the trained one, before it was trained on a row
    served: ClickMetrics


def why_held(limits: PublishSection, window: ClickMetrics | None, compared: Compared | None) -> str:
    """Returns why the checkpoint of a pass is not published; "": it is.

    `window` is of all rows of the pass, None if unknown; `compared` None if nothing is served. A figure that
    is nan is not within its limit. The limits are also the served model's: what it predicts worse than them
    are other rows or wrong labels, which the live model may have learnt.
    """
    if window is None:
        return "the figures of its pass are unknown, as worker 0 was replaced at the end of it"
    judged = (
        {"it": window} if compared is None else {"it": window, "the served model": compared.served}
    )
    for what, metrics in judged.items():
        for figure, value, key in (
            ("log loss", metrics.log_loss(), "max_log_loss"),
            ("normalized entropy", metrics.normalized_entropy(), "max_ne"),
        ):
            limit = getattr(limits, key)
            if limit and not value <= limit:
                return f"{what} has a {figure} of {value:.5f}, expected at most publish.{key} = {limit:g}"
    if compared is not None:
        live, served = (each.normalized_entropy() for each in (compared.live, compared.served))
        if not live <= served + limits.margin:
            return (
                f"on {compared.live.examples} rows it has a normalized entropy of {live:.5f} and the served "
                f"model {served:.5f}, expected at most publish.margin = {limits.margin:g} more"
            )
    return ""


class Gate:
    """Judges the passes of a run on worker 0, if the job has limits; else a no-op. For one thread."""

    def __init__(self, job: Job, run: Run, metrics: MetricsWriter) -> None:
        """Follows what is trained from here on."""
        self._limits, self._folder = job.publish, job.checkpoint.dir
        self._job = job
        self._run = run
        self._metrics = metrics
        self._is_on = job.publish.is_gated and run.is_first
        self._sample = RowSample(job.publish.sample_rows)
        self._window: ClickMetrics | None = None
        self._served: SavedModel | None = None
        if self._is_on:
            run.progress.held = 0
            if job.publish.margin:
                run.progress.on_batch = self._sample.add

    def begin_pass(self) -> None:
        """Forgets the pass before."""
        self._window = None
        self._sample.clear()

    def end_pass(self, of_all: ClickMetrics) -> None:
        """Takes the figures of the pass, of all workers."""
        self._window = of_all

    def passes(self, number: int) -> bool:
        """Returns whether readers may take the checkpoint of the pass `number`; warns if not."""
        if not self._is_on or self._run.is_repeating:
            return False
        window, compared, served = self._window, None, ""
        try:
            served = published_name(self._folder) or ""
            if served and self._limits.margin:
                compared = self._compared_with(served)
            reason = why_held(self._limits, window, compared)
        except CtrPsError as error:
            reason = f"it cannot be compared with {served!r}, which is served: {error}"
        progress, name = self._run.progress, name_after_epoch(number)
        progress.held = (progress.held or 0) + 1 if reason else 0
        figures = {
            "checkpoint": name,
            "is_published": not reason,
            "reason": reason,
            "log_loss": None if window is None else window.log_loss(),
            "normalized_entropy": None if window is None else window.normalized_entropy(),
            "served": served,
            "sample_rows": 0 if compared is None else compared.live.examples,
        }
        for key in ("live", "served") if compared is not None else ():
            figures[f"sample_ne_{key}"] = getattr(compared, key).normalized_entropy()
        self._metrics.write("publish", figures)
        if reason:
            logger.warning(
                "checkpoint=%s is not published, readers of %s stay with %s: %s; held=%d passes in a row; "
                "`ps-ckpt publish %s %s` publishes it all the same",
                name,
                self._folder,
                served or "none",
                reason,
                progress.held,
                self._folder,
                name,
            )
        return not reason

    def _compared_with(self, served: str) -> Compared:
        """Predicts the sample with the checkpoint `served`; its files are mapped, once."""
        checkpoint = Checkpoint.open(folder_at(self._folder).child(served).url)
        if self._served is None or self._served.checkpoint.token != checkpoint.token:
            self._served = SavedModel(checkpoint, maps=True)
        rows, found = self._sample.rows(), list[NDArray[np.float32]]()
        self._run.evaluate(
            (batch for batch, _ in rows),
            on_predictions=lambda each: found.append(each.reshape(len(each), -1)[:, 0].copy()),
            reader=SavedStore(self._served),
        )
        compared = Compared(live=ClickMetrics(), served=ClickMetrics())
        for (batch, before), p in zip(rows, found, strict=True):
            assert batch.labels is not None
            compared.live.add(batch.labels, before, batch.weights)
            compared.served.add(batch.labels, _of_training(self._job, p), batch.weights)
        return compared


def _of_training(job: Job, p: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the click rates, float32[B], of rows to train on, of impressions that are clicked at rates `p`.

    Of those without a click a share is left; with delayed clicks each impression is also a row without one.
    """
    share, is_delayed = math.exp(-job.data.logit_offset), job.train.delay != "none"
    rates = rates_of_rows(p, share) if is_delayed else p / (p + (1 - p) * share)
    return np.asarray(rates, np.float32)
