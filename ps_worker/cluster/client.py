"""The parameters of a cluster as one store: routed to servers, split into messages, joined.

    keys --route--> server 0 | server 1 | ...  each: --split--> calls, all on their way at once
    answers --scatter--> rows in the order of the keys

A push is checked here as a whole before any server gets its part of it: one that a server would refuse
must not reach the others.
"""

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np

from ctr_ps.protos.chunking import PushChunk, require_piece_fits, require_values
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.futures import (
    Answer,
    Combined,
    Future,
    Shared,
    first_error_of,
    results,
    results_of_all_ended,
)
from ctr_ps.protos.gradients import Gradients, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.limits import CHUNK_BYTES, MAX_NUMBERS_BYTES
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import (
    Changed,
    Joined,
    Lease,
    Member,
    Message,
    Missing,
    ModelState,
    Numbers,
    Pulled,
    PushId,
    Reduced,
    ReduceOp,
    SaveRequest,
    Shrunk,
    StoreStatus,
    TakenFile,
    Version,
    WorkerProgress,
    merge_status,
    push_then_pull,
    sum_by_name,
)
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_server.checkpoint.files.digest import model_digest
from ctr_ps.ps_server.checkpoint.files.manifest import Share, share_from_json
from ctr_ps.ps_server.checkpoint.publish import require_writable
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.writer import open_base, save_checkpoint
from ctr_ps.ps_worker.cluster import state_transfer
from ctr_ps.ps_worker.cluster.joined_worker import JoinedWorker, join_servers
from ctr_ps.ps_worker.cluster.placement import Placement, shard_map_of
from ctr_ps.ps_worker.cluster.routing import Positions, Routing
from ctr_ps.ps_worker.cluster.sent import Parts, Sent, gradients_of, state_of
from ctr_ps.ps_worker.cluster.transport import Transport, call_all

Q = TypeVar("Q")
A = TypeVar("A")


def _gradients_of_both(routing: Routing, parts: Parts) -> Gradients:
    """As `gradients_of`, of pushes with pulls."""
    return gradients_of(
        routing, {server: [each.push for each in of] for server, of in parts.items()}
    )


