"""What a server reads: segments of an update log, checkpoints, and messages of all calls."""

import random
from contextlib import closing
from pathlib import Path

from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.wire.calls import CALLS
from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.durability.segments import MARKER, Record
from ctr_ps.ps_server.rpc.handlers import Handlers, answer_of_parts
from ctr_ps.ps_server.store import ParameterStore
from tests.fuzz.checkpoint_mutations import Bases
from tests.fuzz.driver import Target
from tests.fuzz.mutations import mutated
from tests.support.requests import fill
from tests.support.stores import joined
from tests.support.update_logs import append_all, last_segment, new_log

RECORDS = [Record("push", b"one"), Record("shrink", b""), Record("push", MARKER + b"three" * 9)]
HEAD = [Record("state", b"version 7"), Record("ledger", b"")]


def log(folder: Path) -> Target:
    """Returns the reader of a log: what it reads of an altered segment is what was written, up to its end."""
    path = folder / "log"
    with new_log(path, head=HEAD) as written:
        append_all(written, RECORDS * 3)
    segment = last_segment(path)
    seed = segment.read_bytes()

    def make(rng: random.Random) -> bytes:
        return mutated(seed, rng, [MARKER])

    def check(data: bytes) -> bytes:
        segment.write_bytes(data)
        with closing(read_log(path)) as saved:
            (number,) = saved.segments
            assert saved.head(number) == HEAD
            records = list(saved.records_from(number))
            assert saved.end().next_record == len(HEAD) + len(records)
        assert records == (RECORDS * 3)[: len(records)]
        return bytes([len(records)])

    return Target([seed], make, check)


def checkpoint(folder: Path) -> Target:
    """Returns all readers of checkpoints; an input is the number of a mutation, from 0."""
    bases = Bases(folder)

    def make(rng: random.Random) -> bytes:
        return str(rng.getrandbits(63)).encode()

    return Target([], make, bases.check)


INITIALIZER = InitializerSpec(kind="uniform", scale=0.1)
MESSAGES = 60
"""Of an input, to one server."""

WRITES_FILES = frozenset({"Save", "Load", "CheckFolder", "Snapshot"})
ENDS_ALL = frozenset({"Leave", "Abort"})


def new_store() -> ParameterStore:
    """Returns a store with a table of each kind, whose workers have joined."""
    store = joined(ParameterStore(num_workers=2, wait_limit_s=0.0))
    optimizer = OptimizerSpec(name="adagrad")
    for spec in (
        TableSpec(name="t", dim=2, initializer=INITIALIZER, optimizer=optimizer, num_shards=4),
        TableSpec(
            name="s",
            dim=2,
            initializer=INITIALIZER,
            optimizer=OptimizerSpec(name="adam"),
            statistics=StatisticsSpec(),
            admission=AdmissionSpec(policy="count", threshold=2.0),
            expiry=ExpirySpec(max_rows=3),
        ),
    ):
        store.create_table(spec)
    segment = DenseSegment(length=2, initializer=INITIALIZER)
    store.create_dense(DenseSpec(name="d", segments=(segment,), optimizer=optimizer))
    return store


def rpc(_: Path) -> Target:
    """Returns a server's handlers: an input is messages, each behind the call's number and its length."""
    calls = [call for name, call in CALLS.items() if name not in WRITES_FILES]

    def make(rng: random.Random) -> bytes:
        parts = []
        for sequence in range(MESSAGES):
            number = rng.randrange(len(calls))
            call = calls[number]
            if call.name in ENDS_ALL and rng.random() < 0.9:
                continue
            message = fill(call.request.message(), rng)
            pushed = getattr(message, "push", message)
            if "push_id" in pushed.DESCRIPTOR.fields_by_name and rng.random() < 0.9:
                pushed.push_id.sequence = sequence
            for each in (message, pushed):
                if "table" in each.DESCRIPTOR.fields_by_name and rng.random() < 0.3:
                    each.table = "s"
            data = message.SerializeToString()
            data = mutated(data, rng) if rng.random() < 0.1 else data
            parts.append(bytes([number]) + len(data).to_bytes(4, "little") + data)
        return b"".join(parts)

    def check(data: bytes) -> bytes:
        handlers, accepted, at = Handlers(new_store().engine), 0, 0
        while at < len(data):
            call, size = calls[data[at]], int.from_bytes(data[at + 1 : at + 5], "little")
            at += 5 + size
            try:
                request = call.request.decode(data[at - size : at])
                answers = []
                for part, argument in handlers.parts_of(call, request):
                    handlers.work(part, argument)
                    future = handlers.start(part, argument)
                    if isinstance(future, WaitingFuture) and not future.done():
                        break
                    answers.append(future.result())
                else:
                    call.answer.encode(answer_of_parts(answers))
                accepted += 1
            except CtrPsError:
                pass
        return bytes([accepted])

    return Target([], make, check)
