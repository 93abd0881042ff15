"""A world of simulated processes: threads that a scheduler switches, and a time that it lets pass.

    thread: lock, wait, sleep, send, sync --> scheduler: who is next, from one seed --> thread
                                                 `--nobody can run: time passes to the next event

Every thread is a greenlet of one thread of the system, so exactly one runs, and it is switched only where it
calls threading, queue or time: `install` puts these over the standard library's, before the package under
test is imported. An event loop of asyncio is one such thread, with a selector that has no sockets.
"""

import asyncio
import heapq
import itertools
import os
import queue
import random
import secrets
import threading
import time
import zlib
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import thread as pools
from random import Random, SystemRandom
from types import SimpleNamespace
from typing import Any, Self

from greenlet import greenlet

STEP_S = 2e-6
"""Time that a look at the clock takes: whoever waits for it to pass, waits for something."""

EPOCH = 1_800_000_000.0

_real = SimpleNamespace(
    monotonic=time.monotonic,
    time=time.time,
    sleep=time.sleep,
    getpid=os.getpid,
    get_ident=threading.get_ident,
)
_now: "list[World | None]" = [None]


def world() -> "World":
    found = _now[0]
    assert found is not None, "outside of a simulation"
    return found


class DeadlockError(AssertionError):
    """Nothing will ever happen again, but somebody waits."""


class Process:
    """A process of the simulated cluster: it can be paused and killed, and has clocks of its own."""

    def __init__(self, home: "World", name: str, number: int, host: str) -> None:
        self.name = name
        self.number = number  # of its start, from 1, over all processes
        self.pid = 2**22 + number  # of no process of the system
        self.host = host
        self.is_alive = True
        self.is_paused = self.was_paused = False
        self.stalls: list[float] = []  # seconds by which its next work is slow
        self.when_killed: list[Callable[[], None]] = []
        self.descriptors: list[int] = []  # of locks, which the system gives back at its end
        self._world = home
        self.threads: dict[int, Thread] = {}  # that have started and not ended, in order
        self.thread_numbers = itertools.count(1)
        self._parked: list[Thread] = []
        chance = home.random
        self.rate = 1.0 + chance.uniform(-home.drift, home.drift)
        self.offset = chance.uniform(0.0, 1e5)
        self.wall = EPOCH + chance.uniform(-1.0, 1.0) * home.wall_error_s

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"

    def real_seconds(self, seconds: float) -> float:
        return seconds / self.rate if seconds > 0.0 else 0.0

    def start(self, run: Callable[[], object], name: str) -> "Thread":
        thread = Thread(target=run, name=name, process=self)
        thread.start()
        return thread

    def pause(self) -> None:
        self.is_paused = self.was_paused = True

    def resume(self) -> None:
        self.is_paused = False
        for thread in self._parked:
            self._world.ready.append(thread)
        self._parked.clear()

    def park(self, thread: "Thread") -> None:
        self._parked.append(thread)

    def kill(self) -> None:
        """Ends it as SIGKILL does: none of its threads goes on, and nothing of it is tidied up."""
        if not self.is_alive:
            return
        self.is_alive = False
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        for tell in self.when_killed:
            tell()


