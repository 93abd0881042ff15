"""Answers to pulls: rows and dense pieces, now or at a version, and the rows that others changed."""

from collections.abc import Mapping, Sequence

import numpy as np

from ctr_ps.protos.errors import ProtocolError, WrongServerError
from ctr_ps.protos.futures import Answered
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import (
    Changed,
    Future,
    Missing,
    ModelState,
    Pulled,
    PulledPieces,
    StateChunk,
    Stretch,
    Version,
)
from ctr_ps.ps_server.coordination.coordinator import Coordinator
from ctr_ps.ps_server.engine.applier import Applier
from ctr_ps.ps_server.parameters import Parameters
from ctr_ps.ps_server.snapshot.before_step import BeforeStep, require_values_at
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.state_transfer import block_of


class Pulls:
    """Reads the parameters of one process. Thread-safe.

    Its methods are those of `protos.store.Store` for this process's keys and pieces; `job` says which
    version the parameters have.
    """

    def __init__(self, parameters: Parameters, applier: Applier) -> None:
        self._parameters = parameters
        self._applier = applier

    def sparse(
        self,
        job: Coordinator,
        keys: Mapping[str, Keys],
        *,
        missing: Missing,
        at: Version | None = None,
    ) -> Future[Pulled]:
        """See `Store.pull_sparse`; done when returned, unless it waits for `at`."""
        tables = {name: self._parameters.table(name) for name in keys}

        def answer() -> Pulled:
            version = job.pushes.version  # read first: the rows may have more, never less
            rows = {name: table.pull(keys[name], missing) for name, table in tables.items()}
            if (before := self._values_before(job, at)) is not None:
                for name, values in rows.items():
                    before.restore_rows(name, keys[name], values)
            return Pulled(rows, version)

        return job.pushes.at_version(at, answer)

    def dense(
        self, job: Coordinator, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """See `Store.pull_dense`; `into` has the length of this process's pieces."""
        blocks = {name: self._parameters.block(name) for name in into}
        for name, block in blocks.items():
            if into[name].shape != (block.length,):
                raise ProtocolError(
                    f"pull of dense block {name!r} into shape {into[name].shape}, expected "
                    f"({block.length},)"
                )
        return job.pushes.at_version(at, lambda: self._read(job, blocks, into, at))

    def pieces(
        self, job: Coordinator, blocks: Sequence[str], *, at: Version | None = None
    ) -> Future[PulledPieces]:
        """Reads this process's pieces of dense blocks; otherwise as `dense`."""
        pieces = {name: self._parameters.block(name) for name in blocks}

        def answer() -> PulledPieces:
            into = {name: np.empty(block.length, np.float32) for name, block in pieces.items()}
            return PulledPieces(into, self._read(job, pieces, into, at))

        return job.pushes.at_version(at, answer)

    def _read(
        self,
        job: Coordinator,
        blocks: Mapping[str, DenseTable],
        into: Mapping[str, Values],
        at: Version | None,
    ) -> Version:
        version = job.pushes.version
        for name, block in blocks.items():
            block.pull(into[name])
            if self._parameters.block(name) is not block:
                raise WrongServerError(
                    f"this server has another piece of dense block {name!r} now: ask for the shard map"
                )
        if (before := self._values_before(job, at)) is not None:
            for name, values in into.items():
                before.restore_block(name, values)
        return version

    def _values_before(self, job: Coordinator, at: Version | None) -> BeforeStep | None:
        """Returns the values at version `at` if the parameters are beyond it, or on their way; else None.

        To be called after values were read. A worker in step waits for others at every version, so only one
        that repeats its part of a step, in the place of a lost process, finds parameters beyond it.
        """
        if at is None or not job.waits_for_lost:
            return None
        before = self._applier.before_step
        is_applying = before is not None and before.step == at  # the version may not say so yet
        if at >= job.pushes.version and not is_applying:
            return None
        return require_values_at(
            at,
            before,
            newest=job.pushes.version,
            num_evicted=self._parameters.num_evicted(),
        )

    def changed(
        self, job: Coordinator, tables: Sequence[str], worker: int, *, max_rows: int
    ) -> Future[Changed]:
        """See `Store.pull_changed`; done when returned."""
        if max_rows < 1:
            raise ProtocolError(f"max_rows is {max_rows}, expected at least 1")
        if job.take_replaced(worker):
            self._parameters.reset_subscribers()  # a new process has none of what the lost one knew
        recording = {name: self._parameters.recording_table(name) for name in tables}
        version, room = job.pushes.version, max_rows
        rows: dict[str, tuple[Keys, Values]] = {}
        for name, table in recording.items():
            rows[name] = keys, _ = table.take_changed(worker, room)
            room -= keys.size
        return Answered(Changed(rows, version, has_more=not room))

    def state(
        self, job: Coordinator, keys: Mapping[str, Keys], blocks: Sequence[str]
    ) -> Future[ModelState]:
        """See `Store.pull_state`; done when returned. Of blocks, this process's pieces."""
        job.require_no_failure()
        pieces = {name: block_of(self._parameters.block(name)) for name in blocks}
        return Answered(ModelState(rows=self._parameters.rows_with_state(keys), blocks=pieces))

    def state_chunk(
        self, job: Coordinator, keys: Mapping[str, Keys], stretches: Sequence[Stretch]
    ) -> Future[StateChunk]:
        """Reads rows, and stretches of this process's pieces; otherwise as `state`."""
        job.require_no_failure()
        found = [(self._parameters.block(each.block), each) for each in stretches]
        blocks = [
            (each.block, each.start, block_of(block, each.start, each.stop))
            for block, each in found
        ]
        return Answered(StateChunk(list(self._parameters.rows_with_state(keys).items()), blocks))
