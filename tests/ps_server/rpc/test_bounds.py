"""Requests over the bounds of a real server: refused before they cost memory, and without a trace."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import GradientError, OverloadedError, ProtocolError, SpecError
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.limits import (
    MAX_EXCHANGES,
    MAX_MESSAGE_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_TABLES,
    MAX_TOTAL_SHARDS,
)
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Message, Missing, PushId, ReduceOp
from ctr_ps.protos.wire import calls
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.requests import (
    AllReduce,
    Barrier,
    Post,
    PullChanged,
    PullDense,
    PullSparse,
    PushGrad,
    Take,
)
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.spec_checks import MAX_DIM
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from tests.support.cluster import Cluster, cluster
from tests.support.process_figures import resident_bytes
from tests.support.stores import INCARNATION, member

SGD = OptimizerSpec(name="sgd", params={"learning_rate": 0.1})
SMALL = TableSpec(name="small", dim=2, initializer=InitializerSpec(scale=0.1), optimizer=SGD)
WIDE = TableSpec(
    name="wide", dim=MAX_DIM, initializer=InitializerSpec(), optimizer=SGD, records_changes=True
)
BLOCKS = [
    DenseSpec(
        name=f"block-{number}",
        segments=(DenseSegment(length=2_500_000, initializer=InitializerSpec()),),
        optimizer=SGD,
    )
    for number in range(2)
]
KEYS = np.arange(100_000, dtype=np.uint64)


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with cluster(num_workers=2) as servers:
        client = servers.client()
        for table in (SMALL, WIDE):
            client.create_table(table)
        for block in BLOCKS:
            client.create_dense(block)
        yield servers


@pytest.fixture(scope="module")
def transport(server: Cluster) -> Iterator[GrpcTransport]:
    transport = GrpcTransport(server.endpoints)
    yield transport
    transport.close()


def push_of(keys: np.ndarray, *more: tuple[str, SparseGrad]) -> PushGrad:
    values = np.ones((keys.size, SMALL.dim), np.float32)
    return PushGrad(
        chunk=PushChunk([("small", SparseGrad(keys, values, 1)), *more], []),
        push_id=PushId(
            worker=0, incarnation=INCARNATION, sequence=0, step=0, examples=1, batches=1, pulled=0
        ),
        shard_map_epoch=FIRST_EPOCH,
    )


def pull_of(**keys: np.ndarray) -> PullSparse:
    return PullSparse(keys=keys, missing=Missing.INITIAL, shard_map_epoch=FIRST_EPOCH)


def message(sequence: int = 0, content: bytes = b"rows") -> Message:
    return Message(sender=0, receiver=1, sequence=sequence, content=content)


LONG = "x" * (MAX_NAME_CHARACTERS + 1)
TWICE = np.append(KEYS[:100], KEYS[7])

REFUSED: dict[str, tuple[Call[Any, Any], Any, type[Exception], str]] = {
    "push-of-a-key-twice": (
        calls.PUSH_GRAD,
        push_of(TWICE),
        GradientError,
        "push to table 'small' has key 7 more than once",
    ),
    "push-of-a-key-in-two-columns": (
        calls.PUSH_GRAD,
        push_of(KEYS[:9], ("small", SparseGrad(KEYS[8:9], np.ones((1, 2), np.float32), 1))),
        GradientError,
        "push to table 'small' has key 8 more than once",
    ),
    "pull-of-1.6-GB": (
        calls.PULL_SPARSE,
        pull_of(small=KEYS[:3], wide=KEYS),
        ProtocolError,
        r"the answer to .*\['small', 'wide'\] would have 1638400024 bytes, more than the limit of 16711680",
    ),
    "pull-of-two-large-blocks": (
        calls.PULL_DENSE,
        PullDense(blocks=[block.name for block in BLOCKS], shard_map_epoch=FIRST_EPOCH),
        ProtocolError,
        "the answer to .*blocks .* would have 20000000 bytes",
    ),
    "changed-rows-without-end": (
        calls.PULL_CHANGED,
        PullChanged(
            tables=["wide"],
            member=member(),
            max_rows=2**40,
            shard_map_epoch=FIRST_EPOCH,
            number=1,
        ),
        ProtocolError,
        "the answer to 1099511627776 changed rows would have",
    ),
    "barrier-of-a-long-name": (
        calls.BARRIER,
        Barrier(name=LONG, member=member(), step=0, number=1),
        ProtocolError,
        "barrier 'x{100}'... has 101 characters, expected up to 100",
    ),
    "all-reduce-of-a-long-name": (
        calls.ALL_REDUCE,
        AllReduce(name=LONG, member=member(), values=np.ones(1), op=ReduceOp.SUM, step=0, number=1),
        ProtocolError,
        "barrier 'x{100}'... has 101 characters, expected up to 100",
    ),
    "post-in-an-exchange-of-a-long-name": (
        calls.POST,
        Post(exchange=LONG, message=message(), member=member()),
        ProtocolError,
        "exchange 'x{100}'... has 101 characters, expected up to 100",
    ),
    "take-from-an-exchange-of-a-long-name": (
        calls.TAKE,
        Take(exchange=LONG, member=member(1), received=0),
        ProtocolError,
        "exchange 'x{100}'... has 101 characters, expected up to 100",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_request_over_the_bounds_leaves_no_trace(
    server: Cluster, transport: GrpcTransport, fault: str
) -> None:
    call, argument, error, text = REFUSED[fault]
    client = server.client(joins=False)
    for table in (SMALL, WIDE):
        client.create_table(table)
    before = client.digest(), client.status()
    with pytest.raises(error, match=text):
        transport.call(0, call, argument).result()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what there is
    resident = resident_bytes()

    for _ in range(20):
        with pytest.raises(error, match=text):
            transport.call(0, call, argument).result()

    assert (client.digest(), client.status()) == before
    assert resident_bytes(peak=True) < 1.1 * resident


def test_messages_in_exchanges_that_nobody_takes_from_are_refused(server: Cluster) -> None:
    transport = GrpcTransport(server.endpoints, stream=False)  # for calls in their order
    posts = [
        Post(exchange=f"exchange-{number}", message=message(), member=member())
        for number in range(20)
    ]
    for post in posts[:MAX_EXCHANGES]:
        transport.call(0, calls.POST, post).result()

    for post in posts[MAX_EXCHANGES:]:
        with pytest.raises(ProtocolError, match="has taken nothing from 4 earlier ones"):
            transport.call(0, calls.POST, post).result()

    take = Take(exchange=posts[-1].exchange, member=member(1), received=0)
    coming = transport.call(0, calls.TAKE, take)
    transport.call(0, calls.POST, posts[-1]).result()
    assert coming.result() == [message()]
    transport.close()


def test_answers_that_fit_a_message_come(transport: GrpcTransport) -> None:
    rows = (MAX_MESSAGE_BYTES - 2**16) // (4 * MAX_DIM)
    pulled = transport.call(0, calls.PULL_SPARSE, pull_of(wide=KEYS[:rows])).result()
    one = PullDense(blocks=[BLOCKS[0].name], shard_map_epoch=FIRST_EPOCH)
    pieces = transport.call(0, calls.PULL_DENSE, one).result().pieces

    assert pulled.rows["wide"].shape == (rows, MAX_DIM)
    assert pieces[BLOCKS[0].name].size == BLOCKS[0].length


def test_digests_and_status_of_the_most_tables_fit_a_message() -> None:
    names = [f"{number:03}".ljust(MAX_NAME_CHARACTERS, "x") for number in range(MAX_TABLES)]
    shards = range(MAX_TOTAL_SHARDS // MAX_TABLES)

    answer = calls.GET_DIGEST.answer.encode(
        {(name, 2**12 + shard): bytes(32) for name in names for shard in shards}
    )

    assert len(answer) < MAX_MESSAGE_BYTES


def test_server_takes_a_bounded_number_of_tables_and_blocks() -> None:
    def table(number: int, num_shards: int) -> TableSpec:
        return TableSpec(
            name=f"t{number}",
            dim=1,
            initializer=InitializerSpec(),
            optimizer=SGD,
            num_shards=num_shards,
        )

    def block(number: int) -> DenseSpec:
        segment = DenseSegment(length=1, initializer=InitializerSpec())
        return DenseSpec(name=f"d{number}", segments=(segment,), optimizer=SGD)

    with cluster() as servers:
        client = servers.client()
        for number in range(MAX_TOTAL_SHARDS // 4096):
            client.create_table(table(number, 4096))
        with pytest.raises(
            SpecError, match="'t999' would make 65537 shards of tables, expected up"
        ):
            client.create_table(table(999, 1))
        assert "t999" not in client.status().tables

    with cluster() as servers:
        client = servers.client()
        for number in range(MAX_TABLES):
            client.create_table(table(number, 1))
            client.create_dense(block(number))
        client.create_table(table(0, 1))
        with pytest.raises(SpecError, match="'t999' would make 257 tables, expected up to 256"):
            client.create_table(table(999, 1))
        with pytest.raises(SpecError, match="'d999' would make 257 dense blocks, expected up"):
            client.create_dense(block(999))
        assert len(client.status().tables) == MAX_TABLES


def test_client_of_a_server_over_its_memory_limit_hears_why() -> None:
    store = ParameterStore(memory_limit=40_000)
    with cluster(num_servers=0) as servers:
        servers.start_server(store)
        client = servers.client()
        client.create_table(SMALL)
        transport = GrpcTransport(servers.endpoints)
        transport.call(0, calls.PUSH_GRAD, push_of(KEYS[:1_000])).result()
        before = client.digest(), client.status()

        with pytest.raises(
            OverloadedError, match=r"server 0 refuses a new row, .*: tables have \d+ bytes"
        ) as refused:
            transport.call(0, calls.PUSH_GRAD, push_of(KEYS[:1_001])).result()

        assert refused.value.retry_after_s is None
        assert refused.value.__cause__.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (client.digest(), client.status()) == before
        transport.call(0, calls.PUSH_GRAD, push_of(KEYS[:1_000])).result()
        transport.close()
