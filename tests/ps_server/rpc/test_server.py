"""The life of a server, on an event loop of the test."""

import asyncio
import errno
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import (
    AbortedError,
    BindError,
    CheckpointError,
    CtrPsError,
    DataError,
    GradientError,
    IdleError,
    LogError,
    NoMemoryError,
    ProtocolError,
    RecoveringError,
    TransportError,
    WaitTimeoutError,
)
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.store import Lease, Member, WorkerLoss
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import Call
from ctr_ps.protos.wire.grpc_status import error_of
from ctr_ps.ps_server.coordination.coordinator import Coordinator
from ctr_ps.ps_server.durability.saved_log import read_log
from ctr_ps.ps_server.rpc import server as server_module
from ctr_ps.ps_server.rpc.health import SERVICE, why_not_serving
from ctr_ps.ps_server.rpc.recovery import Progress
from ctr_ps.ps_server.rpc.server import ALL_LEFT, Server
from ctr_ps.ps_server.settings import ServerSettings
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.extras.watching.top import Servers
from tests.support.processes import free_port
from tests.support.stores import DEEP, NEWEST, joined, member, push_id, trained_chain

FREE = "127.0.0.1:0"


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**{"idle_limit_s": 0, **changes})


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 20))


def ask(channel: grpc.aio.Channel, call: Call, argument: Any) -> Any:
    method = channel.unary_unary(
        f"/{calls.SERVICE}/{call.name}",
        response_deserializer=call.answer.message.FromString,
    )
    return method(call.request.encode(argument), timeout=10)


async def serve(
    store: ParameterStore,
    settings: ServerSettings,
    on_start: Callable[[int], None] = lambda _: None,
) -> str:
    return await Server(store.engine, settings, address=FREE).run(on_start)


@asynccontextmanager
async def served(
    store: ParameterStore, **changes: Any
) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    """A server that serves a store, and a channel to it; it is stopped after the block."""
    server = Server(store.engine, settings(**changes), address=FREE)
    port = await server.start()
    await server.recover()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield server, channel
    await server.stop()


def leave(channel: grpc.aio.Channel, worker: int) -> Any:
    return ask(channel, calls.LEAVE, requests.Leave(member=member(worker), step=0))


async def test_server_ends_when_all_workers_are_done_and_answers_the_last():
    started = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(joined(ParameterStore(num_workers=2)), settings(), started.set_result)
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await started}") as channel:
        await leave(channel, 0)
        assert not serving.done()
        await leave(channel, 1)
        assert await serving == ALL_LEFT


async def test_server_that_stays_is_ready_for_the_next_job():
    store = ParameterStore(num_workers=1)
    async with served(store, stay=True) as (server, channel):
        for _ in range(2):
            joined(store)
            await leave(channel, 0)
            assert store.status().left == frozenset()
        server.end("told to")
        assert await server.wait() == "told to"


@pytest.mark.parametrize("stays", [False, True])
async def test_server_whose_job_was_aborted_says_why_and_ends_unless_it_stays(stays: bool, caplog):
    store = joined(ParameterStore(num_workers=2))
    async with served(store, stay=stays, linger_s=0.1) as (server, channel):
        await ask(channel, calls.ABORT, requests.Abort(member=member(1), reason="the disk is gone"))
        with pytest.raises(grpc.aio.AioRpcError, match=r"worker 1 aborted .*the disk is gone"):
            await ask(
                channel,
                calls.BARRIER,
                requests.Barrier(name="b", member=member(0), step=0, number=1),
            )
        with pytest.raises(grpc.aio.AioRpcError, match=r"Restart the servers"):
            await ask(channel, calls.JOIN, requests.Join(member=Member(0, 9), terms={}))
        if stays:
            server.end("told to")
            assert await server.wait() == "told to"
        else:
            with pytest.raises(AbortedError, match="the disk is gone"):
                await server.wait()
    assert ("restart this server before the next job" in caplog.text) == stays


def test_server_without_a_call_since_its_job_failed_says_why_it_failed():
    store = joined(ParameterStore())

    def fail(*_: object) -> None:
        store.abort(0, "the disk is gone")

    with pytest.raises(AbortedError, match="the disk is gone"):
        run(serve(store, settings(idle_limit_s=0.05, linger_s=1e3), fail))