class World:
    """The scheduler: one seed is one order of all that happens."""

    def __init__(
        self,
        seed: int,
        *,
        preemption: float = 0.02,  # chance that a thread loses its turn where it takes a lock
        drift: float = 0.01,  # by which clocks are at most too fast or slow
        wall_error_s: float = 5.0,  # by which clocks of the day are at most wrong
    ) -> None:
        self.random = Random(seed)
        random.seed(seed)  # of pauses between tries
        self.now = 0.0  # seconds since the beginning
        self.drift, self.wall_error_s = drift, wall_error_s
        self.current: Thread | None = None
        self.processes: list[Process] = []
        self.trace: list[str] = []
        self.digest = 0  # of the order of all switches and events
        self.num_switches = 0
        self.short: dict[
            str, str
        ] = {}  # what the trace writes for names that differ from run to run
        self.tells_switches = False
        self.is_over = False
        self.chance = self.random.random
        self.preemption = preemption
        self.ready: list[Thread] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.hub = greenlet.getcurrent()
        self._dead: list[
            greenlet
        ] = []  # kept: a greenlet that is collected would run its `finally`

    # What processes and faults use

    def process(self, name: str, host: str = "") -> Process:
        made = Process(self, name, len(self.processes) + 1, host or name)
        self.processes.append(made)
        return made

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        """Has `do` called by the scheduler in so many seconds; it must not wait."""
        when = self.now + seconds if seconds > 0.0 else self.now
        heapq.heappush(self._timers, (when, next(self._numbers), do))

    def tell(self, who: object, what: str) -> None:
        """Writes a line of the trace."""
        for place, short in self.short.items():
            what = what.replace(place, short)
        line = f"{self.now:12.6f} {who!s:<14} {what}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self.trace.append(line)

    def run(self, limit_s: float) -> None:
        """Runs until `is_over`; raises DeadlockError if that cannot be, or takes longer than the limit."""
        timers, ready, chance = self._timers, self.ready, self.chance
        while not self.is_over:
            if timers and (not ready or timers[0][0] <= self.now):
                when, _, do = heapq.heappop(timers)
                if when > self.now:
                    self.now = when
                if self.now > limit_s:
                    raise DeadlockError(f"not over after {limit_s:g} s: {self.waiting()}")
                do()
                continue
            if not ready:
                raise DeadlockError(f"nothing will happen any more: {self.waiting()}")
            index = int(chance() * len(ready))
            thread = ready[index]
            ready[index] = ready[-1]
            ready.pop()
            if not thread.process.is_alive:
                continue
            if thread.process.is_paused:
                thread.process.park(thread)
                continue
            self._switch_to(thread)

    def _switch_to(self, thread: "Thread") -> None:
        self.num_switches += 1
        self.digest = zlib.crc32(thread.key, self.digest)
        if self.tells_switches:
            self.trace.append(f"{self.now:12.6f} {thread.key.decode()} goes on")
        self.now += STEP_S
        self.current = thread
        if thread.loop is None:
            thread.greenlet.switch()
        else:
            events._set_running_loop(thread.loop)
            thread.greenlet.switch()
        if thread.loop is not None:
            events._set_running_loop(None)
        self.current = None

    def waiting(self) -> str:
        """Says of each thread of a living process where it waits."""
        return "; ".join(
            f"{process} {thread.name} at {thread.waits_for or 'its turn'}"
            for process in self.processes
            if process.is_alive
            for thread in process.threads.values()
        )

    # What the primitives use

    def block(self, seconds: float | None, what: str) -> bool:
        """Has the current thread wait until it is woken (True) or the time is over."""
        thread = self.current
        assert thread is not None
        thread.ticket += 1
        thread.is_waiting, thread.waits_for = True, what
        if seconds is not None:
            ticket = thread.ticket

            def wake() -> None:
                if thread.is_waiting and ticket == thread.ticket:
                    thread.is_waiting = thread.is_woken = False
                    self.ready.append(thread)

            self.at(thread.process.real_seconds(seconds), wake)
        self.hub.switch()
        thread.waits_for = ""
        return thread.is_woken

    def wake(self, thread: "Thread") -> None:
        if thread.is_waiting:
            thread.is_waiting, thread.is_woken = False, True
            self.ready.append(thread)

    def give_turn(self) -> None:
        """Lets others run, if any can."""
        thread = self.current
        if thread is not None:
            self.ready.append(thread)
            self.hub.switch()

    def may_lose_turn(self) -> None:
        if self.current is not None and self.chance() < self.preemption:
            self.give_turn()

    def ended(self, dead: greenlet) -> None:
        self._dead.append(dead)


