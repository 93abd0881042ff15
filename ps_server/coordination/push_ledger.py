"""The push ledger: which pushes of each worker are applied, each once, and the progress that follows.

    pushes applied   0 1 2 . 4        a push may overtake another on its way through threads
    whole up to          ^            progress is what push id 2 says, until push 3 is applied, too

A push that comes again, because its answer was lost, is found here and not applied again. The step and
position of a push id hold once its push and all before it are applied, so a worker that resumes from its
progress leaves out nothing. It repeats what was applied beyond. The parts of synchronous steps come in order:
of these the ledger keeps the progress alone, and the number of the step tells a part that comes again.

After the completion records of Lee et al., "Implementing linearizability at large scale and low latency",
SOSP 2015 (RIFL).

Sans-IO: pushes in, decisions and progress out; no clock, no locks.
"""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ctr_ps.protos.errors import LostPushesError, ProtocolError
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import FILE, Member, PushId, WorkerProgress

MAX_VERSION = 2**53
"""A run does not resume at a later one."""

MAX_POSITION = 4096  # characters of a position, which status and checkpoints carry

MAX_PARTITIONS = 10_000  # of a worker, with a position in each
MAX_PARTITION_CHARACTERS = 1024  # characters of the name of a partition, and of a position in it

MAX_AHEAD = 2**16
"""Pushes of a worker that may be applied beyond one that has not come: far more than any keeps on the way."""

_MOST = {
    "incarnation": 2**64 - 1,
    "sequence": MAX_VERSION,
    "step": MAX_VERSION,
    "examples": 2**32,
    "batches": 2**24,
    "pulled": MAX_VERSION,
}
"""Far above what any worker sends; after 2**32 such pushes a sum of examples would leave a uint64."""


def require_plausible(who: str, numbers: PushId | WorkerProgress) -> None:
    """Raises ProtocolError if a number of the worker `who` is out of its range, or the position too long."""
    for name, most in _MOST.items():
        if not 0 <= (value := getattr(numbers, name, 0)) <= most:
            raise ProtocolError(f"{who} reports {name} = {value}, expected 0 to {most}")
    weight = getattr(numbers, "weight", None)
    if weight is not None and not 0 <= weight < math.inf:
        raise ProtocolError(f"{who} reports weight = {weight}, expected 0 or more")
    if len(numbers.position) > MAX_POSITION:
        raise ProtocolError(
            f"{who} reports a position of {len(numbers.position)} characters, expected up to {MAX_POSITION}"
        )
    if len(numbers.partitions) > MAX_PARTITIONS:
        raise ProtocolError(
            f"{who} reports {len(numbers.partitions)} partitions, expected up to {MAX_PARTITIONS}: start "
            "more workers"
        )
    if (
        max(map(len, (*numbers.partitions, *numbers.partitions.values())), default=0)
        > MAX_PARTITION_CHARACTERS
    ):
        raise ProtocolError(
            f"{who} reports a partition of more than {MAX_PARTITION_CHARACTERS} characters"
        )


def require_number(who: str, what: str, number: int) -> None:
    """Raises ProtocolError if a step or clock of the worker `who` is out of its range."""
    if number > MAX_VERSION:
        raise ProtocolError(f"{who} reports {what} {number}, expected up to {MAX_VERSION}")


def lost_pushes(name: str, lost: str) -> LostPushesError:
    """Returns the error of a server that has less of the worker `name` than it had acknowledged."""
    return LostPushesError(
        f"pushes of {name} are lost: {lost}. The end of this server's update log is missing, which can "
        "happen with --log-sync os when a machine crashes: start the job again from its checkpoint"
    )


class PushState(enum.Enum):
    """What a server has done with a push."""

    NEW = enum.auto()
    APPLYING = enum.auto()
    APPLIED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPushes:
    """Which pushes of a process are applied: all before `next_sequence`, and those `ahead` of it."""

    incarnation: int
    next_sequence: int
    ahead: tuple[PushId, ...]


@dataclass(slots=True)
class _Incarnation:
    """The pushes of one process: its number, the next push to be whole, those beyond, those being applied."""

    number: int
    next_sequence: int = 0
    ahead: dict[int, PushId] = field(default_factory=dict)
    applying: set[int] = field(default_factory=set)