async def test_calls_put_the_idle_limit_off():
    """By the server's clock an hour passes with each call, and none after the last."""
    now = [0.0]

    server = Server(
        joined(ParameterStore()).engine,
        settings(idle_limit_s=1e4),
        address=FREE,
        clock=lambda: now[0],
    )
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for _ in range(5):
            now[0] += 3600
            await ask(channel, calls.GET_STATUS, None)
    waiting = asyncio.create_task(server.wait())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    now[0] += 1e4
    with pytest.raises(IdleError):
        await server.wait()
    waiting.cancel()
    await server.stop()


async def test_health_checks_are_no_sign_of_life():
    async with served(joined(ParameterStore()), idle_limit_s=0.2) as (server, channel):
        waiting = asyncio.create_task(server.wait())
        while not waiting.done():
            request = health_pb2.HealthCheckRequest()
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
        with pytest.raises(IdleError):
            await waiting


async def test_port_is_free_again_after_the_stop():
    first = Server(joined(ParameterStore()).engine, settings(), address=FREE)
    port = await first.start()
    await first.stop()
    second = Server(joined(ParameterStore()).engine, settings(), address=f"127.0.0.1:{port}")
    assert await second.start() == port
    await second.stop()


@contextmanager
def asking_in_a_thread():
    """The probe blocks, as it does in the process that asks."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda endpoint: asyncio.wrap_future(pool.submit(why_not_serving, endpoint, 5.0))


async def test_health_says_whether_it_serves():
    server = Server(joined(ParameterStore()).engine, settings(), address=FREE)
    endpoint = f"127.0.0.1:{await server.start()}"
    with asking_in_a_thread() as ask:
        assert await ask(endpoint) == ""
        async with grpc.aio.insecure_channel(endpoint) as channel:
            for service in ("", SERVICE):
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=service), timeout=10
                )
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.stop()
        assert "UNAVAILABLE" in await ask(endpoint)


class HeldRecovery:
    """A recovery in which a step is taken when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.progress: Queue[Progress] = Queue()
        self.steps: Queue[bool] = Queue()
        recover = server_module.recover

        def held(*arguments: Any, progress: Progress, **named: Any) -> Any:
            self.progress.put(progress)
            while not self.steps.get(timeout=10):
                progress.step()
            return recover(*arguments, progress=progress, **named)

        monkeypatch.setattr(server_module, "recover", held)


async def logging_server(folder: Path) -> tuple[Server, str]:
    """Returns a server with an update log that is bound, and its endpoint."""
    store = ParameterStore(num_workers=1, has_update_log=True)
    server = Server(store.engine, settings(update_log=str(folder)), address=FREE)
    return server, f"127.0.0.1:{await server.start()}"


async def make_log(folder: Path) -> None:
    server, endpoint = await logging_server(folder)
    await server.recover()
    async with grpc.aio.insecure_channel(endpoint) as channel:
        await ask(channel, calls.JOIN, requests.Join(member=member(), terms={}))
    await server.stop()


async def test_server_that_recovers_is_there_and_says_how_far_it_is(monkeypatch, tmp_path):
    """Its port is bound first: whoever calls knows that it has to wait, and for what."""

    await make_log(tmp_path)
    held = HeldRecovery(monkeypatch)
    server, endpoint = await logging_server(tmp_path)
    recovery = asyncio.create_task(server.recover())
    progress = await asyncio.to_thread(held.progress.get, timeout=10)
    progress.text, progress._done = "recovering: 40 % of its update log", 17

    async with grpc.aio.insecure_channel(endpoint) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=10
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="recovering: 40 %") as refused:
            await ask(channel, calls.JOIN, requests.Join(member=member(), terms={}))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        error = error_of(refused.value, endpoint, "Join")
        assert isinstance(error, RecoveringError)
        assert error.progress == 17
        with asking_in_a_thread() as check:
            assert "NOT_SERVING: recovering: 40 % of" in await check(endpoint)
            with Servers([endpoint]) as servers:
                (seen,) = await asyncio.to_thread(servers.look, 10.0)
            assert "recovering: 40 %" in str(seen)

            held.steps.put(True)
            assert await recovery
            assert await check(endpoint) == ""
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        assert server.replayed is not None
        assert server.replayed.calls == 1
    await server.stop()


