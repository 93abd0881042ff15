"""The network between simulated processes: gRPC's channels and servers without gRPC.

    client --request, after a delay--> server's loop --> the service's method --reply, after a delay--> client
             `--lost, doubled, late, or the link is cut--'

A call is as one of gRPC: it ends once, with an answer, the server's status, UNAVAILABLE or its deadline. What
goes wrong is told by `faults`: of the n-th call of a kind from one process to another, so that a list of
faults can be cut down and still means the same.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import grpc

from ctr_ps.protos.wire.calls import JOIN, LEAVE, PUSH_GRAD, RENEW
from ctr_ps.protos.wire.grpc_status import METADATA_KEY
from ctr_ps.protos.wire.requests import Join
from ctr_ps.protos.wire.stream import FailedCallError, Failure
from tests.simulation.world import Loop, Process, Thread, World, world

UNAVAILABLE, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED
REFUSED = grpc.StatusCode.FAILED_PRECONDITION

DELAY_S = (2e-4, 2e-3)  # of a message
NOTICED_S = (0.5, 8.0)  # until a process hears that a link is cut, or a machine gone
RECONNECT_S = 0.2  # between looks of a call that waits for its server


LOST_REQUEST, LOST_REPLY, DOUBLED = "request lost", "reply lost", "doubled"
LATE_REQUEST, LATE_REPLY = "late request", "late reply"
SERVER_DIES_BEFORE, SERVER_DIES_AFTER = "server dies before", "server dies after"
SERVER_DIES_DURING = "server dies during"
CLIENT_DIES_BEFORE, CLIENT_DIES_AFTER = "client dies before", "client dies after"
CLIENT_REPLACED = "client pauses and is replaced"
CLIENT_REPLACED_AFTER = "client pauses after the answer and is replaced"
SLOW, DOUBLED_THEN_DIES = "slow", "doubled, and its server dies after the second"
CUTS = "cuts the link"
# of the process that the fault names
DIES_BEFORE, DIES_AFTER, DIES_UNANSWERED = (
    "dies before",
    "dies after",
    "dies after, without answer,",
)
OF_MESSAGES = (LOST_REQUEST, LOST_REPLY, DOUBLED, LATE_REQUEST, LATE_REPLY)
OF_SERVERS = (SERVER_DIES_BEFORE, SERVER_DIES_DURING, SERVER_DIES_AFTER)
CALL_FAULTS = (
    *(*OF_MESSAGES, *OF_SERVERS, CLIENT_DIES_BEFORE, CLIENT_DIES_AFTER, CLIENT_REPLACED),
    *(CLIENT_REPLACED_AFTER, SLOW, DOUBLED_THEN_DIES, CUTS),
)
HAVE_SECONDS = (
    *(DOUBLED, LATE_REQUEST, LATE_REPLY, CLIENT_DIES_BEFORE, CLIENT_REPLACED),
    *(CLIENT_REPLACED_AFTER, SLOW, DOUBLED_THEN_DIES, CUTS),
)
DURING_S = 0.04
REFUSED_ENDS_S = 12.0  # a process that one server refuses at the start does not wait for others
OF_MOVES = ("WrongServerError", "MovingError")
OF_MEMBERS = {"PushPull", "PushGrad", "AllReduce", "Barrier", "Renew"}  # of who has the place


@dataclass(frozen=True, slots=True)
class CallFault:
    """What happens to the n-th call (from 0) of a name from one process to another."""

    kind: str  # one of the constants above
    client: str
    server: str
    call: str
    number: int
    seconds: float = 0.0  # by which the message, or its second copy, is late; of the pause
    loses_power: bool = False  # with the server
    victim: str = ""

    def __str__(self) -> str:
        late = f" by {self.seconds:.2f} s" if self.seconds else ""
        power = " without power" if self.loses_power else ""
        who = f"{self.victim} " if self.victim else ""
        call = f"{self.call} {self.number}, {self.client} to {self.server}"
        return f"{who}{self.kind}{late}{power}: {call}"


class Network:
    """Who listens where, which links are cut, and the calls on their way."""

    def __init__(self, home: World, faults: list[CallFault], lease_s: float) -> None:
        self._world, self.lease_s = home, lease_s
        self._faults = {(f.client, f.server, f.call, f.number): f for f in faults}
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._listening: dict[str, Server] = {}
        self._cut: Counter[frozenset[str]] = Counter()
        self.num_calls = 0
        self.kill: Callable[[Process, bool], None] = lambda _, __: None
        self.replace: Callable[[Process, float], None] = lambda _, __: None
        self.happened: list[CallFault] = []
        self.wrong: list[str] = []
        self.on_call: Callable[[str, str, str, int], None] = lambda *_: None
        self.on_answer: Callable[[Process], None] = lambda _: None
        # number of the start of the process that answers, and that has its place, by name
        self._newest: dict[str, int] = {}
        self._holders: dict[str, int] = {}
        # when which start of a client was last heard of, by the names of server and client
        self._heard: dict[tuple[str, str], dict[int, float]] = {}
        self.push_answered: dict[Process, float] = {}  # when the last answer to a push came
        self._left: set[tuple[str, Process]] = (
            set()
        )  # by server, clients that gave back their place
        self._refused_at: dict[Process, tuple[float, int]] = {}  # and the epoch of the call
        # pushes by server: those of processes without their place, and those that were carried out
        self._refused: set[tuple[str, Any]] = set()
        self._carried_out: set[tuple[str, Any]] = set()

    def listen(self, server: "Server", address: str) -> None:
        if address in self._listening:
            raise RuntimeError(f"{address} is in use")
        self._listening[address] = server
        server.process.when_killed.append(partial(self._is_gone, server, address))

    def close(self, server: "Server", address: str) -> None:
        if self._listening.get(address) is server:
            del self._listening[address]

    def _is_gone(self, server: "Server", address: str) -> None:
        self.close(server, address)
        for call in list(server.calls):
            self._world.at(
                self.delay(), partial(call.fail, UNAVAILABLE, "the connection was reset")
            )

    def answers(self, server: Process, call: "Call", began: float) -> None:
        """A server answers: one that another start of it has replaced must not.

        Nor may it give a place of which it has heard within a lease.
        """
        self.on_answer(server)
        newest = self._newest.setdefault(server.name, server.number)
        if server.number < newest:
            self.wrong.append(f"{server} answers, but start {newest} of it has answered before")
        self._newest[server.name] = max(newest, server.number)
        client, name = call.client, call.name
        heard = self._heard.setdefault((server.name, client.name), {})
        if name == JOIN.name:
            join = JOIN.request.decode(call.request)
            if join.only_asks:
                return
            if join.shard_map_epoch > self._refused_at.get(client, (0.0, join.shard_map_epoch))[1]:
                del self._refused_at[client]  # of servers before a move, which it asked no more
            if server.name == "server.0":  # of several that come, it has one
                self._holders[client.name] = client.number
            self.wrong += [
                f"{client} has the place of start {number}, heard of {self._world.now - at:.2f} s before"
                for number, at in heard.items()
                if number != client.number and self._world.now - at < self.lease_s * 0.9
            ]
        elif name == LEAVE.name or (name == RENEW.name and _renewal(call.request).is_last):
            self._heard[server.name, client.name] = {}
            self._left.add((server.name, client))
        elif name in OF_MEMBERS and (server.name, client) not in self._left:
            heard[client.number] = began

    def forget(self, server: str) -> None:
        """A server has lost all that it knew."""
        self._heard = {place: at for place, at in self._heard.items() if place[0] != server}
        self.forget_pushes(server)

    def forget_pushes(self, server: str) -> None:
        """A server may have lost the last of them."""
        self._refused = {each for each in self._refused if each[0] != server}
        self._carried_out = {each for each in self._carried_out if each[0] != server}

    def pushed(self, server: Process, push_id: Any, *, is_refused: bool) -> None:
        """A server carries out a push, or refuses it for its process: then it never carries it out."""
        push = server.name, (push_id.worker, push_id.incarnation, push_id.sequence)
        if is_refused and push not in self._carried_out:
            self._refused.add(push)
        elif not is_refused:
            self._carried_out.add(push)
            if push in self._refused:
                self.wrong.append(f"{server} carries out push {push[1]}, which it has refused")

    def refuses(self, client: Process, join: Join) -> None:
        """A server refuses a process that asks for a place."""
        self._refused_at.setdefault(client, (self._world.now, join.shard_map_epoch))

    def has_ended(self, process: Process) -> None:
        refused_at, _ = self._refused_at.get(process, (self._world.now, 0))
        late_s = self._world.now - refused_at
        if late_s > REFUSED_ENDS_S and not process.was_paused:
            self.wrong.append(f"{process} was refused {late_s:.0f} s before its end")

    def publishes(self, process: Process) -> None:
        """A process names its checkpoint the latest: one that another has replaced must not."""
        if (holder := self._holders.get(process.name, process.number)) != process.number:
            self.wrong.append(f"{process} publishes, but start {holder} of it has its place")

    def at(self, address: str) -> "Server | None":
        return self._listening.get(address)

    def cut(self, one: str, other: str) -> None:
        self._cut[frozenset((one, other))] += 1

    def heal(self, one: str, other: str) -> None:
        self._cut[frozenset((one, other))] -= 1

    def is_cut(self, one: Process, other: Process) -> bool:
        return self._cut[frozenset((one.name, other.name))] > 0

    def delay(self) -> float:
        return self._world.random.uniform(*DELAY_S)

    def noticed(self) -> float:
        return self._world.random.uniform(*NOTICED_S)

    def kill_named(self, name: str) -> None:
        for process in self._world.processes:
            if process.name == name:
                self.kill(process, False)

    def fault_of(self, client: Process, server: Process, call: str) -> CallFault | None:
        place = client.name, server.name, call
        number = self._counts[place]
        self._counts[place] += 1
        self.on_call(*place, number)
        fault = self._faults.get((*place, number))
        if fault is not None:
            self.happened.append(fault)
            self._world.tell("network", str(fault))
        return fault


_renewal = lru_cache(RENEW.request.decode)  # as most are alike


def network() -> Network:
    found = world().network
    assert isinstance(found, Network)
    return found


class Call(futures.Future[Any]):
    """A call on its way, with what is used of a grpc.Future."""

    def __init__(self, address: str, path: str, request: bytes, timeout_s: float) -> None:
        super().__init__()
        home = world()
        assert home.current is not None
        self.client = home.current.process
        self.name = path.rpartition("/")[2]
        self._address, self._path, self.request = address, path, request
        self._timeout_s = timeout_s
        self._tasks: list[tuple[Server, asyncio.Task[None]]] = []
        self._server: Server | None = None
        self.client.when_killed.append(self._cancel_at_server)
        home.at(
            self.client.real_seconds(timeout_s),
            partial(self.fail, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        )

    # On the side of the client

    def send(self, *, wait_for_ready: bool) -> None:
        net = network()
        if self.done() or not self.client.is_alive:
            return
        server = net.at(self._address)
        if server is None or net.is_cut(self.client, server.process):
            if wait_for_ready:
                world().at(RECONNECT_S, partial(self.send, wait_for_ready=True))
                return
            late = net.delay() if server is None else net.noticed()
            world().at(late, partial(self.fail, UNAVAILABLE, "failed to connect"))
            return
        net.num_calls += 1
        self._server = server
        server.calls.append(self)
        fault = net.fault_of(self.client, server.process, self.name)
        kind = "" if fault is None else fault.kind
        if kind == CLIENT_DIES_BEFORE:
            # Its message is on its way: the system sends it.
            world().at(0.0, partial(net.kill, self.client, False))
        if fault is not None and kind == CLIENT_REPLACED:
            world().at(0.0, partial(net.replace, self.client, fault.seconds))
        if fault is not None and kind == SERVER_DIES_BEFORE:
            world().at(net.delay(), partial(net.kill, server.process, fault.loses_power))
            return
        if fault is not None and kind == DIES_BEFORE:
            world().at(0.0, partial(net.kill_named, fault.victim))
        if fault is not None and kind == CUTS:
            link = self.client.name, server.process.name
            net.cut(*link)
            world().at(fault.seconds, partial(net.heal, *link))
        if kind in (LOST_REQUEST, CUTS):
            world().at(net.noticed(), partial(self.fail, UNAVAILABLE, "the request was lost"))
            return
        seconds = 0.0 if fault is None else fault.seconds
        late_s = seconds if kind in (LATE_REQUEST, CLIENT_DIES_BEFORE) else 0.0
        world().at(net.delay() + late_s, partial(self._arrive, server, fault))
        if kind in (DOUBLED, DOUBLED_THEN_DIES):
            is_last = kind == DOUBLED_THEN_DIES
            world().at(net.delay() + seconds, partial(self._arrive, server, fault, is_last=is_last))

    def cancel(self) -> bool:
        self.fail(CANCELLED, "cancelled")
        return True

    def code(self) -> grpc.StatusCode:
        return UNAVAILABLE

    def fail(self, code: grpc.StatusCode, details: str, metadata: Any = ()) -> None:
        """Ends it with a status; may be called by the scheduler."""
        self._end(lambda: self.set_exception(FailedCallError(Failure(code, details, metadata))))

    def _answer(self, answer: bytes) -> None:
        if self.name == PUSH_GRAD.name and not self.done():
            network().push_answered[self.client] = world().now
        self._end(lambda: self.set_result(answer))

    def _end(self, complete: Callable[[], None]) -> None:
        if self.done() or not self.client.is_alive:
            return

        def run() -> None:
            with suppress(futures.InvalidStateError):
                complete()

        # In a thread of the client, as gRPC's: who hears of it may wait for locks.
        self.client.start(run, f"grpc-{self.name}")
        self._cancel_at_server()

    def _cancel_at_server(self) -> None:
        net = network()
        if self._server is not None and self in self._server.calls:
            self._server.calls.remove(self)
        with suppress(ValueError):
            self.client.when_killed.remove(self._cancel_at_server)
        for server, task in self._tasks:
            is_cut = net.is_cut(self.client, server.process)
            late_s = net.noticed() if is_cut else net.delay()
            world().at(late_s, partial(server.tell_loop, task.cancel))
        self._tasks.clear()

    # On the side of the server

    def _arrive(self, server: "Server", fault: CallFault | None, is_last: bool = False) -> None:
        net = network()
        if not server.process.is_alive:
            return
        if net.is_cut(self.client, server.process):
            world().at(net.noticed(), partial(self.fail, UNAVAILABLE, "the link is cut"))
            return
        if net.at(self._address) is not server:
            self.fail(UNAVAILABLE, "the server ends")
            return
        if fault is not None and fault.kind == SERVER_DIES_DURING:
            late_s = world().random.uniform(0.0, DURING_S)
            world().at(late_s, partial(net.kill, server.process, fault.loses_power))
        if fault is not None and fault.kind == SLOW:
            server.process.stalls.append(fault.seconds)
        server.tell_loop(partial(self._serve, server, fault, is_last))

    def _serve(self, server: "Server", fault: CallFault | None, is_last: bool) -> None:
        method = server.method(self._path)
        if method is None:
            self.fail(grpc.StatusCode.UNIMPLEMENTED, self._path)
            return
        task = server.loop.create_task(self._carry_out(server, method, fault, is_last))
        self._tasks.append((server, task))
        if not self.client.is_alive:  # its message was late; its connection ends
            self._cancel_at_server()

    async def _carry_out(
        self, server: "Server", method: Any, fault: CallFault | None, is_last: bool
    ) -> None:
        reply: Callable[[], None]
        context, began = Context(self), world().now
        try:
            answer = await method(self.request, context)
        except Aborted as error:
            reply = partial(self.fail, error.code, error.text, error.metadata)
            of_a_move = dict(error.metadata or ()).get(METADATA_KEY) in OF_MOVES
            if self.name == JOIN.name and error.code is REFUSED and not of_a_move:
                network().refuses(self.client, JOIN.request.decode(self.request))
        except asyncio.CancelledError:
            return
        except Exception as error:  # as gRPC does
            world().tell(server.process, f"unforeseen: {self.name}: {error!r}")
            reply = partial(self.fail, grpc.StatusCode.UNKNOWN, repr(error))
        else:
            network().answers(server.process, self, began)
            reply = partial(self._answer, answer)
        net = network()
        kind = "" if fault is None else fault.kind
        if fault is not None and (kind == SERVER_DIES_AFTER or is_last):
            world().at(0.0, partial(net.kill, server.process, fault.loses_power))
            return
        if kind == CLIENT_DIES_AFTER:
            world().at(net.delay(), partial(net.kill, self.client, False))
        if fault is not None and kind == CLIENT_REPLACED_AFTER:
            late_s = 2 * world().random.uniform(0.0, DURING_S)
            world().at(late_s, partial(net.replace, self.client, fault.seconds))
        if fault is not None and kind in (DIES_AFTER, DIES_UNANSWERED):
            world().at(0.0, partial(net.kill_named, fault.victim))
        if kind in (LOST_REPLY, DIES_UNANSWERED):
            reply = partial(self.fail, UNAVAILABLE, "the reply was lost")
        if net.is_cut(self.client, server.process):
            world().at(net.noticed(), partial(self.fail, UNAVAILABLE, "the link is cut"))
            return
        late_s = fault.seconds if fault is not None and kind == LATE_REPLY else 0.0
        world().at(net.delay() + late_s, reply)


class Aborted(Exception):  # noqa: N818 - it carries a status
    def __init__(self, code: grpc.StatusCode, text: str, metadata: Any) -> None:
        super().__init__(text)
        self.code, self.text, self.metadata = code, text, metadata


class Context:
    """What is used of grpc.aio.ServicerContext."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        raise Aborted(code, details, metadata)

    def peer(self) -> str:
        return f"ipv4:{self._call.client.name}:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()


