"""What a server reads: segments of an update log, checkpoints, and messages of all calls."""

import json
import random
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ctr_ps.protos.errors import CtrPsError
from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.keys import Keys
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
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.durability.segments import MARKER, Record
from ctr_ps.ps_server.rpc.handlers import Handlers, answer_of_parts
from ctr_ps.ps_server.store import ParameterStore
from tests.fuzz.driver import Target
from tests.fuzz.mutations import mutate_document, mutated
from tests.support.checkpoints import fake_counting_model, signed
from tests.support.requests import fill
from tests.support.stores import joined, trained_chain
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


class Base:
    """A checkpoint with its chain, and what it reads."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.saved = read(folder / name)
        self.files = sorted(path for path in (folder / name).rglob("*") if path.is_file())


def read(target: Path) -> dict[str, Any]:
    """Returns rows as all readers see them, by key; look-ups must agree with the rows of shards."""
    checkpoint = Checkpoint.open(target)
    found: dict[str, Any] = {}
    for name, spec in checkpoint.tables.items():
        shards = [rows for _, rows in checkpoint.read_shards(name, range(spec.num_shards))]
        keys = np.concatenate([rows.keys for rows in shards])
        found[name] = {
            int(key): (rows.weights[i].tobytes(), rows.state[i].tobytes())
            for rows in shards
            for i, key in enumerate(rows.keys)
        }
        for maps in (False, True):
            looked_up = look_up(SavedModel(checkpoint, maps=maps, verifies=True), name, keys)
            assert looked_up == {key: weights for key, (weights, _) in found[name].items()}
    checkpoint.verify()
    store = ParameterStore()
    store.load(str(target))
    for name in checkpoint.tables:
        table = store.engine.parameters.table(name)
        rows = [table.export_shard(shard) for shard in table.shards]
        stored = {
            int(key): (each.weights[i].tobytes(), each.state[i].tobytes())
            for each in rows
            for i, key in enumerate(each.keys)
        }
        assert stored == found[name]
    return found


def look_up(model: SavedModel, table: str, keys: Keys) -> dict[int, bytes]:
    """Returns the weights of the keys that are found, of these and others."""
    others = np.random.default_rng(0).integers(0, 2**64, 50, np.uint64)
    asked = np.unique(np.concatenate([keys, others, np.array([0, 2**64 - 1], np.uint64)]))
    rows, has_row = model.find(table, asked)
    return {int(key): rows[i].tobytes() for i, key in enumerate(asked) if has_row[i]}


def mutate_manifest(path: Path, rng: random.Random) -> None:
    document = json.loads(path.read_bytes())
    mutate_document(document, rng)
    path.write_bytes(signed(document))


def mutate_bytes(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        if content:
            place = rng.randrange(len(content))
            content[place] = rng.choice(
                [0, 1, 127, 128, 255, content[place] ^ 1 << rng.randrange(8)]
            )
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content) + 1)]
    path.write_bytes(content)


def damaged_rows(target: Path) -> None:
    """Reads rows whose checksums nobody compares: any answer is right, as long as it comes."""
    model = SavedModel(Checkpoint.open(target), maps=True)
    for name in model.checkpoint.tables:
        look_up(model, name, np.empty(0, np.uint64))


def mutate_and_read(base: Base, rng: random.Random, folder: Path) -> str:
    """Returns what became of one mutation."""
    shutil.copytree(base.folder, folder, dirs_exist_ok=True)
    target = folder / base.name
    manifest = target / "MANIFEST.json"
    is_signed = rng.random() < 0.6
    file = manifest if is_signed else folder / rng.choice(base.files).relative_to(base.folder)
    if is_signed:
        mutate_manifest(manifest, rng)
    else:
        mutate_bytes(file, rng)
    if not is_signed and rng.random() < 0.5:
        damaged_rows(target)
        return "answered"
    found = read(target)
    assert found == base.saved or (is_signed and found.keys() < base.saved.keys()), (
        f"reads otherwise: {target}"
    )
    return "same"


def checkpoint(folder: Path) -> Target:
    """Returns all readers of checkpoints; an input is the number of a mutation, from 0.

    A mutated checkpoint is refused with an error of ours, or read as it was saved. Manifests get other values
    and correct checksums, as anybody can write them; files of rows get other bytes. A look-up beside its
    arrays may end the process.
    """
    fake_counting_model().save(folder / "counting" / "saved")
    trained_chain(folder / "chain", 2)
    bases = [Base(folder / "counting", "saved"), Base(folder / "chain", "2")]
    mutated_copy = folder / "mutated"

    def make(rng: random.Random) -> bytes:
        return str(rng.getrandbits(63)).encode()

    def check(number: bytes) -> bytes:
        rng = random.Random(number)
        try:
            return mutate_and_read(rng.choice(bases), rng, mutated_copy).encode()
        finally:
            shutil.rmtree(mutated_copy, ignore_errors=True)

    return Target([], make, check)


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