class Thread:
    """`threading.Thread` in a process of the world."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
        process: Process | None = None,
    ) -> None:
        self.daemon = bool(daemon)
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        home = world()
        if process is None:
            assert home.current is not None, "a thread is started outside of the simulation"
            process = home.current.process
        self.process = process
        self.name = name or f"thread-{next(process.thread_numbers)}"
        self.greenlet = greenlet(self._bootstrap, parent=home.hub)  # where its end leads
        self.ident = id(self)
        self.loop: Loop | None = None  # which it runs
        self.ticket = 0
        self.is_waiting = self.is_woken = False
        self.waits_for = ""
        self.key = f"{process}/{self.name}".encode()
        self._ended = Event()
        self._is_started = False
        self.locals: dict[int, dict[str, Any]] = {}

    def __hash__(self) -> int:
        return zlib.crc32(self.key)  # not an address: sets of threads have one order

    def start(self) -> None:
        self._is_started = True
        self.process.threads[self.ident] = self
        world().ready.append(self)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def _bootstrap(self) -> None:
        try:
            self.run()
        except SystemExit:
            pass
        except BaseException as error:  # as the interpreter does
            world().tell(self.process, f"thread {self.name} died: {type(error).__name__}: {error}")
        self._ended.set()
        del self.process.threads[self.ident]
        world().ended(self.greenlet)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._is_started and not self._ended.is_set()


class Lock:
    """`threading.Lock`; one that was made before the simulation never waits: nobody else runs then."""

    __slots__ = ("_is_held", "_is_ours", "_waiting")

    def __init__(self) -> None:
        self._is_held = False
        self._is_ours = _now[0] is not None and _now[0].current is not None
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        home = _now[0]
        if not self._is_ours or home is None:
            return True
        if home.current is not None and home.chance() < home.preemption:
            home.give_turn()
        if not self._is_held:
            self._is_held = True
            return True
        until = None
        while self._is_held:
            if not blocking:
                return False
            thread = home.current
            assert thread is not None, "the scheduler waits for a lock"
            left_s = None
            if timeout is not None and timeout >= 0:
                until = home.now + timeout if until is None else until
                left_s = until - home.now
                if left_s <= 0:
                    return False
            self._waiting.append(thread)
            if not home.block(left_s, "a lock"):
                self._waiting.remove(thread)
        self._is_held = True
        return True

    def release(self) -> None:
        home = _now[0]
        if not self._is_ours or home is None:
            return
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        if self._waiting:
            home.wake(self._waiting.popleft())

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return self._is_held

    def _at_fork_reinit(self) -> None:
        """No-op: runs are forked while nobody holds it."""


class RLock:
    """`threading.RLock`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Thread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        current = None if _now[0] is None else _now[0].current
        if self._count and self._owner is current:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = current, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    _at_fork_reinit = Lock._at_fork_reinit

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock: "Lock | RLock | None" = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: list[Thread] = []

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def wait(self, timeout: float | None = None) -> bool:
        home, count = world(), 0
        thread = home.current
        assert thread is not None, "the scheduler waits for a condition"
        self._waiting.append(thread)
        if isinstance(self._lock, RLock):
            count, self._lock._count = self._lock._count, 1
        self._lock.release()
        is_woken = home.block(timeout, "a condition")
        if not is_woken and thread in self._waiting:
            self._waiting.remove(thread)
        self._lock.acquire()
        if isinstance(self._lock, RLock):
            self._lock._count = count
        return is_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else world().now + timeout
        while not (result := predicate()):
            left_s = None if until is None else until - world().now
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for thread in woken:
            world().wake(thread)

    def notify_all(self) -> None:
        if self._waiting:
            self.notify(len(self._waiting))


