"""Faults of calls over a real server: what reaches it, and what the caller sees."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import TransportError, UsageError
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.store import PushId
from ctr_ps.protos.wire import calls, requests
from ctr_ps.protos.wire.calls import CALLS
from ctr_ps.ps_worker.cluster.grpc_transport import Deadlines, GrpcTransport
from ctr_ps.ps_worker.extras.chaos import CHAOS, faults_of
from ctr_ps.ps_worker.extras.chaos.channels import Chaos, Fate, Fates, Fault
from tests.support.stores import member

LIMIT_S = 20.0
PUSH = requests.PushGrad(
    chunk=PushChunk([], []),
    push_id=PushId(worker=0, incarnation=1, sequence=0, step=0, examples=1, batches=1, pulled=0),
    shard_map_epoch=FIRST_EPOCH,
)
BARRIER = requests.Barrier(name="end", member=member(), step=0, number=1)


class Server:
    """Answers the n-th call with version n, once `gates[n]` is open, and tells of each that arrives."""

    def __init__(self) -> None:
        self.arrived: SimpleQueue[int] = SimpleQueue()
        self.gates: dict[int, threading.Event] = {}
        self._count = 0
        self._lock = threading.Lock()

    def answer(self, call: calls.Call[Any, Any], context: grpc.ServicerContext) -> Any:
        with self._lock:
            number, self._count = self._count, self._count + 1
        self.arrived.put(number)
        if gate := self.gates.get(number):
            gate.wait(LIMIT_S)
        if call is calls.LEAVE:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
        return call.answer.encode(number)

    def wait(self) -> int:
        return self.arrived.get(timeout=LIMIT_S)


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    service = Server()

    def handler(call: calls.Call[Any, Any]) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda _, context: service.answer(call, context))

    answered = [calls.PUSH_GRAD, calls.BARRIER, calls.LEAVE]
    with ThreadPoolExecutor(4) as pool:
        running = grpc.server(pool)
        handlers = {call.name: handler(call) for call in answered}
        running.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(calls.SERVICE, handlers),)
        )
        port = running.add_insecure_port("127.0.0.1:0")
        running.start()
        yield service, f"127.0.0.1:{port}"
        for gate in service.gates.values():
            gate.set()
        running.stop(None).wait(LIMIT_S)


@pytest.fixture
def transport_with(
    server: tuple[Server, str], tmp_path: Path
) -> Iterator[Callable[..., GrpcTransport]]:
    """Makes transports to the server whose calls have faults: lists as in `CTR_PS_CHAOS`."""
    opened = []

    def make(*faults: list[Any], **limits: float) -> GrpcTransport:
        chaos = {"seed": 1, "journal": str(tmp_path / "journal"), "faults": faults}
        disturb = faults_of({CHAOS: json.dumps(chaos)})
        opened.append(GrpcTransport([server[1]], Deadlines(**limits), retry_s=0.0, disturb=disturb))
        return opened[-1]

    yield make
    for transport in opened:
        transport.close()


def journal(folder: Path) -> list[str]:
    return (folder / "journal").read_text().splitlines()


def test_dropped_call_is_unavailable_and_reaches_the_server_or_not(
    server, transport_with, tmp_path
):
    """Where it does, the server's answer comes before the caller's error."""
    service, _ = server
    transport = transport_with(["drop", "pushes", 1.0])

    for _ in range(20):
        with pytest.raises(
            TransportError, match=r"PushGrad to server .* UNAVAILABLE: chaos: the re"
        ):
            transport.call(0, calls.PUSH_GRAD, PUSH).result()

    lost = journal(tmp_path)
    assert set(lost) == {"request_lost PushGrad 0", "reply_lost PushGrad 0"}
    assert len(lost) == 20
    assert service.arrived.qsize() == lost.count("reply_lost PushGrad 0")


def test_errors_of_a_lost_reply_are_lost_too(server, transport_with, tmp_path):
    transport = transport_with(["drop", "calls", 1.0])

    for _ in range(20):
        with pytest.raises(TransportError, match=r"Leave to server .* UNAVAILABLE: chaos"):
            transport.call(0, calls.LEAVE, requests.Leave(member=member(), step=0)).result()

    assert "reply_lost Leave 0" in journal(tmp_path)


def test_both_copies_of_a_duplicate_reach_the_server_and_the_first_answer_counts(
    server, transport_with, tmp_path
):
    service, _ = server
    service.gates[0] = threading.Event()
    transport = transport_with(["duplicate", "pushes", 1.0])

    version = transport.call(0, calls.PUSH_GRAD, PUSH).result()

    assert version == 1
    assert {service.wait(), service.wait()} == {0, 1}
    assert journal(tmp_path) == ["duplicated PushGrad 0"]


def test_second_copy_arrives_even_if_the_first_is_answered_at_once(server, transport_with):
    service, _ = server
    service.gates[1] = threading.Event()
    transport = transport_with(["duplicate", "pushes", 1.0])

    assert transport.call(0, calls.PUSH_GRAD, PUSH).result() == 0
    assert {service.wait(), service.wait()} == {0, 1}


def test_duplicate_with_a_lost_reply_loses_both_replies(server, transport_with, tmp_path):
    service, _ = server
    transport = transport_with(["duplicate", "pushes", 1.0], ["drop", "pushes", 0.5])
    outcomes = []

    for _ in range(20):
        call = transport.call(0, calls.PUSH_GRAD, PUSH)
        try:
            outcomes.append(call.result())
        except TransportError:
            outcomes.append(None)

    assert None in outcomes
    assert any(outcome is not None for outcome in outcomes)
    lost = sum(line.startswith("request_lost") for line in journal(tmp_path))
    for _ in range(2 * (20 - lost)):
        service.wait()


def test_delay_does_not_block_the_caller_and_keeps_the_order(server, transport_with, tmp_path):
    service, _ = server
    transport = transport_with(["delay", "pushes", 0.3])

    start = time.monotonic()
    pushes = [transport.call(0, calls.PUSH_GRAD, PUSH) for _ in range(3)]
    returned_s = time.monotonic() - start
    assert service.arrived.empty()
    versions = [push.result() for push in pushes]

    assert returned_s < 0.3 <= time.monotonic() - start
    assert sorted(versions) == [0, 1, 2]
    assert journal(tmp_path) == ["delayed PushGrad 0"] * 3


def test_other_calls_are_not_delayed(server, transport_with, tmp_path):
    transport = transport_with(["delay", "pushes", 3600.0])

    push = transport.call(0, calls.PUSH_GRAD, PUSH)
    barrier = transport.call(0, calls.BARRIER, BARRIER)

    assert barrier.result() == 0
    assert not push.wait(0.0)


def test_delay_counts_for_the_deadline(server, transport_with):
    service, _ = server
    transport = transport_with(["delay", "pushes", 3600.0], rpc_s=0.1)

    with pytest.raises(TransportError, match="DEADLINE_EXCEEDED"):
        transport.call(0, calls.PUSH_GRAD, PUSH).result()

    assert service.arrived.empty()


def test_deadline_of_a_delayed_call_is_what_is_left_of_it(server, transport_with):
    service, _ = server
    service.gates[0] = threading.Event()
    transport = transport_with(["delay", "pushes", 1.0], rpc_s=1.1)
    start = time.monotonic()

    with pytest.raises(TransportError, match="DEADLINE_EXCEEDED"):
        transport.call(0, calls.PUSH_GRAD, PUSH).result()

    assert 1.0 < time.monotonic() - start < 1.9


def test_delayed_call_of_a_closed_transport_is_cancelled(server, transport_with):
    transport = transport_with(["delay", "pushes", 0.1])
    call = transport.call(0, calls.PUSH_GRAD, PUSH)
    transport.close()

    with pytest.raises(TransportError, match="CANCELLED"):
        call.result()


def sent(transport: GrpcTransport) -> Any:
    request = calls.PUSH_GRAD.request.encode(PUSH)
    return transport.connection.send(0, "PushGrad", request, LIMIT_S, wait_for_ready=False)


def test_answers_are_told_to_those_who_wait_for_them(server, transport_with):
    transport = transport_with(["delay", "pushes", 0.01], ["duplicate", "pushes", 1.0])
    told: SimpleQueue[Any] = SimpleQueue()

    rpc = sent(transport)
    rpc.add_done_callback(told.put)

    assert told.get(timeout=LIMIT_S) is rpc
    assert rpc.done()
    assert rpc.exception() is None


@pytest.mark.parametrize("faults", [["delay", "pushes", 0.05], ["duplicate", "pushes", 1.0]])
def test_cancelled_call_is_over_at_once(server, transport_with, faults):
    service, _ = server
    service.gates = {0: threading.Event(), 1: threading.Event()}
    transport = transport_with(faults)
    rpc = sent(transport)

    assert rpc.cancel()

    assert rpc.done()
    assert rpc.exception().code() is grpc.StatusCode.CANCELLED


def test_without_the_variable_there_are_no_faults():
    assert faults_of({}) is None


def test_journal_that_cannot_be_written_is_a_usage_error(tmp_path):
    text = json.dumps({"seed": 1, "faults": [], "journal": str(tmp_path / "none/journal")})

    with pytest.raises(UsageError, match=r"cannot write the journal .*none/journal"):
        faults_of({CHAOS: text})


def fates_of(*faults: Fault, seed: str = "7", server: int = 0) -> Fates:
    return Fates(Chaos(seed=seed, faults=faults), server)


def first(fates: Fates, call: str, n: int = 200) -> list[Fate]:
    return [fates.next(call) for _ in range(n)]


HALF = Fault("drop", "pushes", 0.5)


def test_fates_depend_on_seed_server_and_call_alone():
    """Calls of other names in between change nothing."""
    every = [HALF, Fault("duplicate", "calls", 0.3)]
    mixed = fates_of(*every)
    pushes = []
    for _ in range(200):
        mixed.next("PullSparse")
        pushes.append(mixed.next("PushGrad"))

    assert pushes == first(fates_of(*every), "PushGrad")
    assert pushes != first(fates_of(*every, seed="8"), "PushGrad")
    assert pushes != first(fates_of(*every, server=1), "PushGrad")


def test_calls_of_different_names_have_different_fates():
    fates = fates_of(Fault("duplicate", "calls", 0.3))

    assert first(fates, "PushGrad") != first(fates, "PullSparse")


def test_a_share_is_that_of_the_calls_and_replies_are_lost_as_often_as_requests():
    fates = first(fates_of(Fault("drop", "pushes", 0.2)), "PushGrad", 20_000)

    requests = sum(fate.is_request_lost for fate in fates)
    replies = sum(fate.is_reply_lost for fate in fates)
    assert 1850 < requests < 2150
    assert 1850 < replies < 2150
    assert not any(fate.is_request_lost and fate.is_reply_lost for fate in fates)


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        ("pushes", {name for name in CALLS if name.startswith("Push")}),
        ("pulls", {name for name in CALLS if "Pull" in name}),
        ("calls", set(CALLS)),
    ],
)
def test_faults_are_those_of_the_calls_they_name(calls, names):
    fates = fates_of(Fault("drop", calls, 1.0))

    assert {name for name in CALLS if fates.next(name) != Fate()} == names


def test_all_faults_that_are_chosen_happen():
    fates = fates_of(
        Fault("duplicate", "calls", 1.0),
        Fault("delay", "pushes", 0.02),
        Fault("delay", "calls", 0.01),
    )

    assert fates.next("PushGrad") == Fate(is_duplicated=True, delay_s=0.03)
    assert fates.next("PushGrad").faults == ["duplicated", "delayed"]


def test_request_that_is_lost_has_no_other_fault():
    assert Fate(is_request_lost=True, is_duplicated=True, delay_s=1.0).faults == ["request_lost"]


def test_chaos_is_read_from_json():
    text = json.dumps({"seed": 3, "journal": "j", "faults": [["delay", "pulls", 0.5]]})

    assert Chaos.from_json(text) == Chaos(
        seed="3", journal="j", faults=[Fault("delay", "pulls", 0.5)]
    )


@pytest.mark.parametrize(
    "text",
    [
        "drop",
        "[]",
        '{"seed": 1}',
        '{"seed": 1, "faults": [["drop", "pushes"]]}',
        '{"seed": 1, "faults": [["drop", "pushs", 1]]}',
        '{"seed": 1, "faults": [["lose", "pushes", 1]]}',
    ],
)
def test_what_cannot_be_read_is_a_usage_error(text):
    with pytest.raises(UsageError, match="CTR_PS_CHAOS"):
        Chaos.from_json(text)
