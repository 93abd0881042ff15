"""Recovery: a restarted server becomes what the one before it was, by its update log.

    newest segment whose checkpoint is published: its state, and the checkpoint's parameters
    --> the calls that waited then --> all calls since, in order

Calls are carried out as at first, by the same handlers, so whoever calls once more is told what the server
before had done.
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from pydantic import ValidationError

from ctr_ps.protos.errors import (
    AbortedError,
    CtrPsError,
    GradientError,
    LogError,
    OverloadedError,
    ProtocolError,
    RecoveringError,
    SpecError,
    UsageError,
)
from ctr_ps.protos.format import FORMAT, require_format
from ctr_ps.protos.placement import NO_SERVER
from ctr_ps.protos.wire.calls import CALLS, CREATE_DENSE, CREATE_TABLE, POST
from ctr_ps.ps_server.coordination.job_state import WaitingMessage
from ctr_ps.ps_server.durability.saved_log import SavedLog
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.engine import journal
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_server.rpc import journal as server_journal

logger = logging.getLogger(__name__)

_REFUSALS = (
    ProtocolError,
    GradientError,
    SpecError,
    UsageError,
    AbortedError,
    OverloadedError,
)
"""With which a server answers a call for what it asks: nothing of it was carried out at first, either."""

Replay = Callable[[str, bytes], None]
"""Carries out a call, given its name and its request as it came."""

TELL_S = 10.0  # between two lines of the log that say how far a recovery is


class StoppedError(Exception):
    """The server is to end before it has recovered."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a recovery took: the calls of the log, and seconds for the checkpoint and for them.

    `format` is that of the log's last records.
    """

    calls: int
    load_s: float
    replay_s: float
    format: int = FORMAT


class Progress:
    """How far a server has come that does not serve yet, in words and in shards and calls.

    One thread works, others look.
    """

    def __init__(self) -> None:
        self.text = "recovering: starting"
        self._done = 0
        self._is_stopped = False

    def stop(self) -> None:
        """Has the working thread raise StoppedError with its next shard or call."""
        self._is_stopped = True

    def step(self) -> None:
        """A shard or a call is done."""
        self._done += 1
        if self._is_stopped:
            raise StoppedError

    def error(self) -> RecoveringError:
        """Returns the answer to a call that comes meanwhile."""
        return RecoveringError(f"{self.text}; wait until the server serves", progress=self._done)


def recover(
    engine: Engine,
    saved: SavedLog,
    *,
    replay: Replay,
    restore_completed: Callable[[server_journal.CompletedState], None],
    progress: Progress | None = None,
) -> Replayed:
    """Makes an empty engine what the log says, which has segments.

    `restore_completed` takes over the calls that are not carried out again.

    Raises:
        LogError: If the log is damaged, of another server, of a format that this release does not read, has
            a member of the job with such a format, or its checkpoint is not there.
        CheckpointError: If the checkpoint is damaged.
        StoppedError: If `progress` is stopped.
    """
    progress = progress or Progress()
    segment, state, checkpoint = _begin_of(saved)
    if not _is_of(state, engine.owner):
        raise LogError(
            f"the update log {saved.folder.path} belongs to {state.owner}, but this process is "
            f"{engine.owner}: start it with its own log, list of servers and PADDLE_TRAINERS_NUM, or remove "
            "the folder if its job is no longer needed"
        )
    head = saved.head(segment)[1:]
    if state.shard_map is not None or state.owner.server_index == NO_SERVER:
        # It was moved to another place than it was started for, or is not added yet.
        engine.place(state.shard_map or engine.shard_map, state.owner.server_index)
        engine.last_move = state.last_move
    for record in head:
        if record.kind in (CREATE_TABLE.name, CREATE_DENSE.name):
            replay_record(record, engine, replay)
    start = time.monotonic()
    if checkpoint is not None:
        progress.text = f"recovering: loading {checkpoint.url}"
        engine.load(checkpoint.url, token=checkpoint.token, on_shard=progress.step)
    engine.restore(state.jobs_before, state.job)
    restore_completed(state.completed)
    loaded = time.monotonic()
    num_calls, num_bytes, told, format = 0, 0, loaded, state.format
    of_bytes = saved.size_from(segment)
    with engine.recovering(progress.step):  # nobody waits for an answer before the next call
        for record in head:
            if record.kind not in (CREATE_TABLE.name, CREATE_DENSE.name):
                replay_record(record, engine, replay)
        for record in saved.records_from(segment):
            if record.kind == server_journal.RESUMED:
                resumed = server_journal.RESUMED_JSON.validate_json(bytes(record.payload))
                _require_read(saved, resumed.format, resumed.written_by)
                format = resumed.format
            replay_record(record, engine, replay)
            num_calls += 1
            num_bytes += len(record.payload)
            progress.text = f"recovering: {num_bytes / of_bytes:.0%} of the update log replayed"
            progress.step()
            if (now := time.monotonic()) - told >= TELL_S:
                told = now
                logger.info(
                    "%s calls=%d calls/s=%.0f", progress.text, num_calls, num_calls / (now - loaded)
                )
    for worker, theirs in engine.job.formats().items():  # it goes on to call without joining again
        require_format(theirs, engine.members.name(worker), error=LogError)
    replayed = Replayed(num_calls, loaded - start, time.monotonic() - loaded, format)
    logger.info(
        "recovered checkpoint=%s calls=%d version=%d load_seconds=%.2f replay_seconds=%.2f calls/s=%.0f",
        "none" if checkpoint is None else checkpoint.url,
        num_calls,
        engine.status().version,
        replayed.load_s,
        replayed.replay_s,
        num_calls / max(replayed.replay_s, 1e-6),
    )
    return replayed


def _is_of(state: server_journal.ServerState, owner: journal.Owner) -> bool:
    """Whether a process may go on as the server that has written a state.

    The log of one that was added has its index, whether or not the list of servers names it by now. One of
    the list has no map in its log before the first move, and needs the list.
    """
    of_job = replace(owner, server_index=0, num_servers=1) == replace(
        state.owner, server_index=0, num_servers=1
    )
    indices = {state.owner.server_index, owner.server_index}
    if state.shard_map is None and state.owner.server_index != NO_SERVER:
        return state.owner == owner
    return of_job and (len(indices - {NO_SERVER}) <= 1)


def _begin_of(
    saved: SavedLog,
) -> tuple[int, server_journal.ServerState, server_journal.SavedAt | None]:
    """Returns the newest segment that recovery can begin with, its state, and its checkpoint, if any."""
    unpublished = []
    for segment in reversed(saved.segments):
        first = saved.head(segment)[0]
        if first.kind != server_journal.STATE:
            raise LogError(
                f"segment {segment} of the update log {saved.folder.path} has no state: restore the file, or "
                f"remove the folder and start the job again from its checkpoint"
            )
        written = json.loads(bytes(first.payload))
        format, written_by = written.get("format", 0), written.get("written_by", "an old version")
        _require_read(saved, format, written_by)
        try:
            state = server_journal.STATE_JSON.validate_json(bytes(first.payload))
        except ValidationError as error:
            raise LogError(
                f"the update log {saved.folder.path}, by ctr-ps {written_by}, has a state of format {format} "
                f"that this release, of format {FORMAT}, cannot read: start {written_by} to resume"
            ) from error
        if not state.base:
            return segment, state, None
        saves = (
            server_journal.SAVED_JSON.validate_json(bytes(record.payload))
            for record in chain(saved.head(segment), saved.records_from(segment))
            if record.kind == server_journal.SAVED
        )
        checkpoint = next((save for save in saves if save.token == state.base), None)
        if checkpoint is not None and checkpoint.is_published:
            return segment, state, checkpoint
        unpublished.append(state.base if checkpoint is None else checkpoint.url)
    raise LogError(
        f"the update log {saved.folder.path} begins at a checkpoint that no longer exists: "
        f"{', '.join(unpublished)}; restore it, or remove the folder and start the job again"
    )


def _require_read(saved: SavedLog, format: int, written_by: str) -> None:
    """Raises LogError if this release does not read a log's records of a format."""
    require_format(
        format, f"the update log {saved.folder.path}, by ctr-ps {written_by},", error=LogError
    )