async def test_recovery_for_longer_than_the_budget_of_a_call_ends_no_worker(monkeypatch, tmp_path):
    await make_log(tmp_path)
    held = HeldRecovery(monkeypatch)
    server, endpoint = await logging_server(tmp_path)
    recovery = asyncio.create_task(server.recover())
    transport = GrpcTransport([endpoint], retry_s=0.6)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(transport.call(0, calls.GET_STATUS, None).result)
        for _ in range(8):
            held.steps.put(False)
            await asyncio.sleep(0.2)
        held.steps.put(True)
        assert await recovery
        assert (await asyncio.wrap_future(answer)).num_servers == 1
        transport.close()
    await server.stop()


async def test_server_that_is_told_to_end_while_it_recovers_ends(monkeypatch, tmp_path):
    await make_log(tmp_path)
    held = HeldRecovery(monkeypatch)
    server, _ = await logging_server(tmp_path)
    recovery = asyncio.create_task(server.recover())
    await asyncio.to_thread(held.progress.get, timeout=10)

    server.end("told to")
    while not recovery.done():
        held.steps.put(False)
        await asyncio.sleep(0.01)

    assert not await recovery
    assert await server.wait() == "told to"
    await server.stop()
    assert read_log(tmp_path).segments == (1,), "it is there, and not locked"


async def test_long_replay_is_warned_of_before_it_is_needed(monkeypatch, tmp_path, caplog):
    """Once, and again when it has doubled; what a recovery took counts."""
    monkeypatch.setattr(server_module, "LONG_REPLAY_S", 60.0)

    await make_log(tmp_path)
    server, _ = await logging_server(tmp_path)
    await server.recover()
    log = server._log
    assert log.replay_s == server.replayed.replay_s
    for log.replay_s in (59.0, 61.0, 100.0, 122.0, 130.0):
        server._warn_of_replay()
    await server.stop()
    assert re.findall(r"its update log for about (\d+) s", caplog.text) == ["61", "122"]


async def test_server_that_was_drained_leaves_that_in_place_of_its_log(monkeypatch, tmp_path):
    """Who starts servers again knows by that which of them is needed no more."""
    monkeypatch.setattr(server_module, "DRAINED_S", 0.0)
    server, _ = await logging_server(tmp_path)
    await server.recover()
    server._handlers.moves.on_drained()
    assert await server.wait() == server_module.DRAINED
    await server.stop()
    assert {path.name for path in tmp_path.iterdir()} == {"LOCK", "DRAINED"}


async def test_update_log_that_is_in_use_is_named_before_the_port(tmp_path):
    server, endpoint = await logging_server(tmp_path)
    await server.recover()
    store = ParameterStore(num_workers=1, has_update_log=True)
    second = Server(store.engine, settings(update_log=str(tmp_path)), address=endpoint)
    with pytest.raises(LogError, match="in use by process"):
        await second.start()
    await server.stop()


async def test_server_whose_stream_cannot_be_bound_leaves_nothing_open(tmp_path):
    with free_port() as port, free_port() as metrics:
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        asked = settings(
            stream_port=taken.getsockname()[1],
            metrics=f"127.0.0.1:{metrics}",
            update_log=str(tmp_path),
        )
        store = ParameterStore(num_workers=1, has_update_log=True)
        server = Server(store.engine, asked, address=f"127.0.0.1:{port}")
        with pytest.raises(BindError, match="for the stream: Address already in use"):
            await server.start()
    for each in (port, metrics):
        socket.create_server(("127.0.0.1", each)).close()
    read_log(str(tmp_path)).close()  # else: in use by this process