class PushLedger:
    """The pushes of all workers. Not thread-safe."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._incarnations: dict[int, _Incarnation] = {}
        self._progress: dict[int, WorkerProgress] = {}
        self._partitions: dict[int, dict[str, str]] = {}  # of those that read a stream
        self.duplicates = 0  # pushes that came again, and were not applied again

    def state(self, push_id: PushId) -> PushState:
        """Returns what was done with a push."""
        if (pushes := self._pushes_of(push_id)) is None:
            return PushState.NEW
        if push_id.sequence < pushes.next_sequence or push_id.sequence in pushes.ahead:
            return PushState.APPLIED
        return PushState.APPLYING if push_id.sequence in pushes.applying else PushState.NEW

    def begin(self, push_id: PushId) -> PushState:
        """A push came, to be applied on arrival; one that is new is now being applied.

        Raises ProtocolError if it is too far beyond a push that has not come.
        """
        state = self.state(push_id)
        if state is not PushState.NEW:
            self.duplicates += 1
            return state
        pushes = self._pushes_of(push_id)
        if pushes is None:  # those of a process before it are forgotten
            pushes = self._incarnations[push_id.worker] = _Incarnation(push_id.incarnation)
        if push_id.sequence >= pushes.next_sequence + MAX_AHEAD:
            raise ProtocolError(
                f"push {push_id.sequence} of {self._members.name(push_id.worker)} arrived, but push "
                f"{pushes.next_sequence} did not: a worker numbers its pushes without gaps"
            )
        pushes.applying.add(push_id.sequence)
        return state

    def abandon(self, push_id: PushId) -> None:
        """A push could not be applied: it is as if it had not come."""
        if (pushes := self._pushes_of(push_id)) is not None:
            pushes.applying.discard(push_id.sequence)

    def note(self, push_id: PushId) -> None:
        """Records that a push on arrival was applied.

        Not that of a process which was replaced meanwhile: the one in its place goes on from the progress
        that it was told, and its pushes are not forgotten for it.
        """
        if (pushes := self._pushes_of(push_id)) is None:
            return
        pushes.applying.discard(push_id.sequence)
        pushes.ahead[push_id.sequence] = push_id
        while (whole := pushes.ahead.pop(pushes.next_sequence, None)) is not None:
            pushes.next_sequence += 1
            self.note_part(whole)

    def num_applied(self, member: Member) -> int:
        """Returns how many pushes of a process are applied, from the first on, without a gap."""
        return 0 if (pushes := self._pushes_of(member)) is None else pushes.next_sequence

    def num_seen(self, member: Member) -> int:
        """Returns how many pushes of a process have come, from the first to the last, applied or not."""
        if (pushes := self._pushes_of(member)) is None:
            return 0
        return max(
            pushes.next_sequence, *(1 + each for each in (*pushes.ahead, *pushes.applying, -1))
        )

    def note_part(self, push_id: PushId) -> None:
        """Records that the step that a push was a part of was applied."""
        self._progress[push_id.worker] = progress_of(push_id)
        if not push_id.sequence:
            before = self._partitions.get(push_id.worker, {})
            self._partitions[push_id.worker] = {k: before[k] for k in before if k.startswith(FILE)}
        if push_id.partitions:
            self._partitions.setdefault(push_id.worker, {}).update(push_id.partitions)

    def _pushes_of(self, process: PushId | Member) -> _Incarnation | None:
        """Returns the pushes of a process; None: it has begun none, or was replaced."""
        pushes = self._incarnations.get(process.worker)
        return pushes if pushes is not None and pushes.number == process.incarnation else None

    @property
    def has_begun(self) -> bool:
        """Whether a push on arrival has come."""
        return bool(self._incarnations)

    def restore(self, progress: Mapping[int, WorkerProgress]) -> None:
        """Takes over progress, which holds until a worker's next push."""
        self._progress = {
            worker: replace(each, sent=0, sent_partitions={}) for worker, each in progress.items()
        }
        self._partitions = {worker: dict(each.partitions) for worker, each in progress.items()}

    def progress(self) -> dict[int, WorkerProgress]:
        """Returns the progress by worker; a worker that has pushed nothing is missing."""
        return {
            worker: replace(each, partitions=dict(positions))
            if (positions := self._partitions.get(worker))
            else each
            for worker, each in self._progress.items()
        }

    def applied(self) -> dict[int, AppliedPushes]:
        """Returns which pushes are applied, by worker."""
        return {
            worker: AppliedPushes(
                incarnation=pushes.number,
                next_sequence=pushes.next_sequence,
                ahead=tuple(pushes.ahead[sequence] for sequence in sorted(pushes.ahead)),
            )
            for worker, pushes in sorted(self._incarnations.items())
        }

    def restore_applied(self, applied: Mapping[int, AppliedPushes]) -> None:
        """Takes over what `applied` returned."""
        self._incarnations = {
            worker: _Incarnation(
                each.incarnation,
                each.next_sequence,
                {push_id.sequence: push_id for push_id in each.ahead},
            )
            for worker, each in applied.items()
        }


def progress_of(push_id: PushId) -> WorkerProgress:
    """Returns a worker's progress once this push and all before it are applied."""
    return WorkerProgress(
        incarnation=push_id.incarnation,
        sequence=push_id.sequence,
        step=push_id.step,
        position=push_id.position,
    )
