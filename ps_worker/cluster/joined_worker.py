"""A worker's part in a job on all servers of a cluster: joining it on all or none, its barriers, its end.

    ask all: is the place free? --> one past, one job --> take it on server 0 --> then on the others

Every server counts the barriers of a worker and hears which of its pushes all servers have; the first one
alone reduces numbers and compares clocks. A process without a place may end a job from outside.
"""

import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from ctr_ps.protos.errors import (
    AbortedError,
    CtrPsError,
    JobError,
    ProtocolError,
    TransportError,
    WrongServerError,
    comes_again,
)
from ctr_ps.protos.futures import (
    Answer,
    Combined,
    Future,
    first_error_of,
    results,
    results_of_all_ended,
    wait_for_all,
)
from ctr_ps.protos.store import (
    LONGEST_RENEWAL_S,
    Acknowledged,
    Joined,
    Lease,
    Member,
    Numbers,
    PushId,
    Reduced,
    ReduceOp,
    Version,
    WorkerLoss,
    abort_reason,
    require_numbers,
)
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_worker.cluster.placement import Placement
from ctr_ps.ps_worker.cluster.routing import Routing
from ctr_ps.ps_worker.cluster.transport import Transport, call_all

A = TypeVar("A")

logger = logging.getLogger(__name__)

ABORT_S = 5.0
"""For a server that is away to hear of an abort: less than the grace of a worker that is told to end."""


def join_servers(transport: Transport, join: requests.Join) -> Future[Joined]:
    """Takes a worker's place on all servers; see `protos.store.Coordination.join`."""
    asks = replace(join, only_asks=True)
    asked = call_all(transport, calls.JOIN, asks)

    def combine() -> Joined:
        try:
            parts = results(asked)
            if not _have_one_past(parts):  # one may have answered long before another
                parts = results(call_all(transport, calls.JOIN, asks))
            _require_one_past(transport.shard_map.endpoints, parts)
            parts = _take_place(transport, join)
        except CtrPsError as error:
            # Some servers alone may know. Where lost workers are waited for, another process may come.
            waits = join.lease is not None and join.lease.on_worker_loss is WorkerLoss.WAIT
            if isinstance(error, AbortedError | JobError) or (
                isinstance(error, TransportError) and not waits
            ):
                abort_on_each(transport, join, error, ready_s=ABORT_S)
            raise
        return Joined(
            jobs_before=parts[0].jobs_before,
            # The first one alone knows numbers: of a barrier that only others have passed none are known.
            barriers_passed=max(
                parts[0].barriers_passed, *(min(part.barriers_passed, 1) for part in parts)
            ),
            has_update_log=all(part.has_update_log for part in parts),
            version=min(part.version for part in parts),
            restart=parts[0].restart,
        )

    return Combined(combine)


def abort_on_each(
    transport: Transport, join: requests.Join, error: BaseException, *, ready_s: float
) -> None:
    """Ends the job by an error of a process without a place, on each server where it can take one.

    A server that is not there, or does not answer, is waited for `ready_s` seconds.
    """
    abort = requests.Abort(
        member=join.member, reason=abort_reason(error), comes_again=comes_again(error)
    )
    joining = call_all(transport, calls.JOIN, join, ready_s=ready_s)
    for server, joined in zip(transport.shard_map.servers, joining, strict=True):
        try:
            joined.result()
            transport.call(server, calls.ABORT, abort, ready_s=ready_s).result()
        except (AbortedError, JobError):  # it has ended there, or goes on without this process
            continue
        except CtrPsError as failure:
            logger.warning("other workers could not be told of the error: %s", failure)


def _take_place(transport: Transport, join: requests.Join) -> list[Joined]:
    """Joins on all servers; where one refuses, gives back the place on the others."""
    # In this order: of several that come for a place, the first server has one, and so have all.
    first = transport.call(0, calls.JOIN, join).result()
    others = transport.shard_map.servers[1:]
    try:
        return [
            first,
            *results_of_all_ended([transport.call(server, calls.JOIN, join) for server in others]),
        ]
    except ProtocolError:
        renew = requests.Renew(member=join.member, is_last=True)
        given_back = call_all(transport, calls.RENEW, renew, ready_s=LONGEST_RENEWAL_S)
        # Those on which it has no place refuse; on one that does not answer its lease expires.
        with suppress(CtrPsError):
            results_of_all_ended(given_back)
        raise


def _have_one_past(joined: Sequence[Joined]) -> bool:
    """Whether servers may be at these points of one job."""
    passed = [each.barriers_passed for each in joined]
    num_versions = len({each.version for each in joined})
    is_possible = min(passed) > 0 or max(passed) == 0 or num_versions == 1
    return max(passed) - min(passed) <= 1 and is_possible