class ClusterClient:
    """A `protos.store.Store` over the servers of a cluster. Thread-safe.

    It knows of tables and dense blocks what was declared through it.
    """

    def __init__(self, transport: Transport, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Uses `transport`, and closes it in the end; no message has much over `chunk_bytes`."""
        self._transport = transport
        self._placement = Placement(transport, chunk_bytes=chunk_bytes)
        self._workers: dict[int, JoinedWorker] = {}  # those that it calls for: usually one
        self._num_changes = itertools.count(1)
        self._num_loads = itertools.count(1)
        self._bfloat16 = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections; calls that are on their way fail."""
        self._transport.close()

    @property
    def _routing(self) -> Routing:
        return self._placement.routing

    def _call_all(self, call: Call[Q, A], argument: Q) -> list[Answer[A]]:
        return call_all(self._transport, call, argument)

    def _of_newest(self, call: Call[Q, A], argument: Q) -> list[A]:
        """Returns the answers of all servers of the newest map to a call that says none."""

        def start(routing: Routing) -> Future[list[A]]:
            pending = self._call_all(call, argument)

            def answers() -> list[A]:
                found = results(pending)
                shard_map_of(self._transport).require_epoch(routing.shard_map.epoch, 0)
                return found

            return Combined(answers)

        return self._placement.placed(start).result()

    def _of_all(self, call: Call[Any, A], request: Any) -> list[A]:
        """Returns the answers of all servers to a call that says their map."""

        def start(routing: Routing) -> Future[list[A]]:
            placed = replace(request, shard_map_epoch=routing.shard_map.epoch)
            pending = call_all(self._transport, call, placed)
            return Combined(lambda: results_of_all_ended(pending))

        return self._placement.placed(start).result()

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
        request = requests.Join(member=member, terms=terms, lease=lease)
        joining = self._placement.placed(
            lambda routing: join_servers(
                self._transport, replace(request, shard_map_epoch=routing.shard_map.epoch)
            )
        )

        def combine() -> Joined:
            joined = joining.result()
            # Not before: one that is refused takes nobody's place here.
            new = JoinedWorker(self._transport, self._placement, member, lease, joined.restart)
            own = self._workers.setdefault(worker, new)
            own.member, own.lease = member, lease
            self._transport.servers_recover = joined.has_update_log
            return joined

        return Combined(combine)

    def renew(self, worker: int, *, is_last: bool = False) -> None:
        self._joined(worker).renew(is_last=is_last)

    def confirm_place(self, worker: int) -> None:
        self._joined(worker).confirm_place()

    def disconnect(self) -> None:
        self.close()

    def _joined(self, worker: int | None = None) -> JoinedWorker:
        """Returns a worker, or any that has joined."""
        for joined in self._workers.values():
            if worker in (None, joined.member.worker):
                return joined
        who = "no worker has" if worker is None else f"worker {worker} has not"
        raise ProtocolError(f"{who} joined the job through this client: call join() first")

    def _member(self, worker: int | None = None) -> Member:
        return self._joined(worker).member

    def create_table(self, spec: TableSpec) -> None:
        self._of_all(calls.CREATE_TABLE, requests.CreateTable(spec=spec))
        self._routing.tables[spec.name] = spec

    def create_dense(self, spec: DenseSpec, values: Values | None = None) -> None:
        """See `protos.store.Store`; a server's piece must fit a message."""
        require_values(spec, values, spec.length)

        def start(routing: Routing) -> Future[list[None]]:
            shard_map = routing.shard_map
            require_piece_fits(spec, shard_map.num_servers)
            started = []
            for server in shard_map.servers:
                piece = shard_map.piece_of(server, spec.length)
                request = requests.CreateDense(
                    spec=spec,
                    values=None if values is None else values[piece],
                    shard_map_epoch=shard_map.epoch,
                )
                started.append(self._transport.call(server, calls.CREATE_DENSE, request))
            return Combined(lambda: results(started))

        self._placement.placed(start).result()
        self._routing.blocks[spec.name] = spec

    # Moving data

    def with_bfloat16(self) -> Self:
        """See `protos.store.Store`; both are one client, with one connection to close."""
        other = copy.copy(self)
        other._bfloat16 = True
        return other

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        return self._placement.placed(
            lambda routing: self._pull_sparse(routing, keys, missing=missing, at=at)
        )

    def _pull_sparse(
        self, routing: Routing, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None
    ) -> Future[Pulled]:
        parts = [
            (server, positions)
            for server, parts in routing.split_pull(keys).items()
            for positions in parts
            # Waiting for a version means waiting until each server has it.
            if at is not None or any(where.size for where in positions.values())
        ] or [(0, {})]
        pending = [
            (
                positions,
                self._transport.call(
                    server,
                    calls.PULL_SPARSE,
                    self._pull_request(routing, keys, positions, missing, at),
                ),
            )
            for server, positions in parts
        ]

        def combine() -> Pulled:
            out, versions = routing.empty_rows(keys), []
            first_error_of([answer for _, answer in pending])
            for positions, answer in pending:
                pulled = answer.result()
                routing.write_rows(pulled.rows, positions, out)
                versions.append(pulled.version)
            return Pulled(out, min(versions))

        return Combined(combine)

    def _pull_request(
        self,
        routing: Routing,
        keys: Mapping[str, Keys],
        positions: Mapping[str, Positions],
        missing: Missing,
        at: Version | None,
    ) -> requests.PullSparse:
        return requests.PullSparse(
            keys={table: keys[table].take(where) for table, where in positions.items()},
            missing=missing,
            at=at,
            shard_map_epoch=routing.shard_map.epoch,
            bfloat16=self._bfloat16,
        )

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        self._routing.require_lengths(into)
        return self._placement.placed(lambda routing: self._pull_dense(routing, into, at))

    def _pull_dense(
        self, routing: Routing, into: Mapping[str, Values], at: Version | None
    ) -> Future[Version]:
        pending = [
            (
                server,
                self._transport.call(
                    server, calls.PULL_DENSE, self._pull_dense_request(routing, blocks, at)
                ),
            )
            for server, parts in routing.split_pieces(into).items()
            for blocks in parts
        ]

        def combine() -> Version:
            versions = []
            first_error_of([call for _, call in pending])
            for server, call in pending:
                pulled = call.result()
                routing.write_pieces(pulled.pieces, server, into)
                versions.append(pulled.version)
            return min(versions)

        return Combined(combine)

    def _pull_dense_request(
        self, routing: Routing, blocks: Sequence[str], at: Version | None
    ) -> requests.PullDense:
        return requests.PullDense(
            blocks=blocks,
            at=at,
            shard_map_epoch=routing.shard_map.epoch,
            bfloat16=self._bfloat16,
        )

    def pull_changed(self, tables: Sequence[str], worker: int, *, max_rows: int) -> Future[Changed]:
        fitting = self._routing.changed_rows_in_message(tables)
        if max_rows < 1:
            raise ProtocolError(f"max_rows is {max_rows}, expected at least 1")
        member, number = self._member(worker), next(self._num_changes)

        def start(routing: Routing) -> Future[Changed]:
            request = requests.PullChanged(
                tables=tables,
                member=member,
                max_rows=min(max_rows, fitting),
                shard_map_epoch=routing.shard_map.epoch,
                number=number,
            )
            pending = self._call_all(calls.PULL_CHANGED, request)
            return Combined(lambda: routing.join_changed(tables, results(pending)))

        return self._placement.placed(start)

    def push_grad(
        self, gradients: Gradients, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        sent = Sent(gradients, gradients_of)

        def start(routing: Routing) -> Future[Version]:
            pending = sent.started(
                routing,
                {
                    server: [
                        self._transport.call(
                            server,
                            calls.PUSH_GRAD,
                            self._push_request(routing, chunk, push_id, at),
                        )
                        for chunk in chunks
                    ]
                    for server, chunks in routing.split_push(
                        sent.whole(), bfloat16=self._bfloat16
                    ).items()
                },
            )
            return Combined(lambda: min(self._acknowledged(pending, push_id, at)))

        return self._placement.placed(start)

    def _push_request(
        self, routing: Routing, chunk: PushChunk, push_id: PushId, at: Version | None
    ) -> requests.PushGrad:
        epoch = routing.shard_map.epoch
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
        self._routing.require_lengths(into)
        sent = Sent(gradients, _gradients_of_both)
        apart: tuple[Future[Pulled], Future[Version]] | None = None  # calls that follow moves alone

        def start(routing: Routing) -> Future[tuple[Pulled, Version]]:
            nonlocal apart
            pulls = routing.split_pull(keys)
            pushes = routing.split_push(sent.whole(), bfloat16=self._bfloat16)
            pieces = routing.split_pieces(into)
            if apart is None and (
                any(len(parts) > 1 for of in (pushes, pulls, pieces) for parts in of.values())
                or any(
                    routing.answer_bytes(positions, into, server) > MAX_NUMBERS_BYTES
                    for server, (positions,) in pulls.items()
                )
            ):
                apart = push_then_pull(self, sent.whole(), push_id, keys=keys, into=into, at=at)
                sent.started(routing, {})
            if apart is not None:
                rows, read = apart
                return Combined(lambda: (rows.result(), read.result()))
            then = None if at is None else at + 1
            pending = sent.started(
                routing,
                {
                    server: [
                        self._transport.call(
                            server,
                            calls.PUSH_PULL,
                            requests.PushPull(
                                push=self._push_request(routing, pushes[server][0], push_id, at),
                                sparse=self._pull_request(
                                    routing, keys, pulls[server][0], Missing.INITIAL, then
                                ),
                                dense=self._pull_dense_request(routing, pieces[server][0], then),
                            ),
                        )
                    ]
                    for server in routing.shard_map.servers
                },
            )

            def combine() -> tuple[Pulled, Version]:
                answers = self._acknowledged(pending, push_id, at)
                out, versions = routing.empty_rows(keys), []
                for (server, (positions,)), answer in zip(pulls.items(), answers, strict=True):
                    routing.write_rows(answer.sparse.rows, positions, out)
                    versions.append(answer.sparse.version)
                    routing.write_pieces(answer.dense.pieces, server, into)
                return Pulled(out, min(versions)), min(answer.dense.version for answer in answers)

            return Combined(combine)

        both = Shared(self._placement.placed(start).result)
        return Combined(lambda: both.result()[0]), Combined(lambda: both.result()[1])

    def pull_state(self, keys: Mapping[str, Keys], blocks: Sequence[str]) -> Future[ModelState]:
        def start(routing: Routing) -> Future[ModelState]:
            parts = state_transfer.parts_of_pull(routing, keys, blocks)
            pending = [
                self._transport.call(part.server, calls.PULL_STATE, part.request) for part in parts
            ]
            return Combined(
                lambda: state_transfer.joined(
                    routing, keys, list(zip(parts, results(pending), strict=True))
                )
            )

        return self._placement.placed(start)

    def push_state(self, state: ModelState, push_id: PushId) -> Future[Version]:
        sent = Sent(state, state_of)

        def start(routing: Routing) -> Future[Version]:
            epoch = routing.shard_map.epoch
            pending = sent.started(
                routing,
                {
                    server: [
                        self._transport.call(
                            server,
                            calls.PUSH_STATE,
                            requests.PushState(chunk=chunk, push_id=push_id, shard_map_epoch=epoch),
                        )
                        for chunk in chunks
                    ]
                    for server, chunks in state_transfer.split_push(routing, sent.whole()).items()
                },
            )
            return Combined(lambda: min(self._acknowledged(pending, push_id, None)))

        return self._placement.placed(start)

    def _acknowledged(
        self, pending: Sequence[Answer[A]], push_id: PushId, at: Version | None
    ) -> list[A]:
        """Returns the answers to a push once all of it is acknowledged, and notes that."""
        answers = results(pending)
        self._joined(push_id.worker).acknowledgements.note(push_id, at)
        return answers

    # Steps, barriers and messages

    def wait_version(self, at: Version) -> Future[Version]:
        return Combined(lambda: min(self._of_all(calls.WAIT_VERSION, requests.WaitVersion(at=at))))

    def barrier(self, name: str, worker: int, *, step: Version) -> Future[Version]:
        return self._joined(worker).barrier(name, step=step)

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
        own = self._joined(worker)
        return own.all_reduce(name, values, op, step=step, remember=remember)

    def advance(self, worker: int, clock: int, *, at_least: int) -> Future[int]:
        """See `protos.store.Store`; the first server knows how far all are."""
        return self._joined(worker).advance(clock, at_least=at_least)

    def take_file(
        self, worker: int, *, pass_number: int, num_files: int, received: int, waits: bool = False
    ) -> Future[TakenFile]:
        """See `protos.store.Store`; the first server has the queue."""
        request = requests.TakeFile(
            member=self._member(worker),
            pass_number=pass_number,
            num_files=num_files,
            received=received,
            waits=waits,
        )
        return self._placement.placed(lambda _: self._transport.call(0, calls.TAKE_FILE, request))

    def post(self, exchange: str, message: Message) -> Future[None]:
        """See `protos.store.Store`; content must fit a message."""
        size = len(message.content or b"")
        if size > MAX_NUMBERS_BYTES:
            raise ProtocolError(
                f"a message has {size} bytes, more than the {MAX_NUMBERS_BYTES} that fit: split it"
            )
        post = requests.Post(
            exchange=exchange, message=message, member=self._member(message.sender)
        )
        return self._to_mailbox(message.receiver, calls.POST, post)

    def _to_mailbox(self, worker: int, call: Call[Any, A], request: Any) -> Future[A]:
        def start(routing: Routing) -> Future[A]:
            shard_map = routing.shard_map
            placed = replace(request, shard_map_epoch=shard_map.epoch)
            return self._transport.call(shard_map.server_of_receiver(worker), call, placed)

        return self._placement.placed(start)

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        request = requests.Take(exchange=exchange, member=self._member(worker), received=received)
        return self._to_mailbox(worker, calls.TAKE, request)

    def leave(self, worker: int, *, step: Version) -> None:
        self._joined(worker).leave(step=step)

    def abort(self, worker: int, reason: str, *, comes_again: bool = False) -> None:
        self._joined(worker).abort(reason, comes_again=comes_again)

    # Checkpoints and status

    def require_writable(self, root: str) -> None:
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
            self._of_all(calls.SNAPSHOT, snapshot)
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
            tables=dict(self._routing.tables),
            blocks=dict(self._routing.blocks),
            attachments=request.attachments,
            base=base,
            is_inference=request.inference is not None,
            confirm=lambda: self.confirm_place(self._member().worker),
        )

    def load(self, url: str, *, only: Collection[str] = (), token: str = "") -> None:
        # Read here first, every byte: what is damaged is refused before any server has replaced its part.
        checkpoint = Checkpoint.open(url)
        checkpoint.require_token(token)
        checkpoint.require_trainable()
        checkpoint.require(self._routing.tables.keys() | self._routing.blocks.keys(), only)
        checkpoint.verify()
        request = requests.Load(
            url=checkpoint.url,
            token=checkpoint.token,
            only=sorted(only),
            member=self._member(),
            number=next(self._num_loads),
        )
        self._of_all(calls.LOAD, request)

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], *, batches: int = 0
    ) -> None:
        request = requests.Resume(
            version=version, progress=progress, batches=batches, member=self._member()
        )
        self._of_all(calls.RESUME, request)

    def shrink(
        self, *, max_norm: float | None = None, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        own = self._joined()
        request = requests.Shrink(
            max_norm=max_norm,
            dry_run=dry_run,
            member=own.member,
            number=0 if dry_run else own.next_number(),
        )
        return sum_by_name(self._of_all(calls.SHRINK, request))

    def digest(self) -> str:
        parts = self._of_newest(calls.GET_DIGEST, None)
        shards = {shard: digest for part in parts for shard, digest in part.items()}
        vectors = {
            name: np.empty(spec.length, np.float32) for name, spec in self._routing.blocks.items()
        }
        if vectors:
            self.pull_dense(vectors).result()
        return model_digest(vectors, shards)

    @property
    def num_retries(self) -> int:
        """Calls that were sent to a server again."""
        return self._transport.retries

    def status(self) -> StoreStatus:
        return merge_status([part.store for part in self._of_newest(calls.GET_STATUS, None)])
