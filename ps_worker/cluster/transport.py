"""The client's seam: calls to one server at a time, in arrays and dataclasses.

`ps_worker.cluster.grpc_transport.GrpcTransport` is a transport over the network; tests have others.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    StoreStatus,
    Version,
    WorkerProgress,
)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What one server holds and has seen, and which server it says it is."""

    store: StoreStatus
    server_index: int
    num_servers: int


class Transport(Protocol):
    """Calls to servers, which are numbered as in `endpoints`. Thread-safe.

    Every call is on its way when its method returns. Its future raises what the server raised, or
    TransportError if it cannot be reached or does not answer in time.
    """

    endpoints: Sequence[str]

    def create_table(self, server: int, spec: TableSpec) -> Future[None]:
        """Declares a table."""
        ...

    def create_dense(self, server: int, spec: DenseSpec) -> Future[None]:
        """Declares a dense block."""
        ...

    def pull_sparse(
        self, server: int, keys: Mapping[str, Keys], missing: Missing, at: Version | None
    ) -> Future[Pulled]:
        """Reads embeddings."""
        ...

    def pull_dense(
        self, server: int, blocks: Sequence[str], at: Version | None
    ) -> Future[tuple[Mapping[str, Values], Version]]:
        """Reads the server's pieces of dense blocks: for each float32[p]; and the version read."""
        ...

    def pull_changed(
        self, server: int, tables: Sequence[str], worker: int, max_rows: int
    ) -> Future[Changed]:
        """Takes rows of the server that changed; where there are none, their D means nothing."""
        ...

    def push_grad(
        self, server: int, part: PushChunk, push_id: PushId, at: Version | None
    ) -> Future[Version]:
        """Hands over a part of a push."""
        ...

    def post(self, server: int, exchange: str, message: Message) -> Future[None]:
        """Hands over a message; answered once it fits into what may wait for its receiver."""
        ...

    def take(
        self, server: int, exchange: str, worker: int, received: int
    ) -> Future[Sequence[Message]]:
        """Waits for messages to a worker that has `received` already; answers with none at the end."""
        ...

    def barrier(self, server: int, name: str, worker: int, step: Version) -> Future[Version]:
        """Waits until every worker has come."""
        ...

    def all_reduce(
        self, server: int, name: str, worker: int, values: Numbers, op: ReduceOp, step: Version
    ) -> Future[Reduced]:
        """Waits until every worker has come with its numbers."""
        ...

    def advance(self, server: int, worker: int, clock: int, at_least: int) -> Future[int]:
        """Says how far a worker is, and waits until all are far enough; answers with the slowest clock."""
        ...

    def leave(self, server: int, worker: int, step: Version) -> Future[None]:
        """Says that a worker has left."""
        ...

    def check_folder(self, server: int, folder: str, token: str) -> Future[None]:
        """Finds out whether the server could save into a folder."""
        ...

    def snapshot(self, server: int, token: str, base: str) -> Future[None]:
        """Freezes the server's parameters for the save of this token, and of a delta its base's token."""
        ...

    def save(self, server: int, folder: str, token: str) -> Future[str]:
        """Writes the server's part of a checkpoint; answers with that as JSON."""
        ...

    def save_inference(
        self, server: int, folder: str, token: str, settings: InferenceSettings
    ) -> Future[str]:
        """Writes what predictions need of the server's part; answers as `save`."""
        ...

    def load(self, server: int, folder: str, token: str, only: Collection[str]) -> Future[None]:
        """Reads the server's part, of what is named or of all, of what the save with this token has left."""
        ...

    def resume(
        self, server: int, version: Version, progress: Mapping[int, WorkerProgress]
    ) -> Future[None]:
        """Goes on with an earlier run."""
        ...

    def shrink(
        self, server: int, max_norm: float | None, dry_run: bool
    ) -> Future[Mapping[str, Shrunk]]:
        """Ends a pass on the server: see `protos.store.Store.shrink`."""
        ...

    def digest(self, server: int) -> Future[Mapping[tuple[str, int], bytes]]:
        """Hashes the server's shards, by table and shard."""
        ...

    def status(self, server: int, *, wait_s: float | None = None) -> Future[ServerStatus]:
        """Asks what the server holds, and who it is.

        With `wait_s` it waits as many seconds for a server that is not there yet.
        """
        ...

    def close(self) -> None:
        """Ends all calls that are on their way, and the connections."""
        ...
