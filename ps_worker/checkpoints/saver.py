r"""The checkpoints of a run: when one is due, and writing it while training continues.

    training   step | step | settle, snapshot | step | step | step | ...
    a thread                      \-- write, LATEST, BEST, PUBLISHED, keep_last --/

One is written at a time. An error while writing ends the run, at the next step or at the end; but after a
server restart the checkpoint is taken again.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace

from ctr_ps.protos.errors import SnapshotLostError, UnknownChangesError
from ctr_ps.protos.store import Checkpoints, SaveRequest
from ctr_ps.ps_server.checkpoint.files.manifest import PUBLISHED, PUBLISHING
from ctr_ps.ps_server.checkpoint.publish import latest_in, require_latest, write_best, write_latest
from ctr_ps.ps_server.checkpoint.storage.folders import place_of
from ctr_ps.ps_worker.checkpoints.retention import KEPT_PASSES, Keeper, name_at_step
from ctr_ps.ps_worker.job.sections import CheckpointSection

logger = logging.getLogger(__name__)


class Schedule:
    """Decides when a checkpoint within an epoch is due. Sans-IO, not thread-safe."""

    def __init__(self, *, every_steps: int, every_s: float, step: int, now: float) -> None:
        """Starts at `step` and `now`, in seconds; a period of 0 never ends."""
        self.is_owed = False
        self._every_steps = every_steps
        self._every_s = every_s
        self.restart(step, now)

    def restart(self, step: int, now: float) -> None:
        """Counts from a checkpoint that was just taken."""
        self.is_owed = False
        self._last_step = step
        self._last_s = now

    def owe(self) -> None:
        """Makes a checkpoint due now, as the last one was lost."""
        self.is_owed = True

    def is_due(self, step: int, now: float) -> bool:
        """Whether the steps have passed a multiple of their period, its seconds have, or one is owed."""
        steps, seconds = self._every_steps, self._every_s
        # Multiples, so that a resumed run has its checkpoints at the same steps.
        is_step = steps > 0 and step // steps > self._last_step // steps
        return self.is_owed or is_step or (seconds > 0 and now - self._last_s >= seconds)


def _of_step(step: int, names: Iterable[str]) -> set[str]:
    name = name_at_step(step)
    return {each for each in names if each == name or each.startswith(f"{name}-")}


def _begin_writing(name: str, write: Callable[[Callable[[], None]], None]) -> Future[None]:
    """Lets a thread write a checkpoint; returns once later changes are no part of it.

    `write` says so by a call of its argument. The result comes within the store's time limits.
    """
    written = Future[None]()
    is_in_snapshot = threading.Event()

    def run() -> None:
        try:
            write(is_in_snapshot.set)
            written.set_result(None)
        except BaseException as error:  # raised by `result`
            written.set_exception(error)
        finally:
            is_in_snapshot.set()

    threading.Thread(target=run, name=f"save-{name}", daemon=True).start()
    is_in_snapshot.wait()
    return written


class Saver:
    """Takes and writes checkpoints; `latest` is the url of the newest complete one, if any. Thread-safe."""

    def __init__(
        self,
        store: Checkpoints,
        settings: CheckpointSection,
        *,
        step: int = 0,  # steps of this worker so far
        latest: str | None = None,  # the checkpoint that the run resumes from; None: a fresh run
        own: Collection[str] = (),  # names of the checkpoints of the run that it resumes
        # names of those of an earlier run, which the first one replaces
        overwritten: Collection[str] = (),
        is_gated: bool = False,  # else readers take each checkpoint
        # called before a file that others rely on is replaced; raises if this process may not
        confirm: Callable[[], object] = lambda: None,
        # called with the name of each checkpoint that readers may take
        on_published: Callable[[str], object] = str,
        clock: Callable[[], float] = time.monotonic,  # in seconds
    ) -> None:
        self._store = store
        self._settings = settings
        self._keeper = Keeper(settings, own, overwritten, passes=KEPT_PASSES if is_gated else 0)
        self._is_gated = is_gated
        # Names taken at one step, on which later checkpoints may be based. An unfinished run's later ones are
        # saved again.
        self._used = _of_step(step, own)
        self._confirm = confirm
        self._on_published = on_published
        self._clock = clock
        self._latest_before = latest_in(settings.dir)
        self._schedule = Schedule(
            every_steps=settings.every_steps, every_s=settings.every_s, step=step, now=clock()
        )
        self._turn = threading.Lock()
        self._writing: Future[None] | None = None
        self._again: Callable[[], None] | None = None  # takes the last checkpoint once more
        self._until_full = 0  # deltas that may come before the next checkpoint with all rows
        self.latest = latest

    def after_step(self, step: int, begin: Callable[[], Mapping[str, bytes]]) -> None:
        """Takes a checkpoint if one is due, unless the last is still being written; called between two steps.

        `begin` is called first: it settles the store, and returns the attachments. Raises CtrPsError if this
        or the last checkpoint failed.
        """
        if not self._turn.acquire(blocking=False):
            return  # another thread is here
        try:
            if self._writing is not None and self._writing.done():
                self._end()
            if self._writing is None and self._schedule.is_due(step, self._clock()):
                self._begin(self._free_name(step), step, begin)
        finally:
            self._turn.release()

    def save_within(self, step: int, begin: Callable[[], Mapping[str, bytes]]) -> None:
        """As `after_step`, but now, and returns when it is written."""
        with self._turn:
            self._end()
            self._begin(self._free_name(step), step, begin)
            self._end()

    def _free_name(self, step: int) -> str:
        # Worker 0 may stay at a step while others train.
        names = (name_at_step(step, number) for number in itertools.count(1))
        return next(each for each in names if each not in self._used)

    @property
    def is_owed(self) -> bool:
        """Whether a server was lost with its share of the last checkpoint, and none was taken since."""
        writing = self._writing
        if writing is not None and writing.done():
            return isinstance(writing.exception(), SnapshotLostError)
        return self._schedule.is_owed

    def is_due(self, step: int) -> bool:
        """Whether `after_step` would take a checkpoint now."""
        writing = self._writing
        is_free = writing is None or writing.done()
        return is_free and (self.is_owed or self._schedule.is_due(step, self._clock()))

    def save(
        self, name: str, step: int, attachments: Mapping[str, bytes], *, named: Collection[str] = ()
    ) -> None:
        """Takes a checkpoint now, after the last one was written; returns when training may continue.

        `named`, of `BEST` and `PUBLISHED`, name it once it is written, unless a server is lost with its share
        before. Raises CtrPsError if this or the last checkpoint failed.
        """

        def begin() -> None:
            self._begin(name, step, lambda: attachments, named)

        with self._turn:
            self._end()
            begin()
            self._again = begin

    def wait(self) -> None:
        """Returns when nothing is being written; a lost one is due at the next step. Raises CtrPsError."""
        with self._turn:
            self._end()

    def finish(self) -> None:
        """Returns when everything is written, a lost one again; nothing was trained since `save`.

        Raises CtrPsError if the last checkpoint failed.
        """
        with self._turn:
            while not self._end() and self._again is not None:
                self._again()

    def _begin(
        self,
        name: str,
        step: int,
        begin: Callable[[], Mapping[str, bytes]],
        named: Collection[str] = (),
    ) -> None:
        self._used = {name, *_of_step(step, self._used)}
        self._again = None
        start = self._clock()
        url = f"{self._settings.dir.rstrip('/')}/{name}"
        attachments = begin()

        def write(on_snapshot: Callable[[], None]) -> None:
            self._confirm()
            try:
                self._save(url, attachments, on_snapshot)
            except SnapshotLostError as error:
                logger.warning("checkpoint lost, another follows: checkpoint=%s: %s", url, error)
                raise
            self._confirm()
            if PUBLISHED in named:
                write_best(self._settings.dir, name, PUBLISHING)
            write_latest(self._settings.dir, name, self._latest_before, is_gated=self._is_gated)
            self.latest = url
            # Once more: this process may have been paused for so long that another one is in its place.
            self._confirm()
            require_latest(self._settings.dir, name)
            for file in named:
                write_best(self._settings.dir, name, file)
                logger.info("%s names checkpoint=%s", file, url)
            if PUBLISHED in named or not self._is_gated:
                self._on_published(name)
            self._keeper.saved(name)
            logger.info("saved checkpoint=%s seconds=%.2f", url, self._clock() - start)

        self._writing = _begin_writing(name, write)
        now = self._clock()
        self._schedule.restart(step, now)
        logger.info("saving checkpoint=%s step=%d pause_ms=%.1f", url, step, 1000 * (now - start))

    def _save(
        self, url: str, attachments: Mapping[str, bytes], on_snapshot: Callable[[], None]
    ) -> None:
        """Saves a delta of the latest checkpoint if wanted and possible, else all rows."""
        is_full = self._settings.mode == "full" or self._until_full == 0
        # One that replaces the latest, as at the same step of worker 0, cannot be a delta of it.
        is_full = is_full or self.latest is None or place_of(self.latest) == place_of(url)
        base = "" if is_full or self.latest is None else self.latest
        request = SaveRequest(url=url, attachments=attachments, base=base, on_snapshot=on_snapshot)
        try:
            self._store.save(request)
        except UnknownChangesError as error:  # before the snapshot: training still waits
            logger.warning("saving all rows instead of a delta checkpoint=%s: %s", url, error)
            base = ""
            self._store.save(replace(request, base=base))
        self._until_full = (self._until_full if base else self._settings.full_every) - 1

    def _end(self) -> bool:
        """Waits for the checkpoint being written; False: a server was lost with its share."""
        if self._writing is None:
            return True
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except SnapshotLostError:
            self._schedule.owe()
            return False
        return True
