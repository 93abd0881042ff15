"""The store in process: all parameters of a model, or one server's, without a wire.

    trainer --Store--> ParameterStore --> engine

Nobody has to join, and calls have no numbers: none is lost on its way, so none comes again.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Gradients, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import (
    Changed,
    Future,
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
    push_then_pull,
)
from ctr_ps.ps_server.checkpoint.files.digest import model_digest
from ctr_ps.ps_server.checkpoint.files.manifest import Share
from ctr_ps.ps_server.checkpoint.publish import require_writable
from ctr_ps.ps_server.checkpoint.writer import open_base, save_checkpoint
from ctr_ps.ps_server.engine.engine import Engine, EngineSettings


class ParameterStore:
    """A `protos.store.Store` over an engine of this process. Thread-safe."""

    def __init__(self, **settings: Any) -> None:
        """Makes an empty store; `settings` are those of `EngineSettings`."""
        # what the store is made of; a server answers its calls from it
        self.engine = Engine(EngineSettings(**settings))

    def join(
        self,
        worker: int,
        incarnation: int,
        *,
        terms: Mapping[str, str],
        lease: Lease | None = None,
    ) -> Future[Joined]:
        """See `protos.store.Store`; of this process alone."""
        with self.engine.places:
            return self.engine.job.join(Member(worker, incarnation), terms, lease)

    def renew(self, worker: int, *, is_last: bool = False) -> None:
        self.engine.renew(worker, is_last=is_last)

    def confirm_place(self, worker: int) -> None:
        """See `protos.store.Store`; no-op, since nobody else can have it."""

    def disconnect(self) -> None:
        """See `protos.store.Store`; no-op, since there is no connection."""

    def leave(self, worker: int, *, step: Version) -> None:
        self.engine.leave(worker, step=step)

    def abort(self, worker: int, reason: str, *, comes_again: bool = False) -> None:
        self.engine.abort(worker, reason, comes_again=comes_again)

    def create_table(self, spec: TableSpec) -> None:
        self.engine.parameters.create_table(spec)

    def create_dense(self, spec: DenseSpec, values: Values | None = None) -> None:
        """See `protos.store.Store`; `values` are this store's piece."""
        self.engine.parameters.create_dense(spec, values)

    def with_bfloat16(self) -> Self:
        """See `protos.store.Store`: nothing goes over a wire here."""
        return self

    def pull_sparse(
        self, keys: Mapping[str, Keys], *, missing: Missing, at: Version | None = None
    ) -> Future[Pulled]:
        """See `protos.store.Store`; done when returned, unless it waits for `at`."""
        return self.engine.pulls.sparse(self.engine.job, keys, missing=missing, at=at)

    def pull_dense(
        self, into: Mapping[str, Values], *, at: Version | None = None
    ) -> Future[Version]:
        """See `protos.store.Store`; `into` has the length of this process's pieces."""
        return self.engine.pulls.dense(self.engine.job, into, at=at)

    def pull_changed(self, tables: Sequence[str], worker: int, *, max_rows: int) -> Future[Changed]:
        """See `protos.store.Store`; done when returned."""
        return self.engine.pulls.changed(self.engine.job, tables, worker, max_rows=max_rows)

    def pull_state(self, keys: Mapping[str, Keys], blocks: Sequence[str]) -> Future[ModelState]:
        """See `protos.store.Store`; done when returned. Of blocks, this process's pieces."""
        return self.engine.pulls.state(self.engine.job, keys, blocks)

    def push_grad(
        self, gradients: Gradients, push_id: PushId, *, at: Version | None = None
    ) -> Future[Version]:
        self._require_push(push_id)
        return self.engine.push(gradients, push_id, at)

    def push_pull(
        self,
        gradients: Gradients,
        push_id: PushId,
        *,
        keys: Mapping[str, Keys],
        into: Mapping[str, Values],
        at: Version | None = None,
    ) -> tuple[Future[Pulled], Future[Version]]:
        return push_then_pull(self, gradients, push_id, keys=keys, into=into, at=at)

    def push_state(self, state: ModelState, push_id: PushId) -> Future[Version]:
        """See `protos.store.Store`; of this process's keys and pieces."""
        self._require_push(push_id)
        return self.engine.push_state(state, push_id)

    def _require_push(self, push_id: PushId) -> None:
        self.engine.job.pushes.require_push(push_id)
        self.engine.job.require_own_place(push_id)

    def wait_version(self, at: Version) -> Future[Version]:
        """See `protos.store.Store`; of this process's parameters."""
        return self.engine.wait_version(at)

    def barrier(self, name: str, worker: int, *, step: Version) -> Future[Version]:
        released = self.engine.job.rendezvous.barrier(name, worker, step=step)
        self.engine.apply_complete_steps()
        return released

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
        reduced = self.engine.job.rendezvous.all_reduce(
            name, worker, values, op, step=step, remember=remember
        )
        self.engine.apply_complete_steps()
        return reduced

    def advance(self, worker: int, clock: int, *, at_least: int) -> Future[int]:
        return self.engine.job.rendezvous.advance(worker, clock, at_least=at_least)

    def take_file(
        self, worker: int, *, pass_number: int, num_files: int, received: int, waits: bool = False
    ) -> Future[TakenFile]:
        return self.engine.job.rendezvous.take_file(
            worker,
            pass_number=pass_number,
            num_files=num_files,
            received=received,
            waits=waits,
        )

    def post(self, exchange: str, message: Message) -> Future[None]:
        return self.engine.job.rendezvous.post(exchange, message)

    def take(self, exchange: str, worker: int, *, received: int) -> Future[Sequence[Message]]:
        return self.engine.job.rendezvous.take(exchange, worker, received=received)

    def require_writable(self, root: str) -> None:
        """See `protos.store.Store`; for a store that holds everything."""
        require_writable(root, self.engine.check_folder)

    def save(self, request: SaveRequest) -> str:
        """See `protos.store.Store`; for a store that holds everything."""
        base = open_base(request.base, request.url) if request.base else None

        def write_shares(folder: str, token: str) -> list[Share]:
            self.engine.snapshot(token, "" if base is None else base.token)
            if request.on_snapshot is not None:
                request.on_snapshot()
            return [self.engine.save_share(folder, token, request.inference)]

        tables, blocks = self.engine.parameters.saved_specs()
        return save_checkpoint(
            request.url,
            write_shares=write_shares,
            tables=tables,
            blocks=blocks,
            attachments=request.attachments,
            base=base,
            is_inference=request.inference is not None,
        )

    def load(self, url: str, *, only: Collection[str] = (), token: str = "") -> None:
        """See `protos.store.Store`; reads this process's shards and pieces."""
        with self.engine.snapshots.between_saves("a load"):
            self.engine.load(url, only=only, token=token)

    def resume(
        self, version: Version, progress: Mapping[int, WorkerProgress], *, batches: int = 0
    ) -> None:
        self.engine.job.resume(version, progress, batches)

    def shrink(
        self, *, max_norm: float | None = None, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        """See `protos.store.Store`; of this process's shards."""
        with self.engine.snapshots.between_saves("a shrink"):
            return self.engine.parameters.shrink(max_norm=max_norm, dry_run=dry_run)

    def digest(self) -> str:
        """See `protos.store.Store`; for a store that holds everything."""
        if self.engine.shard_map.num_servers > 1:
            raise ProtocolError(
                "this server has only its own shards, not all of the model: get the digest from a client"
            )
        parameters = self.engine.parameters
        return model_digest(parameters.dense_vectors(), parameters.shard_digests())

    def status(self) -> StoreStatus:
        return self.engine.status()
