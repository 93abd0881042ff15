"""A network for the processes of a test: each has a machine's view of it, and pairs can be cut off.

    server.0 --eth0--+
    worker.0 --eth0--+-- switch        a network namespace each

Nothing of it is visible outside the namespaces. It needs Linux, root, and `ip` of iproute2.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.support.needs import lacking

_LIMIT_S = 20.0
_NOBODY = "02:00:00:00:00:00"
_numbers = itertools.count()


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"


class Network:
    """Hosts that reach each other through one switch.

    Attributes:
        addresses: IPv4 address of each host.
    """

    def __init__(self, hosts: Sequence[str], stack: ExitStack) -> None:
        """Builds it; closing `stack` removes it, also if this fails halfway."""
        prefix = f"ctr-ps-test-{os.getpid()}-{next(_numbers)}"
        self._namespaces = {host: f"{prefix}-{host}" for host in hosts}
        self.addresses = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, start=1)}
        switch = f"{prefix}-switch"
        for namespace in (switch, *self._namespaces.values()):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "delete", namespace)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host, namespace in self._namespaces.items():
            port = f"port{self.addresses[host].rpartition('.')[2]}"
            veth = ("type", "veth", "peer", "name", port, "netns", switch)
            _ip("link", "add", "eth0", "netns", namespace, *veth)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", namespace, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", namespace, "link", "set", interface, "up")

    def command(self, host: str, command: Sequence[object]) -> list[object]:
        """Returns the command that replaces itself by `command` on a host."""
        return ["ip", "netns", "exec", self._namespaces[host], *command]

    def cut(self, one: str, other: str) -> None:
        """Lets packets between two hosts vanish, both ways, without a word to either; others pass."""
        for host, peer in ((one, other), (other, one)):
            neighbour = (self.addresses[peer], "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
            _ip("-n", self._namespaces[host], "neighbour", "replace", *neighbour)

    def heal(self, one: str, other: str) -> None:
        """Undoes `cut`."""
        for host, peer in ((one, other), (other, one)):
            neighbour = (self.addresses[peer], "dev", "eth0")
            _ip("-n", self._namespaces[host], "neighbour", "delete", *neighbour)


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """Lends a network for the time of the block; the test is skipped where there can be none."""
    if os.geteuid() != 0:
        lacking("network namespaces need root")
    if shutil.which("ip") is None:
        lacking("network namespaces need `ip`, of the package iproute2")
    probe = f"ctr-ps-test-{os.getpid()}-probe"
    done = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        lacking(f"this system makes no network namespaces: {done.stderr.strip()}")
    _ip("netns", "delete", probe)
    with ExitStack() as stack:
        yield Network(hosts, stack)
