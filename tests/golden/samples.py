"""Arguments and answers of every call, with each field set: what the recorded bytes of each release mean.

A field that is renamed is renamed here; a new one is left at its default, which old bytes have, and set in a
sample of its own. The values of a sample never change.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.gradients import DenseGrad, SparseGrad
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    ScheduleSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import (
    Acknowledged,
    BlockState,
    Changed,
    InferenceSettings,
    Joined,
    Lease,
    Member,
    Message,
    Missing,
    Pulled,
    PulledPieces,
    PushedPulled,
    PushId,
    Reduced,
    ReduceOp,
    RowStates,
    SaveStatus,
    ServerStatus,
    Shrunk,
    Staleness,
    StateChunk,
    StoreStatus,
    StreamOffer,
    Stretch,
    TableStatus,
    TakenFile,
    WorkerLoss,
    WorkerProgress,
)
from ctr_ps.protos.store.moves import (
    Cut,
    LogRecord,
    MapState,
    Moved,
    MovedCounters,
    MovedRows,
    Phase,
    SeenPushes,
    Taken,
)
from ctr_ps.protos.wire import heter, requests
from ctr_ps.protos.wire.calls import CALLS, Call

MEMBER = Member(1, 2**63 + 5)
KEYS = np.array([3, 2**64 - 1, 0], np.uint64)
ROWS = np.array([[0.1, -2.5], [1e-30, 3.0], [0.0, -0.0]], np.float32)
PIECE = np.array([0.25, -7.0, 1e20], np.float32)
HALVES = np.array([[0.5, -2.0], [1.0, 3.0], [0.0, 96.0]], np.float32)
"""Values that bfloat16 has, too."""

SCHEDULE = ScheduleSpec(
    kind="cosine", warmup_steps=3, total_steps=2**40, end_factor=0.125, step_size=9, gamma=0.75
)
TABLE = TableSpec(
    name="deep",
    dim=2,
    initializer=InitializerSpec(kind="normal", scale=0.1),
    optimizer=OptimizerSpec(name="adagrad", params={"learning_rate": 0.05}, schedule=SCHEDULE),
    seed=2**64 - 3,
    num_shards=8,
    records_changes=True,
    statistics=StatisticsSpec(nonclk_coeff=0.2, click_coeff=1.5, decay=0.9),
    admission=AdmissionSpec(
        policy="count",
        threshold=3.0,
        table="wide",
        counter="bloom",
        expected_keys=1000,
        false_positive_rate=0.03,
        default_value=0.5,
    ),
    expiry=ExpirySpec(
        delete_threshold=0.7,
        max_unseen=4,
        ttl_s=86400.5,
        max_rows=10_000,
        max_bytes=2**33,
        evict="score",
    ),
    is_bfloat16=True,
)
BLOCK = DenseSpec(
    name="tower",
    segments=(
        DenseSegment(
            length=3,
            initializer=InitializerSpec(kind="uniform", scale=0.5),
            name="linear.weight",
            shape=(1, 3),
        ),
        DenseSegment(length=2, initializer=InitializerSpec(), values=(0.5, -1.5)),
    ),
    optimizer=OptimizerSpec(name="adam", params={"beta1": 0.8}),
    seed=11,
    values_digest=2**63,
)
PUSH_ID = PushId(
    worker=1,
    incarnation=2**63 + 5,
    sequence=17,
    step=40,
    examples=64,
    batches=2,
    pulled=38,
    position="file-3:1000",
    weight=63.5,
    partitions={"clicks/0": "12", "clicks/1": ""},
)
ACKNOWLEDGED = Acknowledged(pushes=16, steps=39)
PROGRESS = WorkerProgress(
    incarnation=2**63 + 5,
    sequence=17,
    step=40,
    position="file-3:1000",
    partitions={"clicks/0": "12"},
    sent=1,
    sent_partitions={"clicks/0": "13"},
)
SHARD_MAP = ShardMap(4, (0, 2), (0, 2) * 512, ("ps-0:7164", "ps-2:7164"))
CUT = Cut(step=40, seen={1: SeenPushes(incarnation=2**63 + 5, pushes=18)}, completed="5f3e")
MOVED = Moved(
    rows=[
        MovedRows(
            table="deep",
            keys=KEYS,
            weights=ROWS,
            state=ROWS[:, :1],
            statistics=np.tile(ROWS, 2),
            removed=KEYS[:1],
        ),
        MovedRows(
            table="deep",
            keys=KEYS[:1],
            weights=ROWS[:1, :0],
            state=ROWS[:1, :0],
            statistics=np.tile(ROWS[:1], 2),
            removed=KEYS[:0],
            are_candidates=True,
        ),
    ],
    blocks=[
        (
            "tower",
            2,
            BlockState(
                weights=PIECE,
                element_state=np.stack([PIECE, PIECE]),
                scalars=PIECE[:1],
                optimizer="adam",
            ),
        )
    ],
    counters=[MovedCounters("deep", 3, np.arange(5, dtype=np.uint8), 16)],
)
PUSH = requests.PushGrad(
    chunk=PushChunk(
        sparse=[
            ("deep", SparseGrad(KEYS, ROWS, 64, np.array([[2, 1], [1, 0], [7, 7]], np.uint32))),
            ("wide", SparseGrad(KEYS[:1], ROWS[:1, :1], 63.5)),
        ],
        dense=[("tower", 2, DenseGrad(PIECE, 64))],
        chunk=1,
        num_chunks=3,
    ),
    push_id=PUSH_ID,
    at=39,
    shard_map_epoch=1,
)
PULL_SPARSE = requests.PullSparse(
    keys={"deep": KEYS, "wide": KEYS[:1]}, missing=Missing.INITIAL, at=40, shard_map_epoch=1
)
PULL_DENSE = requests.PullDense(blocks=["tower", "bias"], at=40, shard_map_epoch=1)
PULLED = Pulled({"deep": ROWS, "wide": ROWS[:1, :1]}, 40)
PIECES = PulledPieces({"tower": PIECE, "bias": PIECE[:1]}, 40)
STATE = StateChunk(
    rows=[("deep", RowStates(keys=KEYS, weights=ROWS, state=ROWS[:, :1], optimizer="adagrad_row"))],
    blocks=[
        (
            "tower",
            2,
            BlockState(
                weights=PIECE,
                element_state=np.stack([PIECE, PIECE]),
                scalars=PIECE[:2],
                optimizer="adam",
            ),
        )
    ],
    chunk=1,
    num_chunks=2,
)
MESSAGE = Message(sender=1, receiver=0, sequence=4, content=b"rows\x00\xff")
NUMBERS = np.array([1.5, -np.inf, 1e300])
SHRUNK = Shrunk(rows=5, size_bytes=4096, left_rows=95, candidates=7)
STATUS = StoreStatus(
    version=40,
    tables={
        "deep": TableStatus(
            rows=100,
            size_bytes=65536,
            candidates=7,
            candidate_bytes=512,
            expired=5,
            evicted=2,
            shards=8,
            smallest_shard=10,
            largest_shard=15,
            index_slots=256,
        )
    },
    examples={0: 64, 1: 2**40},
    left=frozenset({0}),
    staleness=Staleness(counts=(3, 0, 1), total=2, largest=2),
    progress={1: PROGRESS},
    last_save=SaveStatus(pause_s=0.25, duration_s=1.5, is_over=True, number=3),
    duplicates=6,
    lost=frozenset({1}),
    awaited=frozenset({0, 1}),
    batches=80,
    silent_s={1: 2.5},
    lease_s=30.0,
)

SAMPLES: Mapping[str, tuple[Any, Any]] = {
    "Join": (
        requests.Join(
            member=MEMBER,
            terms={"mode": "sync", "train.seed": "3"},
            lease=Lease(seconds=30.5, on_worker_loss=WorkerLoss.WAIT),
            only_asks=True,
            format=1,
        ),
        Joined(jobs_before=2, barriers_passed=7, has_update_log=True, version=40, restart=5),
    ),
    "Renew": (requests.Renew(member=MEMBER, is_last=True, acknowledged=ACKNOWLEDGED), None),
    "CreateTable": (requests.CreateTable(spec=TABLE), None),
    "CreateDense": (requests.CreateDense(spec=BLOCK, values=PIECE), None),
    "PullSparse": (PULL_SPARSE, PULLED),
    "PullSparse, bfloat16": (
        requests.PullSparse(
            keys={"deep": KEYS}, missing=Missing.ZEROS, shard_map_epoch=1, bfloat16=True
        ),
        Pulled({"deep": HALVES}, 40, bfloat16=True),
    ),
    "PullDense": (PULL_DENSE, PIECES),
    "PullChanged": (
        requests.PullChanged(
            tables=["deep"], member=MEMBER, max_rows=100, shard_map_epoch=1, number=9
        ),
        Changed(rows={"deep": (KEYS, ROWS)}, version=40, has_more=True),
    ),
    "PushGrad": (PUSH, 40),
    "PushGrad, bfloat16": (
        requests.PushGrad(
            chunk=PushChunk([("deep", SparseGrad(KEYS, HALVES, 64))], [], bfloat16=True),
            push_id=PUSH_ID,
            shard_map_epoch=1,
        ),
        0,
    ),
    "PushPull": (
        requests.PushPull(push=PUSH, sparse=PULL_SPARSE, dense=PULL_DENSE),
        PushedPulled(39, PULLED, PIECES),
    ),
    "PullState": (
        requests.PullState(
            keys={"deep": KEYS},
            stretches=[Stretch(block="tower", start=2, stop=5)],
            shard_map_epoch=1,
        ),
        STATE,
    ),
    "PushState": (requests.PushState(chunk=STATE, push_id=PUSH_ID, shard_map_epoch=1), 41),
    "Post": (requests.Post(exchange="rows", message=MESSAGE, member=MEMBER), None),
    "Post, the last": (
        requests.Post(
            exchange="rows",
            message=Message(sender=1, receiver=0, sequence=5, content=None),
            member=MEMBER,
        ),
        None,
    ),
    "Take": (requests.Take(exchange="rows", member=MEMBER, received=4), [MESSAGE]),
    "WaitVersion": (requests.WaitVersion(at=40), 41),
    "Barrier": (
        requests.Barrier(name="start", member=MEMBER, step=40, number=3, acknowledged=ACKNOWLEDGED),
        40,
    ),
    "AllReduce": (
        requests.AllReduce(
            name="sum",
            member=MEMBER,
            values=NUMBERS,
            op=ReduceOp.MAX,
            step=40,
            number=4,
            acknowledged=ACKNOWLEDGED,
            remember=True,
        ),
        Reduced(NUMBERS, 40),
    ),
    "Advance": (requests.Advance(member=MEMBER, clock=7, at_least=3, after_barrier=4), 5),
    "Leave": (requests.Leave(member=MEMBER, step=40), None),
    "Abort": (requests.Abort(member=MEMBER, reason="no disk \u2713", comes_again=True), None),
    "CheckFolder": (requests.CheckFolder(folder="s3://models/a", token="t0"), None),
    "Snapshot": (requests.Snapshot(token="t1", base="t0", member=MEMBER), None),
    "Save": (
        requests.Save(
            folder="s3://models/a",
            token="t1",
            inference=InferenceSettings(dtype="float16", min_score=0.5),
            member=MEMBER,
        ),
        '{"entries":[],"version":40}',
    ),
    "Load": (
        requests.Load(url="s3://models/a", token="t1", only=["deep"], member=MEMBER, number=2),
        None,
    ),
    "Resume": (
        requests.Resume(version=40, progress={1: PROGRESS}, batches=80, member=MEMBER),
        None,
    ),
    "Shrink": (
        requests.Shrink(max_norm=0.25, dry_run=True, member=MEMBER, number=6),
        {"deep": SHRUNK},
    ),
    "GetDigest": (None, {("deep", 3): b"\x01" * 16, ("wide", 0): b"\x02" * 16}),
    "GetStatus": (
        None,
        ServerStatus(STATUS, 1, 2, StreamOffer(port=40_000, key=2**64 - 7), format=1),
    ),
    "TakeFile": (
        requests.TakeFile(member=MEMBER, pass_number=2, num_files=9, received=4, waits=True),
        TakenFile(file=7, was_taken=True, is_over=True),
    ),
    "GetMap": (
        None,
        MapState(
            shard_map=SHARD_MAP,
            server=2,
            members="2 to 3 workers",
            move="m2",
            last_move="m1",
            tables=[TABLE],
            blocks=[BLOCK],
            rows=[7] * 1024,
            has_update_log=True,
        ),
    ),
    "BeginMove": (requests.BeginMove(token="m2", shard_map=SHARD_MAP), None),
    "TakeMoved": (
        requests.TakeMoved(token="m2", number=3, server=4, max_bytes=2**23, with_counts=True),
        Taken(moved=MOVED, is_all=True),
    ),
    "PutMoved": (requests.PutMoved(token="m2", number=3, moved=MOVED), None),
    "HoldMove": (requests.HoldMove(token="m2", number=5, phase=Phase.DRAIN, cut=CUT), CUT),
    "GetJobState": (
        requests.GetJobState(token="m2"),
        [LogRecord(kind="state", payload=b"{}")],
    ),
    "PrepareMove": (
        requests.PrepareMove(
            token="m2",
            server=2,
            progress={1: PROGRESS},
            records=[LogRecord(kind="state", payload=b"{}")],
        ),
        None,
    ),
    "EndMove": (requests.EndMove(token="m2", is_committed=True), None),
    "Train": (
        heter.Train(
            member=MEMBER,
            number=3,
            settled=2,
            dense=ROWS,
            labels=PIECE,
            outputs={"embedding": [ROWS, KEYS.astype(np.int64)], "mask": [ROWS > 0]},
        ),
        heter.Trained(loss=0.5, probabilities=PIECE, grads={"embedding": [ROWS]}),
    ),
    "Attend": (
        heter.Attend(member=MEMBER, number=4, name="end", size=2, op=ReduceOp.MIN),
        None,
    ),
}
"""By name of the call, with what the sample is of after a comma."""

ALL_CALLS: Mapping[str, Call[Any, Any]] = {**CALLS, **heter.HETER_CALLS}


def call_of(sample: str) -> Call[Any, Any]:
    """Returns the call of a sample."""
    return ALL_CALLS[sample.partition(",")[0]]