def replay_record(record: Record, engine: Engine, replay: Replay) -> None:
    """Carries out what a record says; what broke the contract at first is refused again.

    Raises LogError if a call fails that may have succeeded at first, as by storage that is away now.
    """
    payload = bytes(record.payload)
    try:
        match record.kind:
            case journal.LOST:
                engine.lose(journal.LOST_JSON.validate_json(payload))
            case journal.BACK:
                engine.job.bring_back(journal.BACK_JSON.validate_json(payload))
            case journal.NEW_JOB:
                engine.begin_job()
            case server_journal.MESSAGE:
                post = POST.request.decode(payload)
                engine.job.hold(WaitingMessage(exchange=post.exchange, message=post.message))
            case server_journal.PART:
                engine.hold_part(server_journal.waiting_part(payload))
            case server_journal.SAVED | server_journal.RESUMED:
                pass
            case call if call in CALLS:
                replay(call, payload)
            case call:
                raise LogError(
                    f"the update log has a call {call!r}, which this version of ctr-ps does not know"
                )
    except _REFUSALS as error:
        logger.info(
            "replayed a call that was refused, and is refused again: call=%s: %s",
            record.kind,
            error,
        )
    except LogError:
        raise
    except CtrPsError as error:
        raise LogError(
            f"cannot replay {record.kind} of the update log: {error}; fix this and start the server again, "
            "or remove the log and start the job again from its checkpoint"
        ) from error