class Channel:
    """A grpc.Channel to an address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_closed = False
        self._open: list[Call] = []

    def unary_unary(self, path: str, **_: Any) -> Any:
        def future(request: bytes, timeout: float, metadata: Any, wait_for_ready: bool) -> Call:
            if self._is_closed:
                raise ValueError("Cannot invoke RPC on closed channel!")
            call = Call(self._address, path, request, timeout)
            self._open = [each for each in self._open if not each.done()]
            self._open.append(call)
            call.send(wait_for_ready=wait_for_ready)
            return call

        return SimpleNamespace(future=future)

    def unary_stream(self, path: str, **_: Any) -> Any:
        """A watch of health, which stays open."""
        return lambda *_, **__: SimpleNamespace(done=lambda: False)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None  # other kinds of methods, which nobody calls

    def close(self) -> None:
        self._is_closed = True
        for call in self._open:
            call.cancel()


class Server:
    """A grpc.aio.Server in the current process."""

    def __init__(self, *_: object, **__: object) -> None:
        home = world()
        assert home.current is not None
        self.process: Process = home.current.process
        self.loop = asyncio.get_running_loop()
        assert isinstance(self.loop, Loop)
        self.calls: list[Call] = []
        self._handlers: list[Any] = []
        self._methods: dict[str, Any] = {}
        self._address = ""
        self._thread: Thread = home.current

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        self._handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        network().listen(self, address)
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        pass

    async def stop(self, grace: float | None) -> None:
        network().close(self, self._address)
        until = self.loop.time() + (grace or 0.0)
        while self.calls and self.loop.time() < until:
            await asyncio.sleep(0.05)
        for call in list(self.calls):
            call.fail(CANCELLED, "the server ends")

    def method(self, path: str) -> Any:
        if path not in self._methods:
            details: Any = SimpleNamespace(method=path, invocation_metadata=())
            found = [handler.service(details) for handler in self._handlers]
            self._methods[path] = next((each.unary_unary for each in found if each), None)
        return self._methods[path]

    def tell_loop(self, do: Callable[[], object]) -> None:
        """Has the server's loop do something; by the scheduler."""
        if self.process.is_alive and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(do)


def install(patched: Mapping[str, Any] | None = None) -> None:
    """Puts these over gRPC's, for all of this process."""
    grpc.aio.server = Server
    grpc.insecure_channel = lambda address, options=(): Channel(address)
