"""Servers of this process between which shards move, called as rpc/service.py does."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ctr_ps.protos.errors import CtrPsError, MovingError
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.placement import NO_SERVER, ShardMap
from ctr_ps.protos.store import Lease, Missing, PushId
from ctr_ps.protos.wire import calls
from ctr_ps.protos.wire.calls import Call
from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.durability.update_log import LogSync, UpdateLog
from ctr_ps.ps_server.rpc.handlers import Handlers, answer_of_parts
from ctr_ps.ps_server.rpc.journal import UpdateJournal
from ctr_ps.ps_server.rpc.recovery import recover
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.extras.moves.move import Move, states_of
from tests.support.local_transport import Answer, _raising, through
from tests.support.stores import INCARNATION, WIDE, push_id
from tests.support.update_logs import LIMIT_S, begun_log

SPEC = replace(WIDE, num_shards=64)
KEYS = np.arange(1, 1001, dtype=np.uint64)
SPARE = "spare:1"

Before = Callable[[str, Call[Any, Any], Any], None]


class MovingServers:
    """Two servers with logs, and one that waits to be added."""

    def __init__(self, folder: Path, stack: ExitStack, num_workers: int = 1) -> None:
        self.endpoints = ("s0:1", "s1:1")
        self.handlers: dict[str, Handlers] = {}
        self._folder, self._num_workers, self._stack = folder, num_workers, stack
        self._logs: dict[str, UpdateLog] = {}
        for index, endpoint in ((0, "s0:1"), (1, "s1:1"), (NO_SERVER, SPARE)):
            log = begun_log(folder / endpoint, self._store(index))
            self.handlers[endpoint], self._logs[endpoint] = log
        stack.callback(lambda: [log.close() for log in self._logs.values()])
        self.transport = MovingTransport(self)
        self.client = ClusterClient(self.transport)

    def _store(self, index: int) -> ParameterStore:
        return ParameterStore(
            num_workers=self._num_workers,
            server_index=index,
            num_servers=1 if index == NO_SERVER else 2,
            endpoints=[SPARE] if index == NO_SERVER else self.endpoints,
            wait_limit_s=2.0,
        )

    def begin(self, spec: Any = SPEC, lease: Lease | None = None) -> None:
        """All workers join, and the first one declares a table."""
        for worker in range(self._num_workers):
            self.client.join(worker, INCARNATION, terms={}, lease=lease).result()
        self.client.create_table(spec)

    def restart(self, endpoint: str, index: int) -> None:
        """Kills a server, and starts it again with its log."""
        self._logs[endpoint].close()
        store = self._store(index)
        handlers = Handlers(store.engine)
        with closing(read_log(self._folder / endpoint)) as saved:
            recover(
                store.engine,
                saved,
                replay=handlers.replay,
                restore_completed=handlers.restore_completed,
            )
            handlers.moves.recovered()
            log = UpdateLog.resume(saved, sync=LogSync.OS)
        handlers.engine.journal = UpdateJournal(log, handlers.completed, wait_limit_s=LIMIT_S)
        self.handlers[endpoint], self._logs[endpoint] = handlers, log

    def exchange(self) -> Move:
        """Returns a move by which the two servers exchange all shards."""
        transport = MovingTransport(self)
        before = transport.shard_map
        after = replace(before, epoch=2, owners=tuple(1 - each for each in before.owners))
        return Move(transport, states_of(transport), after)

    def push(self, sequence: int) -> None:
        """Adds 1 to the weight of all keys."""
        self.client.push_grad(ones(), push_id(sequence=sequence)).result()

    def push_parts(self, push_id: PushId) -> list[bool]:
        """Sends the servers' parts of `ones` by the client's map; returns whether each was taken."""
        routing, taken = self.client._routing, []
        for server, chunks in routing.split_push(ones(), bfloat16=False).items():
            for chunk in chunks:
                push = self.client._push_request(routing, chunk, push_id, None)
                try:
                    self.transport.call(server, calls.PUSH_GRAD, push).result()
                except CtrPsError:
                    taken.append(False)
                else:
                    taken.append(True)
        return taken

    def weights(self) -> dict[float, int]:
        """Returns how many keys have which weight."""
        rows = self.client.pull_sparse({SPEC.name: KEYS}, missing=Missing.INITIAL).result().rows
        found, counts = np.unique(rows[SPEC.name], return_counts=True)
        return dict(zip(found.tolist(), counts.tolist(), strict=True))


class MovingTransport:
    """Calls the servers that are in `shard_map`; `before` may look at each call first, or raise."""

    servers_recover, retries = False, 0

    def __init__(self, servers: MovingServers, before: Before = lambda *_: None) -> None:
        self._servers = servers
        self.shard_map = ShardMap.of(2, servers.endpoints)
        self.before = before

    def call(self, server: int, call: Call[Any, Any], argument: Any, *, ready_s: Any = None) -> Any:
        endpoint = self.shard_map.endpoint_of(server)

        def sent() -> Any:
            return call.request.decode(call.request.encode(argument))

        try:
            self.before(endpoint, call, argument)
            handlers = self._servers.handlers[endpoint]
            futures = []
            for each, of in handlers.parts_of(call, sent()):
                if handlers.moves.enter(each, of) is not None:
                    raise MovingError(f"{endpoint} holds {each.name}")
                try:
                    futures.append(handlers.start(each, of))
                finally:
                    handlers.moves.left(each)
        except CtrPsError as error:
            return Answer(_raising(error), sent)
        return Answer(
            lambda: through(call.answer, answer_of_parts([each.result() for each in futures])), sent
        )

    def use(self, shard_map: ShardMap) -> None:
        self.shard_map = shard_map

    def close(self) -> None:
        """No-op."""


def ones() -> Gradients:
    grad = SparseGrad(KEYS, np.full((KEYS.size, 1), -2.0, np.float32), 1)  # sgd with 0.5
    return Gradients(sparse={SPEC.name: grad}, dense={})


@contextmanager
def moving_servers(folder: Path, num_workers: int = 1) -> Iterator[MovingServers]:
    with ExitStack() as stack:
        yield MovingServers(folder, stack, num_workers)
