"""A transport to stores of this process: the client without a network."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from protos.chunking import PushChunk
from protos.gradients import Values
from protos.keys import Keys
from protos.spec import DenseSpec, TableSpec
from protos.store import (
    Changed,
    Future,
    InferenceSettings,
    Message,
    Missing,
    Numbers,
    Pulled,
    PushId,
    Reduced,
    ReduceOp,
    Shrunk,
    Version,
    WorkerProgress,
)
from ps_server.checkpoint.files.manifest import share_to_json
from ps_server.store import ParameterStore
from ps_worker.cluster.transport import ServerStatus

T = TypeVar("T")


class Answer(Future[T]):
    """An answer that is computed when it is first asked for."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute = compute
        self._outcome: Callable[[], T] | None = None

    def result(self) -> T:
        """Returns the answer or raises."""
        if self._outcome is None:
            self._outcome = _outcome_of(self._compute)
        return self._outcome()


def _outcome_of(compute: Callable[[], T]) -> Callable[[], T]:
    try:
        value = compute()
    except Exception as error:
        raised = error

        def fail() -> T:
            raise raised

        return fail
    return lambda: value


@dataclass
class LocalTransport:
    """Calls stores, and remembers the calls that moved data as (server, name, argument)."""

    stores: list[ParameterStore]
    calls: list[tuple[int, str, Any]] = field(default_factory=list)
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.endpoints: Sequence[str] = [f"ps-{server}:1" for server in range(len(self.stores))]

    def create_table(self, server: int, spec: TableSpec) -> Future[None]:
        return Answer(lambda: self.stores[server].create_table(spec))

    def create_dense(self, server: int, spec: DenseSpec) -> Future[None]:
        return Answer(lambda: self.stores[server].create_dense(spec))

    def pull_sparse(
        self, server: int, keys: Mapping[str, Keys], missing: Missing, at: Version | None
    ) -> Future[Pulled]:
        self.calls.append((server, "pull_sparse", dict(keys)))
        return self.stores[server].pull_sparse(keys, missing=missing, at=at)

    def pull_dense(
        self, server: int, blocks: Sequence[str], at: Version | None
    ) -> Future[tuple[Mapping[str, Values], Version]]:
        self.calls.append((server, "pull_dense", list(blocks)))
        store = self.stores[server]
        into = {block: np.empty(store.piece_length(block), np.float32) for block in blocks}
        return Answer(lambda: (into, store.pull_dense(into, at=at).result()))

    def pull_changed(
        self, server: int, tables: Sequence[str], worker: int, max_rows: int
    ) -> Future[Changed]:
        self.calls.append((server, "pull_changed", max_rows))
        return self.stores[server].pull_changed(tables, worker, max_rows=max_rows)

    def push_grad(
        self, server: int, part: PushChunk, push_id: PushId, at: Version | None
    ) -> Future[Version]:
        self.calls.append((server, "push_grad", part))
        return self.stores[server].push_chunk(part, push_id, at=at)

    def post(self, server: int, exchange: str, message: Message) -> Future[None]:
        self.calls.append((server, "post", message))
        return self.stores[server].post(exchange, message)

    def take(
        self, server: int, exchange: str, worker: int, received: int
    ) -> Future[Sequence[Message]]:
        self.calls.append((server, "take", (worker, received)))
        return self.stores[server].take(exchange, worker, received=received)

    def barrier(self, server: int, name: str, worker: int, step: Version) -> Future[Version]:
        return self.stores[server].barrier(name, worker, step=step)

    def all_reduce(
        self, server: int, name: str, worker: int, values: Numbers, op: ReduceOp, step: Version
    ) -> Future[Reduced]:
        self.calls.append((server, "all_reduce", values))
        return self.stores[server].all_reduce(name, worker, values, op, step=step)

    def advance(self, server: int, worker: int, clock: int, at_least: int) -> Future[int]:
        self.calls.append((server, "advance", (worker, clock, at_least)))
        return self.stores[server].advance(worker, clock, at_least=at_least)

    def leave(self, server: int, worker: int, step: Version) -> Future[None]:
        return Answer(lambda: self.stores[server].leave(worker, step=step))

    def check_folder(self, server: int, folder: str, token: str) -> Future[None]:
        return Answer(lambda: self.stores[server].check_folder(folder, token))

    def snapshot(self, server: int, token: str, base: str) -> Future[None]:
        self.calls.append((server, "cut", token))
        self.stores[server].snapshot(token, base)
        return Answer(lambda: None)

    def save(self, server: int, folder: str, token: str) -> Future[str]:
        self.calls.append((server, "save", token))
        return Answer(lambda: share_to_json(self.stores[server].save_part(folder, token)))

    def save_inference(
        self, server: int, folder: str, token: str, settings: InferenceSettings
    ) -> Future[str]:
        self.calls.append((server, "save_inference", settings))
        store = self.stores[server]
        return Answer(lambda: share_to_json(store.save_inference_part(folder, token, settings)))

    def load(self, server: int, folder: str, token: str, only: Collection[str]) -> Future[None]:
        return Answer(lambda: self.stores[server].load(folder, only=only, token=token))

    def resume(
        self, server: int, version: Version, progress: Mapping[int, WorkerProgress]
    ) -> Future[None]:
        return Answer(lambda: self.stores[server].resume(version, progress))

    def shrink(
        self, server: int, max_norm: float | None, dry_run: bool
    ) -> Future[Mapping[str, Shrunk]]:
        return Answer(lambda: self.stores[server].shrink(max_norm=max_norm, dry_run=dry_run))

    def digest(self, server: int) -> Future[Mapping[tuple[str, int], bytes]]:
        return Answer(self.stores[server].shard_digests)

    def status(self, server: int, *, wait_s: float | None = None) -> Future[ServerStatus]:
        store = self.stores[server]
        return Answer(lambda: ServerStatus(store.status(), store.server_index, store.num_servers))

    def close(self) -> None:
        self.is_closed = True
