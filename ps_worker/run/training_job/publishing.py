"""The gate before publishing: whether readers of a run's folder may take the checkpoint of a pass.

It judges a pass of all workers, and on a sample of worker 0's rows the live model, before it was trained on
them, and the served one, which PUBLISHED names.
"""

import logging
import math
import threading
from copy import deepcopy

import numpy as np

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.layers.delayed_labels import rates_of_rows
from ctr_ps.ctr_model.metrics import ClickMetrics
from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.gradients import Values
from ctr_ps.ps_server.checkpoint.files.manifest import PUBLISHED
from ctr_ps.ps_server.checkpoint.publish import name_in
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_worker.checkpoints.retention import KEPT_PASSES, name_after_epoch
from ctr_ps.ps_worker.job import Job
from ctr_ps.ps_worker.job.sections import PublishSection
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import MetricsWriter
from ctr_ps.ps_worker.run.training_job.passes import quality, shown
from ctr_ps.ps_worker.training.evaluation.evaluator import SavedStore

logger = logging.getLogger(__name__)

Both = tuple[ClickMetrics, ClickMetrics]  # of the live and the served model, on the same rows


class RowSample:
    """Batches of a pass, evenly from all of it: at most `limit` rows, or one batch. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.kept: list[tuple[Batch, Values]] = []  # with probabilities, float32[B]
        self._limit, self._seen, self._every, self._lock = limit, 0, 1, threading.Lock()

    def add(self, batch: Batch, probabilities: Values) -> None:
        """Copies a batch with labels, if it is its turn."""
        with self._lock:
            if self._seen % self._every == 0:
                self.kept.append(deepcopy((batch, probabilities)))
                while len(self.kept) > 1 and sum(each.size for each, _ in self.kept) > self._limit:
                    self.kept, self._every = self.kept[::2], 2 * self._every  # every other goes
            self._seen += 1


def why_held(limits: PublishSection, window: ClickMetrics | None, both: Both | None) -> str:
    """Returns why the checkpoint of a pass is not published; "": it is. A figure that is nan does not pass.

    `window` is of all rows, None if unknown; `both` is None if nothing is served: then the model has to be as
    good as the click rate, where a margin is the only limit. With a margin the limits are the served model's,
    too: wrong labels that last are learnt, and only it still shows them.
    """
    if window is None:
        return "the figures of its pass are unknown, as worker 0 was replaced at the end of it"
    compared = both if limits.margin else None
    if compared and not compared[0].examples:
        return (
            "worker 0 has read no rows of the pass, and publish.margin compares on its rows: give it a "
            "partition of the stream that has messages, or leave out the margin"
        )
    max_ne = limits.max_ne or float(bool(limits.margin) and not both)
    judged = {"it": window} | ({"the served model": compared[1]} if compared else {})
    for what, metrics in judged.items():
        for figure, value, limit in (
            ("log loss", metrics.log_loss(), limits.max_log_loss),
            ("normalized entropy", metrics.normalized_entropy(), max_ne),
        ):
            if limit and not value <= limit:
                return f"{what} has a {figure} of {value:.5f}, expected at most {limit:g}"
    if compared is None:
        return ""
    live, served = (each.normalized_entropy() for each in compared)
    if not live <= served + limits.margin:
        return (
            f"on {compared[0].examples} rows it has a normalized entropy of {live:.5f} and the served model "
            f"{served:.5f}, expected at most publish.margin = {limits.margin:g} more"
        )
    return ""


class Gate:
    """Judges the passes of a run on worker 0, if the job has limits; else a no-op. For one thread."""

    def __init__(self, job: Job, run: Run, metrics: MetricsWriter) -> None:
        self._job, self._run, self._metrics = job, run, metrics
        self._limits, self._folder = job.publish, job.checkpoint.dir
        run.progress.held = 0 if self._limits.is_gated and run.is_first else None
        self.begin_pass()

    def begin_pass(self) -> None:
        """Forgets the pass before."""
        self.window: ClickMetrics | None = None  # figures of all workers; None: unknown
        self._sample = RowSample(self._limits.sample_rows)
        if self._run.progress.held is not None and self._limits.sample_rows:
            self._run.progress.on_batch = self._sample.add

    def passes(self, number: int) -> bool:
        """Returns whether readers may take the checkpoint of the pass `number`; warns if not."""
        progress, name, both, served = self._run.progress, name_after_epoch(number), None, ""
        has_rows = self.window is None or self.window.examples
        if progress.held is None or self._run.is_repeating or not has_rows:
            return False
        try:
            served = name_in(self._folder, PUBLISHED)
            both = self._both() if served and self._limits.sample_rows else None
            reason = why_held(self._limits, self.window, both)
        except CtrPsError as error:
            reason = f"it cannot be compared with {served!r}, which is served: {error}"
            if not self._limits.margin:
                logger.warning("checkpoint=%s: %s", name, reason)
                reason = why_held(self._limits, self.window, None)
        progress.held = progress.held + 1 if reason else 0
        live, other = both or (ClickMetrics(), ClickMetrics())
        figures: dict[str, object] = {"is_published": not reason, "reason": reason}
        figures |= {"served": served, "sample_rows": live.examples}
        for which, each in (("sample", live), ("served", other)):
            figures |= {f"{which}_{key}": value for key, value in quality(each).items()}
        self._metrics.write("publish", figures)
        if live.examples:
            text = "of %d rows before training checkpoint=%s %s; served=%s %s"
            logger.info(text, live.examples, name, shown(live), served, shown(other))
        if reason:
            logger.warning(
                "not published: checkpoint=%s served=%s held=%d passes in a row: %s; `ps-ckpt publish %s %s` "
                "publishes it all the same, until %d more passes have ended",
                *(name, served or "none", progress.held, reason, self._folder, name, KEPT_PASSES),
            )
        return not reason

    def _both(self) -> Both:
        """Returns the metrics on the sample, also of the served model, whose files are mapped meanwhile."""
        reader = SavedStore(SavedModel(Checkpoint.open(f"{self._folder}/{PUBLISHED}"), maps=True))
        batches, found = (batch for batch, _ in self._sample.kept), list[Values]()
        self._run.evaluate(batches, on_predictions=lambda p: found.append(p.copy()), reader=reader)
        live, served, share = ClickMetrics(), ClickMetrics(), math.exp(-self._job.data.logit_offset)
        is_plain = self._job.train.delay == "none"
        for (batch, before), each in zip(self._sample.kept, found, strict=True):
            assert batch.labels is not None
            # Training predicts the rows that it has, not the clicks of impressions.
            p = each.reshape(batch.size, -1)[:, 0]
            rates = p / (p + (1 - p) * share) if is_plain else rates_of_rows(p, share)
            live.add(batch.labels, before, batch.weights)
            served.add(batch.labels, np.asarray(rates, np.float32), batch.weights)
        return live, served