def _require_one_past(endpoints: Sequence[str], joined: Sequence[Joined]) -> None:
    """Raises ProtocolError if servers have served different numbers of jobs, or are at different points.

    A process goes from barrier to barrier when all servers say so, and nobody trains before the first; else
    one server has recovered an earlier job, and another started fresh.
    """
    jobs = [each.jobs_before for each in joined]
    if len(set(jobs)) > 1:
        served = ", ".join(map("{} {}".format, endpoints, jobs))
        raise ProtocolError(
            f"servers have served different numbers of jobs before this one ({served}): some were "
            "restarted, and their parameters do not fit together. Restart all of them"
        )
    if _have_one_past(joined):
        return
    points = "; ".join(
        f"{endpoint} barrier {each.barriers_passed}, version {each.version}"
        for endpoint, each in zip(endpoints, joined, strict=True)
    )
    raise ProtocolError(
        f"the servers are at points of different jobs ({points}), so one recovered from the update log of "
        "another job. Stop all servers, remove their update logs, and start the job again from its "
        "checkpoint"
    )


class Acknowledgements:
    """Which pushes of one process all servers have acknowledged, so that none may lose them. Thread-safe.

    pushes acknowledged   0 1 2 . 4      answers may come in any order
    told to servers             ^        all of them, without a gap
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes = 0
        self._ahead: set[int] = set()
        self._steps: Version = 0

    def note(self, push_id: PushId, at: Version | None) -> None:
        """All servers have acknowledged a push, the part of step `at` or applied on arrival."""
        with self._lock:
            if at is not None:
                self._steps = max(self._steps, at + 1)
                return
            if push_id.sequence >= self._pushes:
                self._ahead.add(push_id.sequence)
            while self._pushes in self._ahead:
                self._ahead.remove(self._pushes)
                self._pushes += 1

    def told(self) -> Acknowledged:
        """Returns what servers are told."""
        with self._lock:
            return Acknowledged(pushes=self._pushes, steps=self._steps)


class JoinedWorker:
    """A worker that has joined, with its methods of `protos.store.Store`. It is at one barrier at a time."""

    def __init__(
        self,
        transport: Transport,
        placement: Placement,
        member: Member,
        lease: Lease | None,
        restart: int,
    ) -> None:
        """Goes on at barrier `restart` after the first one."""
        self._placement = placement
        self.member = member
        self.lease = lease
        self.acknowledgements = Acknowledgements()
        self._transport = transport
        self._renewals: dict[int, Answer[None]] = {}  # by server, those on their way
        self._renewed_by = placement.epoch  # of the map that they were placed by
        self._num_barriers = 0
        self._numbers = itertools.count(1)  # of its calls since the last barrier
        self._restart = restart

    def renew(self, *, is_last: bool) -> None:
        """See `protos.store.Store`; a server that is away keeps no other from hearing of the worker."""
        while True:
            routing = self._placement.routing
            try:
                self._renew(routing.shard_map.epoch, is_last=is_last)
            except WrongServerError as error:
                # Again at once: moves may follow each other faster than renewals.
                if self._placement.newer(routing, error) is not routing:
                    continue
            return

    def _renew(self, epoch: int, *, is_last: bool) -> None:
        request = requests.Renew(
            member=self.member,
            is_last=is_last,
            acknowledged=self.acknowledgements.told(),
            shard_map_epoch=epoch,
        )
        limit_s = LONGEST_RENEWAL_S if self.lease is None else self.lease.renewal_s
        if is_last:
            results_of_all_ended(call_all(self._transport, calls.RENEW, request, ready_s=limit_s))
            return
        if self._renewed_by != epoch:  # all servers refuse what an older map has placed
            self._renewed_by, self._renewals = epoch, {}
        renewals = self._renewals
        for server in self._transport.shard_map.servers:
            if server not in renewals:
                renewals[server] = self._transport.call(server, calls.RENEW, request)
        # One whose server is away is sent again, while the others have their next.
        wait_for_all(first_error_of(list(renewals.values())), limit_s)
        for server in [server for server in sorted(renewals) if renewals[server].wait(0.0)]:
            renewals.pop(server).result()

    def confirm_place(self) -> None:
        request = requests.Renew(member=self.member, acknowledged=self.acknowledgements.told())
        lease_s = math.inf if self.lease is None else self.lease.seconds
        while True:
            asked = time.monotonic()
            self._to_all(calls.RENEW, request).result()
            if time.monotonic() - asked < lease_s:
                return
            # The process may have stood still since the answer came.

    def _to_all(self, call: Call[Any, A], request: Any) -> Future[list[A]]:
        """Starts a call to every server, with the epoch of their map; all have ended when it is answered."""

        def start(routing: Routing) -> Future[list[A]]:
            placed = replace(request, shard_map_epoch=routing.shard_map.epoch)
            pending = call_all(self._transport, call, placed)
            return Combined(lambda: results_of_all_ended(pending))

        return self._placement.placed(start)

    def barrier(self, name: str, *, step: Version) -> Future[Version]:
        request = self._barrier_request(name, step)

        def start(routing: Routing) -> Future[Version]:
            placed = replace(request, shard_map_epoch=routing.shard_map.epoch)
            pending = call_all(self._transport, calls.BARRIER, placed)
            return Combined(lambda: self._common_version(request, results(pending)))

        return self._placement.placed(start)

    def all_reduce(
        self, name: str, values: Numbers, op: ReduceOp, *, step: Version, remember: bool
    ) -> Future[Reduced]:
        """See `protos.store.Store`; on servers other than the first it is a barrier."""
        require_numbers(name, values)
        request = self._barrier_request(name, step)
        numbers = requests.AllReduce(
            name=name,
            member=request.member,
            values=values.copy(),  # they may be reused, and needed again
            op=op,
            step=step,
            number=request.number,
            acknowledged=request.acknowledged,
            remember=remember,
        )

        def start(routing: Routing) -> Future[Reduced]:
            epoch = routing.shard_map.epoch
            reduction = self._transport.call(
                0, calls.ALL_REDUCE, replace(numbers, shard_map_epoch=epoch)
            )
            placed = replace(request, shard_map_epoch=epoch)
            pending = [
                self._transport.call(server, calls.BARRIER, placed)
                for server in routing.shard_map.servers[1:]
            ]

            def combine() -> Reduced:
                first_error_of([reduction, *pending])
                reduced = reduction.result()
                version = self._common_version(request, [reduced.version, *results(pending)])
                return Reduced(reduced.values, version)

            return Combined(combine)

        return self._placement.placed(start)

    def next_number(self) -> int:
        """Returns the number of a call that a process in this one's place, at the same point, makes again."""
        return self._num_barriers << 16 | next(self._numbers)

    def _barrier_request(self, name: str, step: Version) -> requests.Barrier:
        self._num_barriers += 1
        if self._num_barriers > 1:
            self._num_barriers = max(self._num_barriers, self._restart)
        self._numbers = itertools.count(1)
        return requests.Barrier(
            name=name,
            member=self.member,
            step=step,
            number=self._num_barriers,
            acknowledged=self.acknowledgements.told(),
        )

    def _common_version(self, barrier: requests.Barrier, versions: Sequence[Version]) -> Version:
        """Returns the version that servers have after a barrier: of all the same, or the largest.

        In asynchronous training a worker that was lost may have reached some servers with its last pushes.
        """
        is_without_loss = self.lease is None or self.lease.on_worker_loss is WorkerLoss.FAIL
        if len(set(versions)) > 1 and (is_without_loss or barrier.step > 0):
            raise ProtocolError(
                f"after barrier {barrier.name!r} the servers have different versions {versions}: did a "
                "worker reach it before its pushes had returned?"
            )
        return max(versions)

    def advance(self, clock: int, *, at_least: int) -> Future[int]:
        """See `protos.store.Store`; the first server knows how far all are."""
        request = requests.Advance(
            member=self.member,
            clock=clock,
            at_least=max(0, at_least),
            after_barrier=self._num_barriers,
        )
        return self._placement.placed(
            lambda routing: self._transport.call(
                0, calls.ADVANCE, replace(request, shard_map_epoch=routing.shard_map.epoch)
            )
        )

    def leave(self, *, step: Version) -> None:
        request = requests.Leave(member=self.member, step=step)
        self._to_all(calls.LEAVE, request).result()

    def abort(self, reason: str, *, comes_again: bool) -> None:
        request = requests.Abort(member=self.member, reason=reason, comes_again=comes_again)
        endpoints = self._transport.shard_map.endpoints
        pending = call_all(self._transport, calls.ABORT, request)
        ended = wait_for_all(pending, ABORT_S)
        results_of_all_ended(ended)
        if len(ended) < len(pending):
            away = [
                endpoint
                for endpoint, answer in zip(endpoints, pending, strict=False)
                if answer not in ended
            ]
            raise TransportError(
                f"servers {', '.join(away)} did not answer Abort within {ABORT_S:g} s"
            )