async def test_call_in_flight_is_answered_when_a_server_stops():
    store = joined(ParameterStore(num_workers=2))
    server = Server(store.engine, settings(grace_s=10.0), address=FREE)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        arrived = asyncio.Event()
        rendezvous = store.engine.job.rendezvous
        arrive = rendezvous.barrier

        def barrier(*arguments: Any, **named: Any) -> Any:
            arrived.set()
            return arrive(*arguments, **named)

        rendezvous.barrier = barrier
        request = requests.Barrier(name="end", member=member(0), step=0, number=1)
        waiting = asyncio.create_task(call_of(ask(channel, calls.BARRIER, request)))
        await arrived.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.wait([stopping], timeout=0.1)
        assert not stopping.done()
        store.leave(1, step=0)
        assert (await waiting).version == 0
        await stopping


async def call_of(call: Any) -> Any:
    return await call


def test_watches_of_health_are_told_of_the_end_and_put_it_off_by_nothing():
    async def body() -> None:
        server = Server(joined(ParameterStore()).engine, settings(grace_s=60.0), address=FREE)
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=SERVICE)
            gone, *watches = [stub.Watch(request, timeout=10) for _ in range(3)]
            for watch in (gone, *watches):
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            gone.cancel()
            # Before the end: gRPC drops a message that was not asked for when an error follows it. The
            # connection has taken the reads when it has taken a call after them.
            last = [asyncio.create_task(watch.read()) for watch in watches]
            await stub.Check(request, timeout=10)
            await server.stop()
            for message in await asyncio.gather(*last):
                assert message.status == health_pb2.HealthCheckResponse.NOT_SERVING
            for watch in watches:
                assert await watch.code() == grpc.StatusCode.UNAVAILABLE

    run(body())


def test_recovered_server_loses_no_worker_before_it_can_be_reached_again(monkeypatch, tmp_path):
    """A lease may be shorter than the time in which a worker looks for a server that was away."""
    monkeypatch.setattr("ctr_ps.ps_server.rpc.server.REACHED_AGAIN_S", 1.0)
    lease = Lease(seconds=0.02, on_worker_loss=WorkerLoss.FAIL)
    joins = requests.Join(member=member(0), terms={}, lease=lease)

    async def life(*, until_joined: bool) -> float:
        """Returns for how long the server was up until its worker was lost, in seconds."""
        store = ParameterStore(num_workers=1, has_update_log=True)
        server = Server(
            store.engine, settings(update_log=str(tmp_path), linger_s=0.0), address=FREE
        )
        port, start = await server.start(), time.monotonic()
        await server.recover()
        if until_joined:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await ask(channel, calls.JOIN, joins)
        else:
            with pytest.raises(AbortedError, match="no call from workers"):
                await server.wait()
        seconds = time.monotonic() - start
        await server.stop()
        return seconds

    monkeypatch.setattr("ctr_ps.ps_server.rpc.server.TICK_S", 60.0)
    run(life(until_joined=True))
    monkeypatch.setattr("ctr_ps.ps_server.rpc.server.TICK_S", 0.01)

    assert run(life(until_joined=False)) >= 1.0


def test_restarted_server_does_not_load_again(tmp_path):
    """Its log has the training since; and the folder may have a newer checkpoint as its latest by then."""
    newer = trained_chain(tmp_path / "model", 1)
    latest = tmp_path / "model" / "LATEST"
    latest.write_text("0")

    async def life(*, trains: bool) -> str:
        store = ParameterStore(num_workers=1, has_update_log=True)
        load = str(tmp_path / "model")
        server = Server(
            store.engine, settings(update_log=str(tmp_path / "log"), load=load), address=FREE
        )
        port = await server.start()
        await server.recover()
        if trains:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await ask(channel, calls.JOIN, requests.Join(member=member(), terms={}))
                await ask(channel, calls.SHRINK, requests.Shrink(member=member(), number=1))
        digest = store.digest()
        await server.stop()
        return digest

    trained = run(life(trains=True))
    latest.write_text("1")

    assert run(life(trains=False)) == trained
    assert trained not in (newer.digest(), ParameterStore().digest())


