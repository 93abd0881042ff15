"""A worker's part in a job on all servers of a cluster: its place, its barriers, its end.

Every server counts the barriers of a worker and hears which of its pushes all servers have; the first one
alone reduces numbers and compares clocks.
"""

from collections.abc import Sequence

from ctr_ps.protos.errors import ProtocolError, TransportError
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
    Lease,
    Member,
    Numbers,
    Reduced,
    ReduceOp,
    Version,
    WorkerLoss,
    require_numbers,
)
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_worker.cluster.acknowledgements import Acknowledgements
from ctr_ps.ps_worker.cluster.join import ABORT_S
from ctr_ps.ps_worker.cluster.transport import Transport, call_all


class JoinedWorker:
    """A worker that has joined through a client. It comes to one barrier at a time.

    Attributes:
        member: The worker's process.
        lease: As it joined.
        acknowledgements: Of its pushes.
    """

    def __init__(self, transport: Transport, member: Member, lease: Lease | None) -> None:
        self.member = member
        self.lease = lease
        self.acknowledgements = Acknowledgements()
        self._transport = transport
        self._renewals: dict[int, Answer[None]] = {}  # by server, those on their way
        self._num_barriers = 0

    def renew(self, *, is_last: bool) -> None:
        """See `protos.store.Store`; a server that is away keeps no other from hearing of the worker."""
        request = requests.Renew(
            member=self.member, is_last=is_last, acknowledged=self.acknowledgements.told()
        )
        limit_s = LONGEST_RENEWAL_S if self.lease is None else self.lease.renewal_s
        if is_last:
            results_of_all_ended(call_all(self._transport, calls.RENEW, request, ready_s=limit_s))
            return
        renewals = self._renewals
        for server in range(len(self._transport.endpoints)):
            if server not in renewals:
                renewals[server] = self._transport.call(server, calls.RENEW, request)
        # One whose server is away is sent again, while the others have their next.
        wait_for_all(first_error_of(list(renewals.values())), limit_s)
        for server in [server for server in sorted(renewals) if renewals[server].wait(0.0)]:
            renewals.pop(server).result()

    def confirm_place(self) -> None:
        """See `protos.store.Store`."""
        request = requests.Renew(member=self.member, acknowledged=self.acknowledgements.told())
        results_of_all_ended(call_all(self._transport, calls.RENEW, request))

    def barrier(self, name: str, *, step: Version) -> Future[Version]:
        """See `protos.store.Store`."""
        request = self._barrier_request(name, step)
        pending = call_all(self._transport, calls.BARRIER, request)
        return Combined(lambda: self._common_version(request, results(pending)))

    def all_reduce(
        self, name: str, values: Numbers, op: ReduceOp, *, step: Version, remember: bool
    ) -> Future[Reduced]:
        """See `protos.store.Store`; on servers other than the first it is a barrier."""
        require_numbers(name, values)
        request = self._barrier_request(name, step)
        numbers = requests.AllReduce(
            name=name,
            member=request.member,
            values=values,
            op=op,
            step=step,
            number=request.number,
            acknowledged=request.acknowledged,
            remember=remember,
        )
        reduction = self._transport.call(0, calls.ALL_REDUCE, numbers)
        pending = [
            self._transport.call(server, calls.BARRIER, request)
            for server in range(1, len(self._transport.endpoints))
        ]

        def combine() -> Reduced:
            first_error_of([reduction, *pending])
            reduced = reduction.result()
            version = self._common_version(request, [reduced.version, *results(pending)])
            return Reduced(reduced.values, version)

        return Combined(combine)

    def _barrier_request(self, name: str, step: Version) -> requests.Barrier:
        self._num_barriers += 1
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
                f"after barrier {barrier.name!r} the servers are at different versions {versions}: was a "
                f"push not waited for?"
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
        return self._transport.call(0, calls.ADVANCE, request)

    def leave(self, *, step: Version) -> None:
        """See `protos.store.Store`."""
        request = requests.Leave(member=self.member, step=step)
        results(call_all(self._transport, calls.LEAVE, request))

    def abort(self, reason: str, *, comes_again: bool) -> None:
        """See `protos.store.Store`."""
        request = requests.Abort(member=self.member, reason=reason, comes_again=comes_again)
        pending = call_all(self._transport, calls.ABORT, request)
        ended = wait_for_all(pending, ABORT_S)
        results_of_all_ended(ended)
        if len(ended) < len(pending):
            away = [
                endpoint
                for endpoint, answer in zip(self._transport.endpoints, pending, strict=True)
                if answer not in ended
            ]
            raise TransportError(
                f"Abort was not heard within {ABORT_S:g} s by servers {', '.join(away)}"
            )
