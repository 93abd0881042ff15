"""The parameters of a cluster as one store: routed to servers, split into messages, joined.

    keys --route--> server 0 | server 1 | ...  each: --split--> calls, all on their way at once
    answers --scatter--> rows in the order of the keys

A push is checked here as a whole before any server gets its part of it: one that a server would refuse
must not reach the others.
"""

import copy
import itertools
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from protos.chunking import (
    KEY_BYTES,
    VALUE_BYTES,
    PushChunk,
    require_piece_fits,
    require_values,
    split_columns,
    split_push,
)
from protos.errors import (
    AbortedError,
    CtrPsError,
    GradientError,
    JobError,
    ProtocolError,
    TransportError,
    UnknownTableError,
    comes_again,
)
from protos.futures import (
    Answer,
    Combined,
    Future,
    Shared,
    first_error_of,
    results,
    results_of_all_ended,
    wait_for_all,
)
from protos.gradients import (
    DenseGrad,
    Gradients,
    Values,
    require_counts,
    require_examples,
    require_finite,
)
from protos.keys import Keys, require_unique
from protos.limits import CHUNK_BYTES, MAX_MESSAGE_BYTES, MAX_NUMBERS_BYTES
from protos.placement import ShardMap
from protos.runtime.jit import kernel
from protos.spec import DenseSpec, TableSpec
from protos.store import (
    LONGEST_RENEWAL_S,
    Changed,
    Joined,
    Lease,
    Member,
    Message,
    Missing,
    ModelState,
    Numbers,
    Pulled,
    PulledPieces,
    PushedPulled,
    PushId,
    Reduced,
    ReduceOp,
    SaveRequest,
    Shrunk,
    StoreStatus,
    Version,
    WorkerLoss,
    WorkerProgress,
    abort_reason,
    merge_shrunk,
    merge_status,
    push_then_pull,
    require_numbers,
)
from protos.store.state_chunks import split_state
from protos.store.state_transfer import require_finite_state
from protos.wire import calls, requests
from protos.wire.calls import Call
from ps_server.checkpoint.files.digest import model_digest
from ps_server.checkpoint.files.manifest import Share, share_from_json
from ps_server.checkpoint.publish import require_writable
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.writer import open_base, save_checkpoint
from ps_worker.cluster import state_transfer
from ps_worker.cluster.acknowledgements import Acknowledgements
from ps_worker.cluster.transport import Transport

logger = logging.getLogger(__name__)

ABORT_S = 5.0
"""For a server that is away to hear of an abort: less than the grace of a worker that is told to end."""

Positions = NDArray[np.int32]
Q = TypeVar("Q")
A = TypeVar("A")


@kernel
def scatter_rows(rows: Values, positions: Positions, out: Values) -> None:
    """Writes row `i` of `rows` float32[n, D] to row `positions[i]` of `out` float32[N, D]."""
    for i in range(positions.size):
        for j in range(rows.shape[1]):
            out[positions[i], j] = rows[i, j]


def abort_on_each(
    transport: Transport, join: requests.Join, error: BaseException, *, ready_s: float
) -> None:
    """Ends the job by an error of a process without a place, on each server where it can take one.

    A server that is not there, or does not answer, is waited for `ready_s` seconds.
    """
    abort = requests.Abort(
        member=join.member, reason=abort_reason(error), comes_again=comes_again(error)
    )
    joining = [
        transport.call(server, calls.JOIN, join, ready_s=ready_s)
        for server in range(len(transport.endpoints))
    ]
    for server, joined in enumerate(joining):
        try:
            joined.result()
            transport.call(server, calls.ABORT, abort, ready_s=ready_s).result()
        except (AbortedError, JobError):  # it has ended there, or goes on without this process
            continue
        except CtrPsError as failure:
            logger.warning("the others could not be told of the error: %s", failure)


@dataclass(frozen=True, slots=True)
class _RowsOnTheirWay:
    """A call for embeddings, and where in the whole answer its rows belong."""

    positions: Mapping[str, Positions]
    answer: Answer[Pulled]

    def write(self, out: Mapping[str, Values]) -> Version:
        """Writes the rows where they belong, and returns their version."""
        pulled = self.answer.result()
        _write_rows(pulled.rows, self.positions, out)
        return pulled.version