class Event:
    """`threading.Event`."""

    def __init__(self) -> None:
        self._changed = Condition(Lock())
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class Semaphore:
    """`threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._changed = Condition(Lock())
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._value > 0, timeout if blocking else 0.0):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._changed:
            self._value += n
            self._changed.notify(n)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Local:
    """`threading.local`."""

    def _own(self) -> dict[str, Any]:
        home = _now[0]
        if home is None or home.current is None:
            return self.__dict__
        return home.current.locals.setdefault(id(self), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._own()[name] = value


class Loop(base_events.BaseEventLoop):
    """An event loop in a thread of the world: its own selector, which waits for other threads and time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = time.monotonic  # type: ignore[method-assign]
        self._is_woken = False
        self._sleeper: Thread | None = None

    def _run_once(self) -> None:
        """As that of asyncio, which looks at the clock as often."""
        timers, ready = self._scheduled, self._ready
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False
        timeout = None
        if ready or self._stopping:
            timeout = 0.0
        elif timers:
            timeout = max(0.0, timers[0]._when - self.time())
        self._wait(timeout)
        end = self.time() + self._clock_resolution
        while timers and timers[0]._when < end:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _wait(self, timeout: float | None) -> None:
        home = world()
        if not self._is_woken and timeout != 0:
            self._sleeper = home.current
            home.block(timeout, "events of its loop")
            self._sleeper = None
        else:
            home.may_lose_turn()
        self._is_woken = False

    def run_forever(self) -> None:
        thread = world().current
        assert thread is not None
        thread.loop = self
        try:
            super().run_forever()
        finally:
            thread.loop = None

    def _write_to_self(self) -> None:
        self._is_woken = True
        if self._sleeper is not None:
            world().wake(self._sleeper)

    @classmethod
    def run(cls, main: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine to its end in the current thread, as `asyncio.run` does."""
        loop = cls()
        try:
            return loop.run_until_complete(main)
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


class _Secrets:
    """Random numbers of the world, where the package wants some that nobody can guess."""

    def randbits(self, bits: int) -> int:
        home = _now[0]
        return SystemRandom().getrandbits(bits) if home is None else home.random.getrandbits(bits)

    def token_hex(self, num_bytes: int = 32) -> str:
        return f"{self.randbits(8 * num_bytes):0{2 * num_bytes}x}"


def _monotonic() -> float:
    home = _now[0]
    if home is None or home.current is None:
        return float(_real.monotonic())
    home.now += STEP_S  # a look at it takes time
    process = home.current.process
    return process.offset + home.now * process.rate


def _wall() -> float:
    home = _now[0]
    if home is None or home.current is None:
        return float(_real.time())
    home.now += STEP_S
    process = home.current.process
    return process.wall + home.now * process.rate


def _sleep(seconds: float) -> None:
    home = _now[0]
    if home is None or home.current is None:
        _real.sleep(seconds)
    else:
        home.block(seconds, "a sleep")


def _current_thread() -> Any:
    home = _now[0]
    found = None if home is None else home.current
    return found or threading.main_thread()


def _get_ident() -> int:
    home = _now[0]
    return int(_real.get_ident()) if home is None or home.current is None else home.current.ident


def _getpid() -> int:
    home = _now[0]
    if home is None or home.current is None:
        return int(_real.getpid())
    return home.current.process.pid


def install() -> None:
    """Puts simulated threads and clocks over those of this process, before the package's imports."""
    time.monotonic = time.perf_counter = _monotonic
    time.time = _wall
    time.sleep = _sleep
    made: dict[str, Any] = {
        "Lock": Lock,
        "RLock": RLock,
        "Condition": Condition,
        "Event": Event,
        "Semaphore": Semaphore,
        "Thread": Thread,
        "local": Local,
        "current_thread": _current_thread,
        "get_ident": _get_ident,
    }
    for name, value in made.items():
        setattr(threading, name, value)
    queue.SimpleQueue = queue._PySimpleQueue
    pools._global_shutdown_lock = Lock()
    for name in ("randbits", "token_hex"):
        setattr(secrets, name, getattr(_Secrets(), name))
    os.getpid = _getpid


class entered:  # noqa: N801 - a context manager
    """Makes a world the one in which all that is simulated happens."""

    def __init__(self, home: World) -> None:
        self._world = home

    def __enter__(self) -> Self:
        _now[0] = self._world
        return self

    def __exit__(self, *_: object) -> None:
        _now[0] = None