def test_server_that_was_killed_after_it_removed_its_log_serves_no_worker_of_that_job(tmp_path):
    """Its supervisor starts it once more; fresh parameters would pass for those of the job."""
    log = tmp_path / "log"

    async def life(*, is_over: bool) -> None:
        store = ParameterStore(num_workers=2, has_update_log=True)
        barrier = requests.Barrier(name="b", member=member(), step=0, number=1)
        async with served(store, update_log=str(log)) as (server, channel):
            if not is_over:
                await ask(channel, calls.JOIN, requests.Join(member=member(), terms={}))
                server._is_job_over = True
            else:
                for call, argument in [
                    (calls.BARRIER, barrier),
                    (calls.LEAVE, requests.Leave(member=member(), step=0)),
                ]:
                    with pytest.raises(
                        grpc.aio.AioRpcError, match="worker 0 has not joined this job"
                    ):
                        await ask(channel, call, argument)

    run(life(is_over=False))
    assert not list(log.glob("segment-*"))
    run(life(is_over=True))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 1. GiB"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("can't start new thread"),
    ],
)
@pytest.mark.parametrize("has_log", [True, False])
async def test_server_without_memory_ends_as_such_and_keeps_its_log(
    has_log: bool, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a log it is away to callers: one that is started again carries the call out."""

    def fail(*_: object, **__: object) -> None:
        raise error

    store = ParameterStore(num_workers=1, has_update_log=has_log)
    log = str(tmp_path) if has_log else None
    async with served(store, update_log=log) as (server, channel):
        await ask(channel, calls.JOIN, requests.Join(member=member(), terms={}))
        monkeypatch.setattr(store.engine.parameters, "create_table", fail)
        declared = requests.CreateTable(spec=DEEP)
        for call, argument in ((calls.CREATE_TABLE, declared), (calls.GET_STATUS, None)):
            with pytest.raises(grpc.aio.AioRpcError, match="out of memory") as refused:
                await ask(channel, call, argument)
            told = error_of(refused.value, "server", call.name)
            expected = TransportError if has_log else NoMemoryError
            assert type(told) is expected
            assert (refused.value.code() is grpc.StatusCode.UNAVAILABLE) == has_log
        with pytest.raises(NoMemoryError, match=r"out of memory \(.*MiB of memory"):
            await server.wait()
    monkeypatch.undo()
    assert bool(list(tmp_path.glob("segment-*"))) == has_log


async def test_step_that_lacks_memory_ends_the_server_at_once_and_keeps_its_log(
    monkeypatch, tmp_path
):
    """The others need not hear of it: the server that is started again applies the step."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 1. GiB")

    step = requests.PushGrad(
        chunk=PushChunk([], []),
        push_id=push_id(pulled=NEWEST),
        shard_map_epoch=FIRST_EPOCH,
        at=0,
    )

    store = ParameterStore(num_workers=1, has_update_log=True)
    async with served(store, update_log=str(tmp_path), stay=True, linger_s=600) as (
        server,
        channel,
    ):
        await ask(channel, calls.JOIN, requests.Join(member=member(), terms={}))
        monkeypatch.setattr(store.engine.parameters, "apply", fail)
        monkeypatch.setattr(
            store.engine.applier, "_inline_values", -1
        )  # as a large step, in a thread
        with pytest.raises(grpc.aio.AioRpcError, match="out of memory"):
            await ask(channel, calls.PUSH_GRAD, step)
        with pytest.raises(NoMemoryError, match="step 0 could not be applied: out of memory"):
            await server.wait()
    assert list(tmp_path.glob("segment-*"))


async def test_recovery_without_memory_ends_as_such(monkeypatch, tmp_path):
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 1. GiB")

    await make_log(tmp_path)
    monkeypatch.setattr(Coordinator, "join", fail)
    server, _ = await logging_server(tmp_path)
    with pytest.raises(NoMemoryError, match="Unable to allocate"):
        await server.recover()
    await server.stop()
    assert list(tmp_path.glob("segment-*"))


async def test_recovery_that_fails_says_what_caused_it(monkeypatch, tmp_path):
    cause = OSError("the disk is away")

    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("it cannot be read") from cause

    await make_log(tmp_path)
    monkeypatch.setattr("ctr_ps.ps_server.rpc.server.recover", fail)
    server, _ = await logging_server(tmp_path)
    with pytest.raises(CheckpointError, match="it cannot be read") as raised:
        await server.recover()
    await server.stop()
    assert raised.value.__cause__ is cause