class ClusterClient:
    """A `protos.store.Store` over the servers of a cluster. Thread-safe.

    It knows of tables and dense blocks what was declared through it.
    """

    def __init__(self, transport: Transport, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Uses `transport`, and closes it in the end; no message has much over `chunk_bytes`."""
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._shard_map = ShardMap.of(len(transport.endpoints))
        self._servers = self._shard_map.servers
        self._tables: dict[str, TableSpec] = {}
        self._blocks: dict[str, DenseSpec] = {}
        self._members: dict[int, Member] = {}  # those that this client calls for: usually one
        self._leases: dict[int, Lease | None] = {}
        self._renewals: defaultdict[int, dict[int, Answer[None]]] = defaultdict(dict)  # by server
        # By worker, which comes to one barrier at a time.
        self._num_barriers: defaultdict[int, int] = defaultdict(int)
        self._acknowledgements: defaultdict[int, Acknowledgements] = defaultdict(Acknowledgements)
        self._num_shrinks = itertools.count(1)
        self._num_changes = itertools.count(1)
        self._num_loads = itertools.count(1)
        self._bfloat16 = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections; calls that are on their way fail."""
        self._transport.close()

    def _call_all(self, call: Call[Q, A], argument: Q) -> list[Answer[A]]:
        """Starts a call to every server."""
        return [self._transport.call(server, call, argument) for server in self._servers]

    # Joining and declaring

    def join(
        self,
        worker: int,
        incarnation: int,
        *,
        terms: Mapping[str, str],
        lease: Lease | None = None,
    ) -> Future[Joined]:
        """See `protos.store.Store`; once it has joined, this client calls for this worker, too."""
        member = Member(worker, incarnation)

        def start(servers: Sequence[int], *, only_asks: bool) -> list[Answer[Joined]]:
            request = requests.Join(member=member, terms=terms, lease=lease, only_asks=only_asks)
            return [self._transport.call(server, calls.JOIN, request) for server in servers]

        asked = start(self._servers, only_asks=True)

        def take_place() -> list[Joined]:
            parts = results(asked)
            self._require_same_past(parts)
            self._require_one_job(parts)
            first, *others = self._servers
            # In this order: of several that come for a place, the first server has one, and so have all.
            parts = results(start([first], only_asks=False))
            try:
                return parts + results_of_all_ended(start(others, only_asks=False))
            except ProtocolError:
                self._give_back(member)
                raise

        def combine() -> Joined:
            try:
                parts = take_place()
            except CtrPsError as error:
                # Some servers alone may know. Where lost workers are waited for, another process may come.
                waits = lease is not None and lease.on_worker_loss is WorkerLoss.WAIT
                if isinstance(error, AbortedError | JobError) or (
                    isinstance(error, TransportError) and not waits
                ):
                    join = requests.Join(member=member, terms=terms, lease=lease)
                    abort_on_each(self._transport, join, error, ready_s=ABORT_S)
                raise
            # Not before: one that is refused takes nobody's place here.
            self._members[worker], self._leases[worker] = member, lease
            self._transport.servers_recover = all(part.has_update_log for part in parts)
            return Joined(
                jobs_before=parts[0].jobs_before,
                barriers_passed=max(part.barriers_passed for part in parts),
                has_update_log=self._transport.servers_recover,
                version=min(part.version for part in parts),
            )

        return Combined(combine)

    def _give_back(self, member: Member) -> None:
        """Frees the place that a process has on some servers, and which another one has on others."""
        request = requests.Renew(member=member, is_last=True)
        pending = [
            self._transport.call(server, calls.RENEW, request, ready_s=LONGEST_RENEWAL_S)
            for server in self._servers
        ]
        with suppress(
            CtrPsError
        ):  # from those that it has no place on; on others the lease runs out
            results_of_all_ended(pending)

    def _require_same_past(self, joined: Sequence[Joined]) -> None:
        """Raises ProtocolError if servers have served different numbers of jobs."""
        jobs = [each.jobs_before for each in joined]
        if len(set(jobs)) > 1:
            served = ", ".join(map("{} {}".format, self._transport.endpoints, jobs))
            raise ProtocolError(
                f"servers have served different numbers of jobs before this one ({served}), so some were "
                f"restarted and their parameters do not belong together: restart all of them"
            )

    def _require_one_job(self, joined: Sequence[Joined]) -> None:
        """Raises ProtocolError if one server has recovered an earlier job, and another began anew.

        A process goes from barrier to barrier when all servers say so, and nobody trains before the first.
        """
        passed = [each.barriers_passed for each in joined]
        versions = [each.version for each in joined]
        is_possible = min(passed) > 0 or max(passed) == 0 or len(set(versions)) == 1
        if max(passed) - min(passed) <= 1 and is_possible:
            return
        points = "; ".join(
            f"{endpoint} barrier {number}, version {version}"
            for endpoint, number, version in zip(
                self._transport.endpoints, passed, versions, strict=True
            )
        )
        raise ProtocolError(
            f"this process finds the servers at points that no job has in common ({points}): one went on "
            f"with an update log of another job. Stop all servers, remove their update logs, and start the "
            f"job again from its checkpoint"
        )

    def renew(self, worker: int, *, is_last: bool = False) -> None:
        """See `protos.store.Store`; a server that is away keeps no other from hearing of the worker."""
        request = requests.Renew(
            member=self._member(worker),
            is_last=is_last,
            acknowledged=self._acknowledgements[worker].told(),
        )
        lease = self._leases[worker]
        limit_s = LONGEST_RENEWAL_S if lease is None else lease.renewal_s
        if is_last:
            results_of_all_ended(
                [
                    self._transport.call(server, calls.RENEW, request, ready_s=limit_s)
                    for server in self._servers
                ]
            )
            return
        renewals = self._renewals[worker]
        for server in self._servers:
            if server not in renewals:
                renewals[server] = self._transport.call(server, calls.RENEW, request)
        # One whose server is away is sent again, while the others have their next.
        wait_for_all(first_error_of(list(renewals.values())), limit_s)
        for server in [server for server in self._servers if renewals[server].wait(0.0)]:
            renewals.pop(server).result()

    def confirm_place(self, worker: int) -> None:
        """See `protos.store.Store`."""
        acknowledged = self._acknowledgements[worker].told()
        request = requests.Renew(member=self._member(worker), acknowledged=acknowledged)
        results_of_all_ended(self._call_all(calls.RENEW, request))

    def disconnect(self) -> None:
        """See `protos.store.Store`."""
        self.close()

    def _member(self, worker: int | None = None) -> Member:
        """Returns the member that this client calls for as a worker, or as any that has joined."""
        for member in self._members.values():
            if worker in (None, member.worker):
                return member
        who = "no worker has" if worker is None else f"worker {worker} has not"
        raise ProtocolError(f"{who} joined the job through this client, as a caller must")

    def create_table(self, spec: TableSpec) -> None:
        """See `protos.store.Store`."""
        results(self._call_all(calls.CREATE_TABLE, spec))
        self._tables[spec.name] = spec

    def create_dense(self, spec: DenseSpec, values: Values | None = None) -> None:
        """See `protos.store.Store`; a server's piece must fit a message."""
        require_piece_fits(spec, self._shard_map.num_servers)
        require_values(spec, values, spec.length)
        started = []
        for server in self._servers:
            piece = self._shard_map.piece_of(server, spec.length)
            request = requests.CreateDense(
                spec=spec, values=None if values is None else values[piece]
            )
            started.append(self._transport.call(server, calls.CREATE_DENSE, request))
        results(started)
        self._blocks[spec.name] = spec

    def _table(self, name: str) -> TableSpec:
        if name not in self._tables:
            raise UnknownTableError(f"no table {name!r} was declared, only {sorted(self._tables)}")
        return self._tables[name]

    def _block(self, name: str) -> DenseSpec:
        if name not in self._blocks:
            raise UnknownTableError(
                f"no dense block {name!r} was declared, only {sorted(self._blocks)}"
            )
        return self._blocks[name]

    # Moving data

    def with_bfloat16(self) -> Self:
        """See `protos.store.Store`; both are one client, with one connection to close."""
        other = copy.copy(self)
        other._bfloat16 = True
        return other

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """See `protos.store.Store`."""
        dims = {table: self._table(table).dim for table in keys}
        pending = [
            _RowsOnTheirWay(
                positions,
                self._transport.call(
                    server, calls.PULL_SPARSE, self._pull_request(keys, positions, missing, at)
                ),
            )
            for server, parts in enumerate(self._parts_of_pull(keys, dims))
            for positions in parts
            # Waiting for a version means waiting until each server has it.
            if at is not None or any(where.size for where in positions.values())
        ] or [
            _RowsOnTheirWay(
                {},
                self._transport.call(0, calls.PULL_SPARSE, self._pull_request({}, {}, missing, at)),
            )
        ]

        def combine() -> Pulled:
            out = _empty_rows(keys, dims)
            first_error_of([call.answer for call in pending])
            versions = [call.write(out) for call in pending]
            return Pulled(out, min(versions))

        return Combined(combine)

    def _parts_of_pull(
        self, keys: Mapping[str, Keys], dims: Mapping[str, int]
    ) -> list[list[dict[str, Positions]]]:
        """Returns, for each server, the positions of its keys, split into calls whose answers fit."""
        routes = {table: self._route(table, column) for table, column in keys.items()}
        return [
            self._split_pull({table: routes[table][server] for table in keys}, dims)
            for server in self._servers
        ]

    def _pull_request(
        self,
        keys: Mapping[str, Keys],
        positions: Mapping[str, Positions],
        missing: Missing,
        at: Version | None,
    ) -> requests.PullSparse:
        return requests.PullSparse(
            keys={table: keys[table][where] for table, where in positions.items()},
            missing=missing,
            at=at,
            shard_map_epoch=self._shard_map.epoch,
            bfloat16=self._bfloat16,
        )

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`."""
        self._require_lengths(into)
        pending = [
            (
                server,
                self._transport.call(
                    server, calls.PULL_DENSE, self._pull_dense_request(blocks, at)
                ),
            )
            for server in self._servers
            for blocks in self._split_pieces(list(into), server)
        ]

        def combine() -> Version:
            versions = []
            first_error_of([call for _, call in pending])
            for server, call in pending:
                pulled = call.result()
                self._write_pieces(server, pulled, into)
                versions.append(pulled.version)
            return min(versions)

        return Combined(combine)

    def _require_lengths(self, into: Mapping[str, Values]) -> None:
        for block, vector in into.items():
            _require_length(self._block(block), vector, ProtocolError, "pull into")

    def _pull_dense_request(self, blocks: Sequence[str], at: Version | None) -> requests.PullDense:
        return requests.PullDense(
            blocks=blocks,
            at=at,
            shard_map_epoch=self._shard_map.epoch,
            bfloat16=self._bfloat16,
        )

    def _write_pieces(self, server: int, pulled: PulledPieces, into: Mapping[str, Values]) -> None:
        for block, piece in pulled.pieces.items():
            into[block][self._piece(block, server)] = piece

    def pull_changed(self, tables: Sequence[str], worker: int, *, max_rows: int) -> Future[Changed]:
        """See `protos.store.Store`."""
        dims = {table: self._table(table).dim for table in tables}
        if max_rows < 1:
            raise ProtocolError(f"max_rows is {max_rows}, expected at least 1")
        widest = KEY_BYTES + VALUE_BYTES * max(dims.values(), default=0)
        fitting = min(max_rows, max(1, self._chunk_bytes // widest))
        epoch = self._shard_map.epoch
        request = requests.PullChanged(
            tables=tables,
            member=self._member(worker),
            max_rows=fitting,
            shard_map_epoch=epoch,
            number=next(self._num_changes),
        )
        pending = self._call_all(calls.PULL_CHANGED, request)

        def combine() -> Changed:
            parts = results(pending)
            return Changed(
                rows={
                    table: _joined(table, dim, [part.rows[table] for part in parts])
                    for table, dim in dims.items()
                },
                version=min(part.version for part in parts),
                has_more=any(part.has_more for part in parts),
            )

        return Combined(combine)

    def push_grad(
        self, gradients: Gradients, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`."""
        pending = [
            self._transport.call(server, calls.PUSH_GRAD, self._push_request(chunk, push_id, at))
            for server, chunks in enumerate(self._chunks_of_push(gradients))
            for chunk in chunks
        ]
        return self._acknowledged(pending, push_id, at)

    def _chunks_of_push(self, gradients: Gradients) -> list[list[PushChunk]]:
        """Checks a push; returns, for each server, its part, split into chunks that fit a message."""
        self._check(gradients)
        routes = {table: self._route(table, grad.keys) for table, grad in gradients.sparse.items()}
        parts = (self._part_of_server(gradients, routes, server) for server in self._servers)
        return [split_push(part, self._chunk_bytes, bfloat16=self._bfloat16) for part in parts]

    def _push_request(
        self, chunk: PushChunk, push_id: PushId, at: Version | None
    ) -> requests.PushGrad:
        epoch = self._shard_map.epoch
        return requests.PushGrad(chunk=chunk, push_id=push_id, at=at, shard_map_epoch=epoch)

    def push_pull(
        self,
        gradients: Gradients,
        push_id: PushId,
        *,
        keys: Mapping[str, Keys],
        into: Mapping[str, Values],
        at: Version | None = None,
    ) -> tuple[Future[Pulled], Future[Version]]:
        """See `protos.store.Store`; in a call each where a message has no room for all."""
        self._require_lengths(into)
        dims = {table: self._table(table).dim for table in keys}
        pushes, pulls = self._chunks_of_push(gradients), self._parts_of_pull(keys, dims)
        pieces = [self._split_pieces(list(into), server) for server in self._servers]
        if any(len(parts) > 1 for of in (pushes, pulls, pieces) for parts in of) or any(
            self._answer_bytes(server, positions, dims, into) > MAX_NUMBERS_BYTES
            for server, (positions,) in enumerate(pulls)
        ):
            return push_then_pull(self, gradients, push_id, keys=keys, into=into, at=at)
        then = None if at is None else at + 1
        pending = [
            self._transport.call(
                server,
                calls.PUSH_PULL,
                requests.PushPull(
                    push=self._push_request(pushes[server][0], push_id, at),
                    sparse=self._pull_request(keys, pulls[server][0], Missing.INITIAL, then),
                    dense=self._pull_dense_request(pieces[server][0], then),
                ),
            )
            for server in self._servers
        ]

        def acknowledged() -> list[PushedPulled]:
            answers = results(pending)
            self._acknowledgements[push_id.worker].note(push_id, at)
            return answers

        answers = Shared(acknowledged)

        def rows() -> Pulled:
            out = _empty_rows(keys, dims)
            for (positions,), answer in zip(pulls, answers.result(), strict=True):
                _write_rows(answer.sparse.rows, positions, out)
            return Pulled(out, min(answer.sparse.version for answer in answers.result()))

        def read() -> Version:
            for server, answer in enumerate(answers.result()):
                self._write_pieces(server, answer.dense, into)
            return min(answer.dense.version for answer in answers.result())

        return Combined(rows), Combined(read)

    def _answer_bytes(
        self,
        server: int,
        positions: Mapping[str, Positions],
        dims: Mapping[str, int],
        blocks: Collection[str],
    ) -> int:
        """Returns the bytes of a server's rows and pieces."""
        pieces = [self._piece(block, server) for block in blocks]
        num_values = sum(dims[table] * where.size for table, where in positions.items())
        return VALUE_BYTES * int(num_values + sum(piece.stop - piece.start for piece in pieces))

    def pull_state(self, keys: Mapping[str, Keys], blocks: Sequence[str]) -> Future[ModelState]:
        """See `protos.store.Store`."""
        tables = {table: self._table(table) for table in keys}
        specs = {block: self._block(block) for block in blocks}
        parts = state_transfer.parts_of_pull(
            keys, tables, specs, self._shard_map, self._chunk_bytes
        )
        pending = [
            self._transport.call(part.server, calls.PULL_STATE, part.request) for part in parts
        ]
        return Combined(
            lambda: state_transfer.joined(
                keys, tables, specs, list(zip(parts, results(pending), strict=True))
            )
        )

    def push_state(self, state: ModelState, push_id: PushId) -> Future[Version]:
        """See `protos.store.Store`."""
        tables = {table: self._table(table) for table in state.rows}
        blocks = {block: self._block(block) for block in state.blocks}
        state_transfer.require_whole(state, tables, blocks)
        for table, rows in state.rows.items():
            require_unique(f"push of rows of table {table!r}", rows.keys, ProtocolError)
        require_finite_state(state)
        routes = {table: self._route(table, rows.keys) for table, rows in state.rows.items()}
        epoch = self._shard_map.epoch
        pending = [
            self._transport.call(
                server,
                calls.PUSH_STATE,
                requests.PushState(chunk=chunk, push_id=push_id, shard_map_epoch=epoch),
            )
            for server in self._servers
            for chunk in split_state(
                state_transfer.part_of_server(
                    state, routes, {block: self._piece(block, server) for block in blocks}, server
                ),
                self._chunk_bytes,
            )
        ]
        return self._acknowledged(pending, push_id, None)

    def _acknowledged(
        self, pending: Sequence[Answer[Version]], push_id: PushId, at: Version | None
    ) -> Future[Version]:
        """Returns the version of a push once all of it is acknowledged."""

        def acknowledged() -> Version:
            version = min(results(pending))
            self._acknowledgements[push_id.worker].note(push_id, at)
            return version

        return Combined(acknowledged)

    def _route(self, table: str, keys: Keys) -> list[Positions]:
        return self._shard_map.route(keys, self._tables[table].num_shards)

    def _piece(self, block: str, server: int) -> slice:
        return self._shard_map.piece_of(server, self._blocks[block].length)

    def _split_pull(
        self, positions: Mapping[str, Positions], dims: Mapping[str, int]
    ) -> list[dict[str, Positions]]:
        """Splits a pull from one server into calls whose answers fit a message."""
        tables = list(positions)
        columns = [
            (positions[table].size, KEY_BYTES + VALUE_BYTES * dims[table]) for table in tables
        ]
        return [
            {tables[column]: positions[tables[column]][rows] for column, rows in group}
            for group in split_columns(columns, self._chunk_bytes)
        ]

    def _split_pieces(self, blocks: Sequence[str], server: int) -> list[list[str]]:
        """Groups a server's pieces into calls whose answers fit a message; a piece is not split."""
        pieces = [self._piece(block, server) for block in blocks]
        columns = [(1, VALUE_BYTES * (piece.stop - piece.start)) for piece in pieces]
        return [
            [blocks[column] for column, _ in group]
            for group in split_columns(columns, self._chunk_bytes)
        ]

    def _part_of_server(
        self, gradients: Gradients, routes: Mapping[str, list[Positions]], server: int
    ) -> Gradients:
        return Gradients(
            sparse={
                table: grad.take(routes[table][server]) for table, grad in gradients.sparse.items()
            },
            dense={
                block: DenseGrad(grad.values[self._piece(block, server)], grad.examples)
                for block, grad in gradients.dense.items()
            },
        )

    def _check(self, gradients: Gradients) -> None:
        for table, grad in gradients.sparse.items():
            expected = (grad.keys.size, self._table(table).dim)
            if grad.values.shape != expected:
                raise GradientError(
                    f"push to table {table!r} has values of shape {grad.values.shape}, expected "
                    f"{expected}: one row of dim {expected[1]} for each key"
                )
            require_examples(f"table {table!r}", grad.examples if grad.keys.size else 1)
            keeps_statistics = self._table(table).statistics is not None
            require_counts(table, grad, keeps_statistics=keeps_statistics)
            if len(self._servers) > 1:  # one server refuses the whole push by itself
                require_unique(f"push to table {table!r}", grad.keys, GradientError)
        for block, dense in gradients.dense.items():
            _require_length(self._block(block), dense.values, GradientError, "push to")
            require_examples(f"dense block {block!r}", dense.examples)
        require_finite(gradients)

    # Steps, barriers and messages

    def wait_version(self, at: Version) -> Future[Version]:
        """See `protos.store.Store`."""
        pending = self._call_all(calls.WAIT_VERSION, requests.WaitVersion(at=at))
        return Combined(lambda: min(results(pending)))

    def barrier(self, name: str, worker: int, *, step: Version) -> Future[Version]:
        """See `protos.store.Store`."""
        request = self._barrier_request(name, worker, step)
        pending = self._call_all(calls.BARRIER, request)
        return Combined(lambda: self._common_version(request, results(pending)))

    def all_reduce(
        self,
        name: str,
        worker: int,
        values: Numbers,
        op: ReduceOp,
        *,
        step: Version,
        remember: bool = True,
    ) -> Future[Reduced]:
        """See `protos.store.Store`; the first server reduces."""
        require_numbers(name, values)
        first, *others = self._servers
        request = self._barrier_request(name, worker, step)
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
        reduction = self._transport.call(first, calls.ALL_REDUCE, numbers)
        pending = [self._transport.call(server, calls.BARRIER, request) for server in others]

        def combine() -> Reduced:
            first_error_of([reduction, *pending])
            reduced = reduction.result()
            version = self._common_version(request, [reduced.version, *results(pending)])
            return Reduced(reduced.values, version)

        return Combined(combine)

    def _barrier_request(self, name: str, worker: int, step: Version) -> requests.Barrier:
        self._num_barriers[worker] += 1
        return requests.Barrier(
            name=name,
            member=self._member(worker),
            step=step,
            number=self._num_barriers[worker],
            acknowledged=self._acknowledgements[worker].told(),
        )

    def _common_version(self, barrier: requests.Barrier, versions: Sequence[Version]) -> Version:
        """Returns the version that servers have after a barrier: of all the same, or the largest.

        In asynchronous training a worker that was lost may have reached some servers with its last pushes.
        """
        lease = self._leases[barrier.member.worker]
        is_without_loss = lease is None or lease.on_worker_loss is WorkerLoss.FAIL
        if len(set(versions)) > 1 and (is_without_loss or barrier.step > 0):
            raise ProtocolError(
                f"after barrier {barrier.name!r} the servers are at different versions {versions}: was a "
                f"push not waited for?"
            )
        return max(versions)

    def advance(self, worker: int, clock: int, *, at_least: int) -> Future[int]:
        """See `protos.store.Store`; the first server knows how far all are."""
        request = requests.Advance(
            member=self._member(worker),
            clock=clock,
            at_least=max(0, at_least),
            after_barrier=self._num_barriers[worker],
        )
        return self._transport.call(0, calls.ADVANCE, request)

    def post(self, exchange: str, message: Message) -> Future[None]:
        """See `protos.store.Store`; content must fit a message."""
        size = len(message.content or b"")
        if size > MAX_NUMBERS_BYTES:
            raise ProtocolError(
                f"a message of {size} bytes does not fit a message of {MAX_MESSAGE_BYTES}: split it"
            )
        server = self._shard_map.server_of_receiver(message.receiver)
        return self._transport.call(
            server,
            calls.POST,
            requests.Post(exchange=exchange, message=message, member=self._member(message.sender)),
        )

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        """See `protos.store.Store`."""
        request = requests.Take(exchange=exchange, member=self._member(worker), received=received)
        return self._transport.call(self._shard_map.server_of_receiver(worker), calls.TAKE, request)

    def leave(self, worker: int, *, step: Version) -> None:
        """See `protos.store.Store`."""
        results(self._call_all(calls.LEAVE, requests.Leave(member=self._member(worker), step=step)))

    def abort(self, worker: int, reason: str, *, comes_again: bool = False) -> None:
        """See `protos.store.Store`."""
        request = requests.Abort(
            member=self._member(worker), reason=reason, comes_again=comes_again
        )
        pending = self._call_all(calls.ABORT, request)
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

    # Checkpoints and status

    def require_writable(self, root: str) -> None:
        """See `protos.store.Store`."""

        def check_servers(folder: str, token: str) -> None:
            request = requests.CheckFolder(folder=folder, token=token)
            results_of_all_ended(self._call_all(calls.CHECK_FOLDER, request))

        require_writable(root, check_servers)

    def save(self, request: SaveRequest) -> str:
        """See `protos.store.Store`; the folder must be on storage that every server sees."""
        base = open_base(request.base, request.url) if request.base else None

        def write_shares(folder: str, token: str) -> list[Share]:
            member = self._member()
            base_token = "" if base is None else base.token
            snapshot = requests.Snapshot(token=token, base=base_token, member=member)
            results(self._call_all(calls.SNAPSHOT, snapshot))
            if request.on_snapshot is not None:
                request.on_snapshot()
            save = requests.Save(
                folder=folder, token=token, inference=request.inference, member=member
            )
            pending = self._call_all(calls.SAVE, save)
            return [share_from_json(share) for share in results_of_all_ended(pending)]

        return save_checkpoint(
            request.url,
            write_shares=write_shares,
            tables=dict(self._tables),
            blocks=dict(self._blocks),
            attachments=request.attachments,
            base=base,
            is_inference=request.inference is not None,
            confirm=lambda: self.confirm_place(self._member().worker),
        )

    def load(self, url: str, *, only: Collection[str] = (), token: str = "") -> None:
        """See `protos.store.Store`."""
        # Read here first, every byte: what is damaged is refused before any server has replaced its part.
        checkpoint = Checkpoint.open(url)
        checkpoint.require_token(token)
        checkpoint.require_trainable()
        checkpoint.require(self._tables.keys() | self._blocks.keys(), only)
        checkpoint.verify()
        request = requests.Load(
            url=checkpoint.url,
            token=checkpoint.token,
            only=sorted(only),
            member=self._member(),
            number=next(self._num_loads),
        )
        results_of_all_ended(self._call_all(calls.LOAD, request))

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], *, batches: int = 0
    ) -> None:
        """See `protos.store.Store`."""
        request = requests.Resume(
            version=version, progress=progress, batches=batches, member=self._member()
        )
        results(self._call_all(calls.RESUME, request))

    def shrink(
        self, *, max_norm: float | None = None, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        """See `protos.store.Store`."""
        request = requests.Shrink(
            max_norm=max_norm,
            dry_run=dry_run,
            member=self._member(),
            number=0 if dry_run else next(self._num_shrinks),
        )
        return merge_shrunk(results(self._call_all(calls.SHRINK, request)))

    def digest(self) -> str:
        """See `protos.store.Store`."""
        parts = results(self._call_all(calls.GET_DIGEST, None))
        shards = {shard: digest for part in parts for shard, digest in part.items()}
        return model_digest(self._dense_vectors(), shards)

    def _dense_vectors(self) -> dict[str, Values]:
        vectors = {name: np.empty(spec.length, np.float32) for name, spec in self._blocks.items()}
        if vectors:
            self.pull_dense(vectors).result()
        return vectors

    @property
    def num_retries(self) -> int:
        """Calls that were sent to a server again."""
        return self._transport.retries

    def status(self) -> StoreStatus:
        """See `protos.store.Store`."""
        parts = results(self._call_all(calls.GET_STATUS, None))
        return merge_status([part.store for part in parts])


def _empty_rows(keys: Mapping[str, Keys], dims: Mapping[str, int]) -> dict[str, Values]:
    return {
        table: np.empty((column.size, dims[table]), np.float32) for table, column in keys.items()
    }


def _write_rows(
    rows: Mapping[str, Values], where: Mapping[str, Positions], out: Mapping[str, Values]
) -> None:
    """Writes the rows of an answer where they belong in the whole one."""
    for table, positions in where.items():
        if positions.size:
            _require_rows(table, rows[table], (positions.size, out[table].shape[1]))
        scatter_rows(rows[table], positions, out[table])


def _joined(table: str, dim: int, parts: Sequence[tuple[Keys, Values]]) -> tuple[Keys, Values]:
    """Returns the keys and rows of all parts."""
    rows = [np.empty((0, dim), np.float32)]
    for keys, values in parts:
        if keys.size:  # a part without keys has no width
            _require_rows(table, values, (keys.size, dim))
            rows.append(values)
    return np.concatenate([keys for keys, _ in parts]), np.concatenate(rows)


def _require_rows(table: str, rows: Values, expected: tuple[int, int]) -> None:
    if rows.shape != expected:
        raise ProtocolError(
            f"a server answered a pull from table {table!r} with shape {rows.shape}, expected "
            f"{expected}: it has a table of another dim"
        )


def _require_length(
    spec: DenseSpec, vector: Values, error: type[GradientError | ProtocolError], what: str
) -> None:
    if vector.shape != (spec.length,):
        raise error(
            f"{what} dense block {spec.name!r} has shape {vector.shape}, expected ({spec.length},)"
        )
