"""The journal of an engine: events, each written before it is carried out, and the heads of segments."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from pydantic import TypeAdapter

from ctr_ps.protos.futures import Answered, Future
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.placement import ShardMap, server_name
from ctr_ps.protos.role import Members
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import Member
from ctr_ps.ps_server.coordination.job_state import JobState, Waiting

LOST, BACK, NEW_JOB = "lost", "back", "new job"
"""Kinds of records of events that are no calls."""

LOST_JSON = TypeAdapter(list[int])
BACK_JSON = TypeAdapter(Member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The server that writes a log: which one of how many, for which job."""

    server_index: int
    num_servers: int
    num_workers: int
    num_heter: int = 0
    num_at_start: int | None = None

    def __str__(self) -> str:
        """Returns the server for a message."""
        members = Members(self.num_workers, self.num_heter, self.num_at_start)
        return f"{server_name(self.server_index, self.num_servers)}, for {members}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What an engine knows at one moment, besides its parameters."""

    owner: Owner
    shard_map: ShardMap
    last_move: str  # token of the move that has led to it; empty: none
    jobs_before: int  # jobs that it had served
    job: JobState
    waiting: Sequence[Waiting]  # part of the job; waits for others, or is to be taken by them
    tables: Sequence[TableSpec]  # that were declared
    blocks: Sequence[tuple[DenseSpec, Values | None]]  # likewise, with the values that were given


class Journal:
    """Told of all that changes an engine, before it does.

    This one writes nothing: a server that ends loses what was not saved.
    """

    def written(self, kind: str, payload: bytes) -> AbstractContextManager[None]:
        """Held around an event, which is written first."""
        return nullcontext()

    def durable(self) -> Future[None]:
        """Returns a future that completes when every event so far is durable."""
        return Answered(None)

    def prepare_segment(self) -> None:
        """A segment is to begin soon: does what need not be done in `alone`."""

    def alone(self) -> AbstractContextManager[None]:
        """Held while no event is carried out; raises WaitTimeoutError if those under way do not end."""
        return nullcontext()

    def begin_segment(self, token: str, state: EngineState) -> None:
        """Begins the segment that needs none before it once the save `token` is published; in `alone`."""

    def saved(self, token: str, folder: str) -> None:
        """This server's share of a checkpoint is written; `folder` is the checkpoint's data folder."""


NO_JOURNAL = Journal()
