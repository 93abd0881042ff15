"""Joining a job on all servers of a cluster, or on none; and ending it from outside.

ask all: is the place free? --> one past, one job --> take it on server 0 --> then on the others
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ctr_ps.protos.errors import (
    AbortedError,
    CtrPsError,
    JobError,
    ProtocolError,
    TransportError,
    comes_again,
)
from ctr_ps.protos.futures import Combined, Future, results, results_of_all_ended
from ctr_ps.protos.store import LONGEST_RENEWAL_S, Joined, Member, WorkerLoss, abort_reason
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_worker.cluster.transport import Transport, call_all

logger = logging.getLogger(__name__)

ABORT_S = 5.0
"""For a server that is away to hear of an abort: less than the grace of a worker that is told to end."""


def join_servers(transport: Transport, join: requests.Join) -> Future[Joined]:
    """Takes a worker's place on all servers; see `protos.store.Coordination.join`."""
    asked = call_all(transport, calls.JOIN, replace(join, only_asks=True))

    def combine() -> Joined:
        try:
            parts = results(asked)
            _require_same_past(transport.endpoints, parts)
            _require_one_job(transport.endpoints, parts)
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
            barriers_passed=max(part.barriers_passed for part in parts),
            has_update_log=all(part.has_update_log for part in parts),
            version=min(part.version for part in parts),
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
    for server, joined in enumerate(joining):
        try:
            joined.result()
            transport.call(server, calls.ABORT, abort, ready_s=ready_s).result()
        except (AbortedError, JobError):  # it has ended there, or goes on without this process
            continue
        except CtrPsError as failure:
            logger.warning("the others could not be told of the error: %s", failure)


def _take_place(transport: Transport, join: requests.Join) -> list[Joined]:
    """Joins on all servers; where one refuses, gives back the place on the others."""
    # In this order: of several that come for a place, the first server has one, and so have all.
    first = transport.call(0, calls.JOIN, join).result()
    others = range(1, len(transport.endpoints))
    try:
        return [
            first,
            *results_of_all_ended([transport.call(server, calls.JOIN, join) for server in others]),
        ]
    except ProtocolError:
        _give_back(transport, join.member)
        raise


def _give_back(transport: Transport, member: Member) -> None:
    """Frees the place that a process has on some servers, and which another one has on others."""
    request = requests.Renew(member=member, is_last=True)
    pending = call_all(transport, calls.RENEW, request, ready_s=LONGEST_RENEWAL_S)
    # Those on which it has no place refuse; on one that does not answer its lease expires.
    with suppress(CtrPsError):
        results_of_all_ended(pending)


def _require_same_past(endpoints: Sequence[str], joined: Sequence[Joined]) -> None:
    """Raises ProtocolError if servers have served different numbers of jobs."""
    jobs = [each.jobs_before for each in joined]
    if len(set(jobs)) > 1:
        served = ", ".join(map("{} {}".format, endpoints, jobs))
        raise ProtocolError(
            f"servers have served different numbers of jobs before this one ({served}), so some were "
            f"restarted and their parameters do not belong together: restart all of them"
        )


def _require_one_job(endpoints: Sequence[str], joined: Sequence[Joined]) -> None:
    """Raises ProtocolError if one server has recovered an earlier job, and another started fresh.

    A process goes from barrier to barrier when all servers say so, and nobody trains before the first.
    """
    passed = [each.barriers_passed for each in joined]
    versions = [each.version for each in joined]
    is_possible = min(passed) > 0 or max(passed) == 0 or len(set(versions)) == 1
    if max(passed) - min(passed) <= 1 and is_possible:
        return
    points = "; ".join(
        f"{endpoint} barrier {number}, version {version}"
        for endpoint, number, version in zip(endpoints, passed, versions, strict=True)
    )
    raise ProtocolError(
        f"this process finds the servers at points that no job has in common ({points}): one went on "
        f"with an update log of another job. Stop all servers, remove their update logs, and start the "
        f"job again from its checkpoint"
    )
