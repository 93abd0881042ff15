"""What an actor does on its node: it owns one process at a time, which dies with it.

An actor with coroutines has one event loop, whose thread lives as long as the actor: the kernel ties a
process to the thread that started it (`deploy.tether`), so all starts happen there, and only waits elsewhere.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from ray.util import get_node_ip_address

from ctr_ps.deploy.cluster import free_port, start_tethered
from ctr_ps.deploy.plan import ProcessSpec, with_token

CHUNK_BYTES = 1 << 16


class Host:
    """Starts the process of one role on the node of its actor."""

    def __init__(self) -> None:
        self._held: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def endpoint(self) -> str:
        """Returns a free endpoint at the node's address, reserved until the process is started."""
        address = str(get_node_ip_address())
        if self._held is not None:
            self._held.close()
        self._held = free_port(address)
        return f"{address}:{self._held.getsockname()[1]}"

    async def start(
        self, spec: ProcessSpec, token: str, variables: dict[str, str], folder: str
    ) -> None:
        """Starts a process in `folder`, where the node has it, with the node's variables and `variables`."""
        if self._held is not None:
            self._held.close()
            self._held = None
        if Path(folder).is_dir():
            os.chdir(folder)
        self._process = start_tethered(
            spec,
            with_token(dict(os.environ) | variables, token),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
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

    async def send(self, number: int) -> bool:
        """Sends a signal to the process group; returns False if the process has exited."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, signal.Signals(number))
        except ProcessLookupError:
            return False
        return True

    async def pid(self) -> int:
        """Returns the process id of the actor itself."""
        return os.getpid()

    async def find(self, folder: str, pattern: str) -> list[str]:
        """Returns the files in a folder of the node, by their paths in it."""
        return [str(path.relative_to(folder)) for path in Path(folder).glob(pattern)]

    async def remove(self, folder: str) -> None:
        """Removes a folder of the node, if it is there."""
        if Path(folder).exists():
            shutil.rmtree(folder)
