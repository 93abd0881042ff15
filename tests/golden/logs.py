"""Update logs with every kind of record, and what a server is after it has carried them out again.

    fresh     a run that is resumed, a job of pushes on arrival, and the next one, of steps
    loaded    one segment: the state of that server, all that waits then, and some calls since

Each call stands in the place where a server has carried it out; `kinds` are all that a log may have.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.placement import FIRST_EPOCH, ShardMap
from ctr_ps.protos.store import (
    BlockState,
    Lease,
    Member,
    Message,
    PushId,
    ReduceOp,
    RowStates,
    StateChunk,
    WorkerLoss,
    WorkerProgress,
)
from ctr_ps.protos.store.moves import Cut, Moved, Phase
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import CALLS
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.durability.update_log import UpdateLog
from ctr_ps.ps_server.engine.journal import BACK, LOST, NEW_JOB
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.journal import (
    MESSAGE,
    PART,
    RESUMED,
    SAVED,
    SAVED_JSON,
    STATE,
    SavedAt,
    UpdateJournal,
    resumed_record,
    state_records,
)
from ctr_ps.ps_server.rpc.recovery import recover
from ctr_ps.ps_server.settings import LogSync
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.state_transfer import block_of
from tests.golden.checkpoints import GIVEN, GIVEN_VALUES, KEYS, TABLES, TOWER, content, gradients

ROOT = Path(__file__).parents[2]
LIMIT_S = 5.0
WAIT = Lease(seconds=3.0, on_worker_loss=WorkerLoss.WAIT)
FIRST, OTHER, NEXT = Member(0, 7), Member(1, 2**63 + 5), Member(0, 70)

KINDS = {
    *(name for name, call in CALLS.items() if call.is_logged),
    *(STATE, RESUMED, SAVED, MESSAGE, PART, LOST, BACK, NEW_JOB),
}


@contextmanager
def relative_urls() -> Iterator[None]:
    """Has the URLs of checkpoints in logs begin at the root of the project."""
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)


class _Server:
    """A server of two workers, and their calls."""

    def __init__(self, folder: Path) -> None:
        self.store = ParameterStore(num_workers=2, has_update_log=True)
        self.handlers = Handlers(self.store.engine)
        self.log = UpdateLog.create(read_log(folder), sync=LogSync.OS, head=self.head(base=""))
        self._journal()

    def head(self, *, base: str) -> list[Record]:
        return state_records(self.store.engine.state(), self.handlers.completed(), base=base)

    def _journal(self) -> None:
        self.handlers.engine.journal = UpdateJournal(
            self.log, self.handlers.completed, wait_limit_s=LIMIT_S
        )

    def append(self, kind: str, payload: bytes) -> None:
        self.log.append(kind, payload).result()

    def go_on_in(self, folder: Path, *, base: str, saved: Record) -> None:
        """Writes to a new log, which begins with the state now."""
        head = [*self.head(base=base), saved]
        self.log.close()
        self.log = UpdateLog.create(read_log(folder), sync=LogSync.OS, head=head)
        self._journal()

    def call(self, name: str, argument: Any) -> Any:
        return self.handlers.start(CALLS[name], argument)

    def join(self, *members: Member) -> None:
        for member in members:
            self.call(
                "Join", requests.Join(member=member, terms={"mode": "any"}, lease=WAIT)
            ).result()

    def push(
        self, member: Member, sequence: int, at: int | None = None, *, chunk: int | None = None
    ) -> Any:
        """Pushes gradients for all tables and the dense block, or one of the two chunks that have them."""
        of = gradients(sequence + member.worker)
        sparse, dense = [*of.sparse.items()], [(name, 0, grad) for name, grad in of.dense.items()]
        parts = {
            None: PushChunk(sparse, dense),
            0: PushChunk(sparse, [], 0, 2),
            1: PushChunk([], dense, 1, 2),
        }
        push = requests.PushGrad(
            chunk=parts[chunk],
            push_id=push_id(member, sequence),
            at=at,
            shard_map_epoch=FIRST_EPOCH,
        )
        return self.call("PushGrad", push)

    def post(self, sequence: int) -> None:
        message = Message(sender=0, receiver=1, sequence=sequence, content=bytes([sequence] * 3))
        self.call("Post", requests.Post(exchange="rows", message=message, member=FIRST)).result()

    def take(self, received: int) -> list[bytes | None]:
        take = requests.Take(exchange="rows", member=OTHER, received=received)
        return [message.content for message in self.call("Take", take).result()]


def push_id(member: Member, sequence: int) -> PushId:
    return PushId(
        worker=member.worker,
        incarnation=member.incarnation,
        sequence=sequence,
        step=sequence + 1,
        examples=4,
        batches=1,
        pulled=0,
        position=f"at {sequence}",
        partitions={"clicks/0": str(sequence)},
    )


def _first_job(server: _Server, checkpoints: Path) -> None:
    server.join(FIRST, OTHER)
    progress = WorkerProgress(incarnation=6, sequence=8, step=9, position="at 8")
    server.call(
        "Resume", requests.Resume(version=70, progress={0: progress}, batches=90, member=FIRST)
    )
    for table in TABLES:
        server.call("CreateTable", requests.CreateTable(spec=table))
    server.call("CreateDense", requests.CreateDense(spec=TOWER))
    server.call("CreateDense", requests.CreateDense(spec=GIVEN, values=GIVEN_VALUES))
    url = str((checkpoints / "delta").relative_to(ROOT))
    server.call("Load", requests.Load(url=url, only=["deep"], member=FIRST, number=1))
    for member in (FIRST, OTHER):
        server.call("Leave", requests.Leave(member=member, step=70))
    server.store.engine.begin_job()


def _second_job(server: _Server) -> None:
    server.join(FIRST, OTHER)
    for member in (FIRST, OTHER):
        server.push(member, 0).result()
    rows = RowStates(
        keys=KEYS[6:],
        weights=np.ones((2, 2), np.float32),
        state=np.ones((2, 2), np.float32),
        optimizer="adagrad",
    )
    tower = BlockState(
        weights=np.ones(TOWER.length, np.float32),
        element_state=np.ones((2, TOWER.length), np.float32),
        scalars=np.full(2, 0.5, np.float32),
        optimizer="adam",
    )
    server.call(
        "PushState",
        requests.PushState(
            chunk=StateChunk([("deep", rows)], [("tower", 0, tower)]),
            push_id=push_id(FIRST, 1),
            shard_map_epoch=FIRST_EPOCH,
        ),
    ).result()
    for sequence in range(3):
        server.post(sequence)
    assert server.take(0) == [bytes([sequence] * 3) for sequence in range(3)]
    for member in (FIRST, OTHER):
        server.call("Barrier", requests.Barrier(name="start", member=member, step=0, number=1))
    for member in (FIRST, OTHER):
        numbers = np.array([member.worker + 1.5, np.inf])
        arrival = requests.AllReduce(
            name="sum", member=member, values=numbers, op=ReduceOp.SUM, step=0, number=2
        )
        server.call("AllReduce", arrival)
    for member in (FIRST, OTHER):
        clock = 3 + member.worker
        server.call(
            "Advance", requests.Advance(member=member, clock=clock, at_least=1, after_barrier=2)
        )
    server.call("Shrink", requests.Shrink(member=FIRST, number=1)).result()
    take = requests.TakeFile(member=FIRST, pass_number=1, num_files=2, received=0)
    server.call("TakeFile", take).result()
    _move(server)


def _move(server: _Server) -> None:
    """Half of the shards are to move to a second server, and do not."""
    parameters = server.store.engine.parameters
    next_map = replace(ShardMap.of(2, ("a:1", "b:1")), epoch=2)
    pieces = [
        (name, 0, block_of(parameters.block(name), 0, next_map.piece_of(0, length).stop))
        for name, length in (("tower", TOWER.length), ("given", GIVEN.length))
    ]
    server.call("BeginMove", requests.BeginMove(token="m1", shard_map=next_map))
    server.call("PutMoved", requests.PutMoved(token="m1", number=1, moved=Moved(blocks=pieces)))
    close = requests.HoldMove(token="m1", number=1, phase=Phase.CLOSE, cut=Cut())
    with suppress(ProtocolError):  # an exchange is under way, but calls are held
        server.call("HoldMove", close)
    server.call("PrepareMove", requests.PrepareMove(token="m1", server=0, progress={}))
    server.call("EndMove", requests.EndMove(token="m1", is_committed=False))


def _replacement(server: _Server) -> None:
    """The first worker is replaced; the other was silent, too."""
    server.store.engine.pass_time(WAIT.seconds)
    server.call("Renew", requests.Renew(member=OTHER))
    ask = requests.Join(member=NEXT, terms={"mode": "any"}, lease=WAIT, only_asks=True)
    server.call("Join", ask).result()
    server.join(NEXT)


def _steps(server: _Server) -> None:
    """One whole step; of the next one, a part and a chunk of the other; a worker waits at a barrier."""
    step = server.store.status().version
    for member, sequence in ((NEXT, 0), (OTHER, 1)):
        server.push(member, sequence, step)
    assert server.store.status().version == step + 1
    server.push(NEXT, 1, step + 1)
    server.push(OTHER, 2, step + 1, chunk=0)
    server.call("Barrier", requests.Barrier(name="end", member=NEXT, step=step + 2, number=3))


def write_logs(folder: Path, checkpoints: Path) -> None:
    """Writes both logs; `checkpoints` are those of `save_chain`, below the root of the project."""
    with relative_urls():
        server = _Server(folder / "fresh")
        _first_job(server, checkpoints)
        _second_job(server)
        _replacement(server)
        resumed = resumed_record()
        server.append(resumed.kind, resumed.payload)
        saved = {
            name: SavedAt(
                token=Checkpoint.open(checkpoints / name).token,
                url=str((checkpoints / name).relative_to(ROOT)),
            )
            for name in ("full", "delta")
        }
        server.append(SAVED, SAVED_JSON.dump_json(saved["full"]))
        _steps(server)
        record = Record(SAVED, SAVED_JSON.dump_json(saved["delta"]))
        server.go_on_in(folder / "loaded", base=saved["delta"].token, saved=record)
        server.push(OTHER, 2, server.store.status().version, chunk=1)
        server.log.close()


def kinds_of(folder: Path) -> set[str]:
    """Returns the kinds of the records of both logs."""
    kinds = set()
    for name in ("fresh", "loaded"):
        with closing(read_log(folder / name)) as saved:
            kinds |= {each.kind for each in saved.head(1)}
            kinds |= {each.kind for each in saved.records_from(1)}
    return kinds


def of_log(folder: Path) -> dict[str, Any]:
    """Returns what a server is after it has recovered from a log, and how it goes on."""
    store = ParameterStore(num_workers=2, has_update_log=True)
    handlers = Handlers(store.engine)
    with relative_urls(), closing(read_log(folder)) as saved:
        recover(
            store.engine,
            saved,
            replay=handlers.replay,
            restore_completed=handlers.restore_completed,
        )
    join = requests.Join(member=NEXT, terms={"mode": "any"}, lease=WAIT)
    return {
        **content(store),
        "waiting": sorted(type(each).__name__ for each in store.engine.job.waiting()),
        "joined": asdict(handlers.start(calls.JOIN, join).result()),
        "shrunk": {
            name: asdict(each)
            for name, each in handlers.start(calls.SHRINK, requests.Shrink(member=NEXT, number=1))
            .result()
            .items()
        },
        "messages": [
            message.content.hex()
            for message in handlers.start(
                calls.TAKE, requests.Take(exchange="rows", member=OTHER, received=1)
            ).result()
        ],
        "sum": handlers.start(
            calls.ALL_REDUCE,
            requests.AllReduce(
                name="sum", member=NEXT, values=np.zeros(2), op=ReduceOp.SUM, step=0, number=2
            ),
        )
        .result()
        .values.tolist(),
    }
