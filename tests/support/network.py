"""Networks for the processes of a test: one with cuts between pairs of hosts, and a slow one.

    server.0 --eth0--+
    worker.0 --eth0--+-- switch                                      a network namespace each

    server.0, server.1 --tun0-- delay line --tun0-- worker.0, worker.1      one for each side

Nothing of them is visible outside the namespaces. They need Linux, root, and `ip` of iproute2.
"""

import fcntl
import itertools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ctr_ps.deploy import tether
from tests.support import delay_line
from tests.support.needs import lacking

_LIMIT_S = 20.0
_NOBODY = "02:00:00:00:00:00"
_TUN = Path("/dev/net/tun")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # <linux/if_tun.h>
_QUEUE_PACKETS = 10_000
_numbers = itertools.count()


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"


class Hosts:
    """Hosts for processes; `addresses` are IPv4."""

    addresses: dict[str, str]
    _namespaces: dict[str, str]

    def command(self, host: str, command: Sequence[object]) -> list[object]:
        """Returns a command that becomes `command` on a host, by exec."""
        return ["ip", "netns", "exec", self._namespaces[host], *command]


class Network(Hosts):
    """Hosts that reach each other through one switch."""

    def __init__(self, hosts: Sequence[str], stack: ExitStack) -> None:
        """Builds it; closing `stack` removes it, even after a failure."""
        prefix = _prefix()
        self._namespaces = {host: f"{prefix}-{host}" for host in hosts}
        self.addresses = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, start=1)}
        switch = f"{prefix}-switch"
        for namespace in (switch, *self._namespaces.values()):
            _add_namespace(namespace, stack)
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

    def cut(self, one: str, other: str) -> None:
        """Silently drops packets between two hosts, both ways."""
        for host, peer in ((one, other), (other, one)):
            neighbour = (self.addresses[peer], "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
            _ip("-n", self._namespaces[host], "neighbour", "replace", *neighbour)

    def heal(self, one: str, other: str) -> None:
        for host, peer in ((one, other), (other, one)):
            neighbour = (self.addresses[peer], "dev", "eth0")
            _ip("-n", self._namespaces[host], "neighbour", "delete", *neighbour)


class DelayedNetwork(Hosts):
    """Hosts on two sides, each with one address for all; packets between the sides take `delay_s`."""

    def __init__(self, sides: Sequence[Sequence[str]], delay_s: float, stack: ExitStack) -> None:
        prefix = _prefix()
        self._namespaces, self.addresses = {}, {}
        devices = []
        for number, hosts in enumerate(sides, start=1):
            namespace, address = f"{prefix}-side{number}", f"10.77.1.{number}"
            _add_namespace(namespace, stack)
            device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, device)
            devices.append(device)
            # It is made here, under a name that no other test has, and stays open when it is moved.
            name = f"tun{os.getpid()}.{number}"
            request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(device, _TUNSETIFF, request)
            _ip("link", "set", name, "netns", namespace, "name", "tun0")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "tun0")
            _ip("-n", namespace, "link", "set", "tun0", "txqueuelen", str(_QUEUE_PACKETS))
            _ip("-n", namespace, "link", "set", "tun0", "mtu", str(delay_line.PACKET_BYTES), "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            self._namespaces |= dict.fromkeys(hosts, namespace)
            self.addresses |= dict.fromkeys(hosts, address)
        line = [sys.executable, delay_line.__file__, *devices, delay_s]
        process = subprocess.Popen(
            [sys.executable, tether.__file__, str(os.getpid()), *map(str, line)], pass_fds=devices
        )
        stack.callback(process.wait, _LIMIT_S)
        stack.callback(process.kill)


def _prefix() -> str:
    return f"ctr-ps-test-{os.getpid()}-{next(_numbers)}"


def _add_namespace(name: str, stack: ExitStack) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[Network]:
    """Yields a network; skips the test where it is impossible."""
    _require_namespaces()
    with ExitStack() as stack:
        yield Network(hosts, stack)


@contextmanager
def delayed_network(*sides: Sequence[str], delay_s: float) -> Iterator[DelayedNetwork]:
    """Yields a network of two sides, as `network`; packets between them take `delay_s`."""
    _require_namespaces()
    if not os.access(_TUN, os.R_OK | os.W_OK):
        lacking(f"a delay line needs {_TUN}")
    with ExitStack() as stack:
        yield DelayedNetwork(sides, delay_s, stack)


def _require_namespaces() -> None:
    if os.geteuid() != 0:
        lacking("network namespaces need root")
    if shutil.which("ip") is None:
        lacking("network namespaces need `ip`, of the package iproute2")
    probe = f"{_prefix()}-probe"
    done = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        lacking(f"this system makes no network namespaces: {done.stderr.strip()}")
    _ip("netns", "delete", probe)
