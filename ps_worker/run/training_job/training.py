"""The passes of a run that has started.

    pass over the data, validations within it -> barrier -> shrink, validate, save -> next pass

Worker 0 shrinks, validates and saves; the others wait for it at barriers.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ctr_ps.ps_worker.checkpoints.resume import EarlierRun
from ctr_ps.ps_worker.data.streams.stream_data import IDLE_S, position_of
from ctr_ps.ps_worker.job.datasets import TrainingData
from ctr_ps.ps_worker.job.streams import TrainingStream
from ctr_ps.ps_worker.run.plan import Plan
from ctr_ps.ps_worker.run.run import Run
from ctr_ps.ps_worker.run.run_folder import MetricsWriter
from ctr_ps.ps_worker.run.termination import EXIT_CODE
from ctr_ps.ps_worker.run.training_job.checkpoints import JobCheckpoints
from ctr_ps.ps_worker.run.training_job.passes import (
    Pass,
    PassFigures,
    Positioned,
    ReadShare,
    Stretches,
    end_pass,
    epochs,
    epochs_ended,
    figures_of_pass,
)
from ctr_ps.ps_worker.run.training_job.publishing import Gate
from ctr_ps.ps_worker.run.training_job.validation import MOST_KEPT, Validator
from ctr_ps.ps_worker.run.training_job.windows import Windows

logger = logging.getLogger(__name__)

ASK_S = 0.5
"""How often a worker without rows asks in a long lull whether others wait for it."""


@dataclass(slots=True)
class Training:
    """Goes through the passes of a run once. For one thread."""

    plan: Plan
    run: Run
    data: TrainingData
    stream: TrainingStream | None
    metrics: MetricsWriter
    validator: Validator
    checkpoints: JobCheckpoints
    gate: Gate
    is_told_to_end: Callable[[], bool]  # see `train_job`
    # figures of those trained, of a stream the last ones
    passes: deque[PassFigures] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    stopped_early: bool = False  # validations got no better before the last epoch
    _asked: tuple[int, float, float] = (-1, 0.0, 0.0)  # see `_on_idle`
    _window: tuple[int, float] = (0, 0.0)  # on which all had agreed before; see `Windows`

    def train(self, earlier: EarlierRun | None) -> None:
        """Trains the epochs that are left; `earlier` is the resumed run, known on worker 0 alone.

        Raises:
            SystemExit: With the exit code of SIGTERM, if this worker was told to end.
            CtrPsError: If anything goes wrong; says what.
        """
        run, metrics = self.run, self.metrics
        last = self.plan.job.train.epochs if self.plan.train_files else 0
        done = self._resume(earlier)
        metrics.epoch = epochs_ended(run, done)
        metrics.write(
            "start",
            {
                "workers": run.num_workers,
                "is_resumed": earlier is not None,
                "is_replacement": run.is_replacement,
            },
        )
        run.progress.watch(partial(metrics.write, "train"))
        if self.validator.is_over:
            self.stopped_early = done < last or self.stream is not None
            last = done
        is_empty = True
        with closing(self._passes(done + 1, last)) as passes:
            for each in passes:
                is_empty = False
                of_all = f"/{last}" if each.number <= last else ""
                if figures := self._train_pass(each, f"{each.number}{of_all}"):
                    self.passes.append(figures)
                if self._end_pass(each):
                    break
        if is_empty:
            logger.info("nothing is left to train: epochs=%d", done)
        self.checkpoints.finish()

    def _passes(self, first: int, last: int) -> Generator[Pass, None, None]:
        """Yields the epochs over files, then the windows of a stream."""
        run = self.run
        has_stream = self.stream is not None and not self.validator.is_over
        if self.plan.train_files:
            yield from epochs(self.data, run, first=first, last=last, goes_on=has_stream)
            first = max(first, last + 1)
        if self.stream is not None and has_stream:
            start = position_of(run.earlier_progress)
            is_resumed = first > 1 + (last if self.plan.train_files else 0)
            own = self._on_idle, self.is_told_to_end, run.is_replacement
            with closing(
                self.stream.open(run.earlier_progress, *own, is_resumed=is_resumed)
            ) as stream:
                run.progress.lag, run.progress.lateness = stream.lag, stream.lateness
                named = ", ".join(stream.partitions) or "no partition"
                logger.info("worker %d reads %s of %s", run.worker, named, self.stream.name)
                windows = Windows(stream, run, self.stream.length, start, self._window)
                yield from windows.windows(first)

    def _on_idle(self) -> bool:
        """Says whether to train an empty batch while the stream of this worker has no rows.

        With that, training saves, and in synchronous steps others go on.
        """
        run = self.run
        run.require_place()
        run.communicator.let_others_begin()
        is_sync = self.plan.job.strategy.is_sync and run.num_workers > 1
        step, now = run.progress.steps, time.monotonic()
        last_step, pause_s, next_s = self._asked
        is_early = step == last_step and now < next_s
        if is_early or not (is_sync or self.checkpoints.is_due_in_lull()):
            return False
        status = run.store.status()
        is_awaited = is_sync and run.worker in status.awaited
        is_wanted = is_awaited or self.checkpoints.is_due_in_lull(status)
        pause_s = 0.0 if is_wanted or step != last_step else min(2 * pause_s + IDLE_S, ASK_S)
        self._asked = step, pause_s, now + pause_s
        return is_wanted

    def _resume(self, earlier: EarlierRun | None) -> int:
        """Returns the number of epochs that all workers have ended; worker 0 tells the others."""
        if self.run.restarts:
            number, end_ms = self.validator.recall(self.checkpoints.name_before)
            self._window = int(number), end_ms
            if self.validator.best is not None:
                self.checkpoints.write_best()
            return int(number) - 1
        if not self.plan.job.checkpoint.resume:
            return 0
        done = self.validator.resume(None if earlier is None else earlier.state)
        # A process in a lost one's place hears of that one's validations at the barriers that it repeats.
        if earlier is not None and not self.run.is_replacement:
            self.checkpoints.write_best()
        return done

    def _train_pass(self, each: Pass, shown: str) -> PassFigures | None:
        """Trains on a pass, and waits for all workers; returns its figures.

        None: the lost process before this one had come to its end, so there is nothing left to measure.
        """
        run, start = self.run, time.monotonic()
        self.metrics.epoch = each.number
        self.gate.begin_pass()
        at = ReadShare(each.share)
        run.progress.begin_pass(shown, at.share)
        part: Generator[Positioned, None, None] | None = each.batches
        validation_seconds = 0.0
        while part is not None:
            with closing(part) as batches:
                validation_seconds += self._train_batches(each, at.follow(batches))
            part = each.again()
        trained, is_repeated = time.monotonic(), run.is_repeating
        of_all = end_pass(run, each)
        ended = time.monotonic()
        if is_repeated:
            return None
        self.gate.window = of_all
        run.progress.log()
        if run.is_first and not self.passes:
            run.progress.warn_of_one_class(of_all, self.plan.schema.label)
        figures = figures_of_pass(run, each, of_all, ended - start - validation_seconds)
        if self.metrics.folder is not None:
            status = run.store.status()
            where_it_went: dict[str, Any] = {
                "seconds": {**run.progress.times.take(), "wait": ended - trained},
                "threads": self.plan.job.train.thread_num,
                "tables": {name: asdict(table) for name, table in status.tables.items()},
                "staleness": status.staleness.as_dict(),
            }
            self.metrics.write("pass", {**asdict(figures), **where_it_went})
        return figures

    def _train_batches(self, each: Pass, batches: Iterator[Positioned]) -> float:
        """Trains on the batches of a pass; returns the seconds of validations between two of them."""
        after_step, steps = self.checkpoints.after_step_of(each), self.validator.steps
        if not steps.is_on:
            self._train(each, batches, after_step)
            return 0.0
        stretches, seconds = Stretches(batches), 0.0
        steps.begin_stretch()
        for number in itertools.count(1):
            if not self.run.is_repeating:
                self._train(each, stretches.take(steps.left), after_step)
            if not steps.goes_on(f"{each.name}-steps-{number}", stretches):
                break
            seconds += self._validate_within(each, f"{each.name}-validated-{number}")
            if self.validator.is_over:
                break
        return seconds

    def _train(
        self, each: Pass, batches: Iterator[Positioned], after_step: Callable[[], None] | None
    ) -> None:
        self.run.train(batches, after_step=after_step, is_told_to_end=self.is_told_to_end)
        if self.is_told_to_end():
            self.checkpoints.save_when_told(each)
            self.run.end_early()
            logger.info("ended by SIGTERM step=%d", self.run.progress.steps)
            raise SystemExit(EXIT_CODE)

    def _validate_within(self, each: Pass, name: str) -> float:
        """Validates in the middle of a pass, while all workers wait; returns the seconds that this took."""
        start, name_of = time.monotonic(), self.checkpoints.name_within
        self.run.progress.log()
        own = self.validator.validate(each.number, name_of)
        if own is not None and own.checkpoint:
            self.checkpoints.save_best_within(each, own)
        self.validator.tell(name, own, name_of)
        self.run.progress.restart_window()
        return time.monotonic() - start

    def _end_pass(self, each: Pass) -> bool:
        """Shrinks, validates and saves, while all others wait; returns whether training is over."""
        if self.validator.is_over:  # in the middle of the pass
            self._stop_early()
            self.checkpoints.save_last_within(each)
            return True
        self._shrink_after(each)
        number, name_of = each.number, self.checkpoints.name_after
        is_last = each.ends()
        is_validated = self.validator.is_due_after(each, is_last=is_last)
        own = self.validator.validate(number, name_of) if is_validated else None
        every = self.plan.job.checkpoint.every_epochs
        is_best = own is not None and bool(own.checkpoint)
        is_over = is_last or self.validator.is_over
        if is_over or is_best or (every and number % every == 0):
            self.checkpoints.wait()  # with it PUBLISHED is as the last pass left it
            passes = self.gate.passes(number)
            self.checkpoints.save_after(each, is_best=is_best, is_published=passes)
        if is_last:
            return True
        if following := each.following():
            self.validator.tell_at_restart(following, own, name_of)
        elif is_validated:
            self.validator.tell(f"validated-{number}", own, name_of)
        else:
            self.run.barrier(f"saved-{number}")
        if self.validator.is_over:
            self._stop_early()
        return self.validator.is_over

    def _shrink_after(self, each: Pass) -> None:
        """Ends a pass in tables that keep statistics, while all other workers wait or have ended."""
        every = self.plan.job.life.shrink_every_epochs
        is_due = every and each.number % every == 0
        if self.run.is_first and is_due and self.plan.specs.counting_tables:
            self.checkpoints.wait()  # a server waits for that no longer than for other workers
            self.run.shrink()

    def _stop_early(self) -> None:
        self.stopped_early = True
        best = self.validator.best
        place = "none was better" if best is None else f"epoch {best.epoch}, step {best.step}"
        logger.info("stopped early, as validation no longer improves: best=%s", place)