def test_log_of_a_job_that_failed_is_no_obstacle_to_the_next(monkeypatch, tmp_path):
    """A server that dies before it removes the log says once more why the job has failed, and removes it."""
    lease = Lease(seconds=0.02, on_worker_loss=WorkerLoss.FAIL)
    joins = requests.Join(member=member(0), terms={}, lease=lease)
    monkeypatch.setattr("ctr_ps.ps_server.rpc.server.TICK_S", 0.01)

    def begun() -> Server:
        store = ParameterStore(num_workers=1, has_update_log=True)
        return Server(store.engine, settings(update_log=str(tmp_path)), address=FREE)

    async def life_that_dies_as_its_job_fails() -> None:
        failed = asyncio.Event()
        with monkeypatch.context() as patched:
            patched.setattr(Server, "_hear_of_failure", lambda *_: failed.set())
            server = begun()
            port = await server.start()
            await server.recover()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await ask(channel, calls.JOIN, joins)
        await failed.wait()
        await server.stop()

    async def life_after_it() -> None:
        server = begun()
        await server.start()
        with pytest.raises(AbortedError, match="no call from workers"):
            await server.recover()
        await server.stop()

    async def life_for_the_next_job() -> None:
        server = begun()
        await server.start()
        assert await server.recover()
        await server.stop()

    run(life_that_dies_as_its_job_fails())
    run(life_after_it())
    run(life_for_the_next_job())


@pytest.mark.parametrize(
    ("rule", "error", "is_kept"),
    [
        (WorkerLoss.WAIT, TransportError, True),
        (WorkerLoss.WAIT, WaitTimeoutError, True),
        (WorkerLoss.WAIT, CheckpointError, True),
        (WorkerLoss.WAIT, LogError, True),
        (WorkerLoss.WAIT, DataError, False),
        (WorkerLoss.WAIT, GradientError, False),
        (WorkerLoss.WAIT, ProtocolError, False),
        (WorkerLoss.FAIL, TransportError, False),
        (WorkerLoss.CONTINUE, TransportError, False),
    ],
)
async def test_log_of_an_aborted_job_is_kept_if_processes_that_are_started_again_can_go_on(
    rule: WorkerLoss,
    error: type[CtrPsError],
    is_kept: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They need a place, and an error that does not come again; a server that is gone may come back."""
    lease = Lease(seconds=60.0, on_worker_loss=rule)
    log = tmp_path / "log"

    store = ParameterStore(num_workers=1, has_update_log=True)
    async with served(store, update_log=str(log), stay=True) as (server, channel):
        await ask(channel, calls.JOIN, requests.Join(member=member(), terms={}, lease=lease))
        abort = requests.Abort(
            member=member(), reason="it is enough", comes_again=error.comes_again
        )
        await ask(channel, calls.ABORT, abort)
        assert bool(list(log.glob("segment-*"))) == is_kept
        assert ("start all servers and workers again" in store.engine.job.failure) == is_kept

        await leave(channel, 0)  # it is not in the log

    again = ParameterStore(num_workers=1, has_update_log=True)
    server = Server(again.engine, settings(update_log=str(log)), address=FREE)
    await server.start()
    await server.recover()
    assert again.status().left == frozenset()
    assert list(again.status().silent_s) == [0] * is_kept
    await server.stop()
    assert (f"update log kept for a restart folder={log}" in caplog.text) == is_kept


async def test_server_ends_when_the_last_worker_is_lost_and_the_others_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ctr_ps.ps_server.rpc.server.TICK_S", 0.01)
    lease = Lease(seconds=1.0, on_worker_loss=WorkerLoss.CONTINUE)

    async with served(ParameterStore(num_workers=2)) as (server, channel):
        for worker in range(2):
            joins = requests.Join(member=member(worker), terms={}, lease=lease)
            await ask(channel, calls.JOIN, joins)
        await leave(channel, 0)
        assert await server.wait() == ALL_LEFT
