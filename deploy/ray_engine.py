"""The engine `ray`: each process of a cluster belongs to an actor in a placement group. Imported late.

    servers   a bundle each, SPREAD over the nodes; spares have the last ones
    workers   a bundle each, PACKed on few nodes

A bundle stays on its node, so an actor that takes the place of a lost one finds the update log there. The
rules of what is restarted are the launcher's, not Ray's: actors have no restarts of their own.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ctr_ps.deploy.cluster import LocalEngine, LocalProcess, to_descriptor
from ctr_ps.deploy.plan import ProcessSpec

CPUS_EACH = 1
CALL_SECONDS = 30.0
CHUNK_BYTES = 1 << 16
CONNECT_SECONDS = 10.0
LAST_WORDS_SECONDS = 5.0
LOOK_SECONDS = 1  # a whole one: Ray takes parts of it for none, and would be asked again at once
MOMENT_SECONDS = 2.0

log = logging.getLogger("ps-launch")


class AddressError(Exception):
    """An address is none, or no cluster answers there."""


class PlacementError(Exception):
    """A cluster has no room for the processes of the run."""


@contextlib.contextmanager
def ray_engine(
    address: str, *, num_servers: int, num_workers: int, place_seconds: float = 60.0
) -> Iterator["RayEngine"]:
    """Connects to a Ray cluster and reserves a place for each process; gives all back at the end.

    Raises:
        AddressError: If the address is none, or no cluster answers there.
        PlacementError: If the cluster has too few free CPUs for `place_seconds`.
    """
    try:
        _require_listener(address)
    except OSError as error:
        raise AddressError(f"no Ray cluster answers: {error}") from error
    try:
        ray.init(
            address=address,
            log_to_driver=False,  # the logs of processes come by their own way
            logging_level="WARNING",
            # Ray looks for this machine among the nodes by an outer address, which those of loopback lack.
            _node_ip_address=address.partition(":")[0] if address.startswith("127.") else None,
        )
    except ConnectionError as error:
        raise AddressError(f"no Ray cluster answers: {error}") from error
    groups: list[PlacementGroup] = []
    try:
        for number, strategy in ((num_servers, "SPREAD"), (num_workers, "PACK")):
            groups.append(placement_group([{"CPU": CPUS_EACH}] * number, strategy=strategy))
            if not _has_place(groups[-1], number, place_seconds):
                raise PlacementError(
                    f"Ray found no place for {num_servers} servers and {num_workers} workers within "
                    f"{place_seconds:g} s: each needs {CPUS_EACH} CPU, and {_free_cpus():g} are free"
                )
        yield RayEngine(*groups)
    finally:
        for group in groups:
            remove_placement_group(group)
        ray.shutdown()


def _has_place(group: PlacementGroup, number: int, limit_s: float) -> bool:
    """Waits until a group of `number` processes has its place; says after a moment that it waits."""
    start = time.monotonic()
    is_told = False
    while not group.wait(LOOK_SECONDS):  # Ctrl-C is heeded between two calls, never within one
        waited = time.monotonic() - start
        if waited >= limit_s:
            return False
        if waited >= MOMENT_SECONDS and not is_told:
            is_told = True
            log.info(
                "waiting up to %g s for %d CPUs of Ray, %g are free",
                limit_s,
                number * CPUS_EACH,
                _free_cpus(),
            )
    return True


def _free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0))


def _require_listener(address: str) -> None:
    """Raises AddressError unless it is an address, OSError if nobody listens: Ray tries for minutes."""
    if address == "auto" or "://" in address:
        return
    found = re.fullmatch(r"\[?([^/]+?)\]?:([0-9]{1,5})", address)
    if found is None or int(found[2]) > 65535:
        raise AddressError("expected HOST:PORT or auto")
    socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()


class Host:
    """What an actor does on its node: it owns one process at a time, which dies with it.

    An actor with coroutines has one event loop, whose thread lives as long as the actor: the kernel ties a
    process to the thread that started it (`deploy.tether`), so all starts happen there, and only waits
    elsewhere.
    """

    def __init__(self) -> None:
        self._engine = LocalEngine(str(get_node_ip_address()))
        self._process: LocalProcess | None = None

    async def endpoint(self, name: str, wanted: Mapping[str, str]) -> str:
        """Returns a free endpoint at the node's address, reserved until the process is started."""
        return self._engine.endpoints([name], wanted)[0]

    async def start(
        self, spec: ProcessSpec, token: str, variables: dict[str, str], folder: str
    ) -> None:
        """Starts a process in `folder`, where the node has it, with the node's variables and `variables`."""
        if Path(folder).is_dir():
            os.chdir(folder)
        os.environ.update(variables)
        self._process = self._engine.start(
            spec, token, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    async def read(self, *, is_stderr: bool) -> bytes:
        """Returns the next output of the process; empty at its end."""
        assert self._process is not None
        source = self._process.stderr if is_stderr else self._process.stdout
        assert source is not None
        return await asyncio.to_thread(os.read, source.fileno(), CHUNK_BYTES)

    async def wait(self) -> int:
        """Returns the return code of the process when it has exited."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    async def send(self, number: int) -> None:
        """Sends a signal to the process group, unless the process has exited."""
        if self._process is not None:
            self._process.send(signal.Signals(number))

    async def pid(self) -> int:
        """Returns the process id of the actor itself."""
        return os.getpid()

    async def find(self, folder: str, pattern: str) -> set[str]:
        """Returns the files in a folder of the node, by their paths in it."""
        return self._engine.find((), Path(folder), pattern)

    async def remove(self, folder: str) -> None:
        """Removes a folder of the node, if it is there."""
        self._engine.remove(Path(folder))


class RayProcess:
    """A process of an actor, whose output is copied to this machine; see `deploy.cluster.Process`."""

    def __init__(self, actor: Any, stdout: int | IO[bytes], stderr: int | IO[bytes]) -> None:
        """Begins to copy the output of the process that the actor has started."""
        self._actor = actor
        self._copies: list[threading.Thread] = []
        self.stdout = self._copy_to(stdout, is_stderr=False)
        self.stderr = self._copy_to(stderr, is_stderr=True)

    def wait(self) -> int:
        """Waits for its exit; an actor that is lost has taken its process with it, as by SIGKILL."""
        try:
            code = int(ray.get(self._actor.wait.remote()))
        except RayError:
            code = -signal.SIGKILL
        for copy in self._copies:  # a child of the process may hold the pipe
            copy.join(LAST_WORDS_SECONDS)
        return code

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, unless the process has exited or its actor is lost."""
        with contextlib.suppress(RayError):
            ray.get(self._actor.send.remote(int(number)), timeout=CALL_SECONDS)

    def _copy_to(self, target: int | IO[bytes], *, is_stderr: bool) -> IO[bytes] | None:
        source: IO[bytes] | None = None
        if target == subprocess.PIPE:
            reading, writing = os.pipe()
            source = os.fdopen(reading, "rb")
        else:
            writing = os.dup(target if isinstance(target, int) else target.fileno())
        copy = threading.Thread(target=self._copy, args=(writing, is_stderr), daemon=True)
        copy.start()
        self._copies.append(copy)
        return source

    def _copy(self, target: int, is_stderr: bool) -> None:
        write = to_descriptor(target)
        try:
            while chunk := ray.get(self._actor.read.remote(is_stderr=is_stderr)):
                write(chunk)
        except (RayError, OSError):  # the actor is lost, or nobody reads
            pass
        finally:
            os.close(target)


class RayEngine:
    """Starts processes in the places of a Ray cluster; see `deploy.cluster.Engine`."""

    def __init__(self, servers: PlacementGroup, workers: PlacementGroup) -> None:
        """Starts no actor; `servers`, spares among them, and `workers` have a bundle for each of theirs."""
        self._groups = {"pserver": servers, "spare": servers, "trainer": workers}
        self._actors: dict[str, Any] = {}

    def endpoints(self, names: Sequence[str], wanted: Mapping[str, str]) -> list[str]:
        """Returns an endpoint of the node of each server."""
        calls = [self._actor(name).endpoint.remote(name, wanted) for name in names]
        return [str(endpoint) for endpoint in ray.get(calls, timeout=CALL_SECONDS)]

    def start(
        self, spec: ProcessSpec, token: str, *, stdout: int | IO[bytes], stderr: int | IO[bytes]
    ) -> RayProcess:
        """Starts a process at its actor, or at a new one in the same place."""
        variables = {name: value for name, value in os.environ.items() if name.startswith("CTR_PS")}
        actor = self._actor(spec.name)
        ray.get(actor.start.remote(spec, token, variables, str(Path.cwd())), timeout=CALL_SECONDS)
        return RayProcess(actor, stdout, stderr)

    def remove(self, folder: Path) -> None:
        """Removes a folder on the nodes of all servers."""
        for name in self._actors:
            if not name.startswith("trainer."):
                actor = self._actor(name)
                ray.get(actor.remove.remote(str(folder.absolute())), timeout=CALL_SECONDS)

    def find(self, servers: Sequence[str], folder: Path, pattern: str) -> set[str]:
        """Returns the files in a folder on the nodes of all servers, by their paths in it.

        One that begins with the name of a server counts where that runs; on another node it is "elsewhere".
        """
        where = str(folder.absolute())
        calls = [self._actor(name).find.remote(where, pattern) for name in servers]
        views: list[set[str]] = ray.get(calls, timeout=CALL_SECONDS)
        found = {
            path
            for index, view in enumerate(views)
            for path in view
            if path.startswith(f"server-{index}/")
        }
        return found | {f"elsewhere/{path}" for path in set().union(*views) - found}

    def _actor(self, name: str) -> Any:
        """Returns the actor of a process, which is a new one where the last is lost."""
        actor = self._actors.get(name)
        if actor is not None:
            with contextlib.suppress(RayError):
                ray.get(actor.pid.remote(), timeout=CALL_SECONDS)
                return actor
        role, _, index = name.rpartition(".")
        group, bundle = self._groups[role], int(index)
        if role == "spare":
            bundle = group.bundle_count - 1 - bundle
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        self._actors[name] = (
            ray.remote(Host)
            .options(num_cpus=CPUS_EACH, scheduling_strategy=place, max_concurrency=8)
            .remote()
        )
        return self._actors[name]
