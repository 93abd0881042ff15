"""A network of two sides is as slow as it says, and loses nothing: what tests of delays stand on."""

import json
import sys

from tests.support.network import delayed_network
from tests.support.processes import started

DELAY_S = 0.02
ROUND_TRIPS = 20
NUM_BYTES = 20_000_000
LIMIT_S = 60.0

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as listening:
    print("ready", flush=True)
    connection, _ = listening.accept()
with connection:
    while some := connection.recv(1 << 20):
        connection.sendall(some)
"""
CALLER = """
import json, os, socket, sys, threading, time
seconds = []
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(int(sys.argv[2])):
        start = time.perf_counter()
        connection.sendall(b"?")
        connection.recv(1)
        seconds.append(time.perf_counter() - start)
    sent, received = os.urandom(int(sys.argv[3])), bytearray()
    threading.Thread(target=connection.sendall, args=(sent,)).start()
    while len(received) < len(sent) and (some := connection.recv(1 << 20)):
        received += some
print(json.dumps({"seconds": sorted(seconds), "is_whole": received == sent}))
"""


def test_round_trip_takes_twice_the_delay_and_every_byte_arrives() -> None:
    with delayed_network(["server"], ["worker"], delay_s=DELAY_S) as network:
        address = network.addresses["server"]
        echo = network.command("server", [sys.executable, "-c", ECHO, address])
        caller = [sys.executable, "-c", CALLER, address, ROUND_TRIPS, NUM_BYTES]
        with started(echo) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            with started(network.command("worker", caller)) as worker:
                out, error = worker.communicate(timeout=LIMIT_S)

    assert not error
    found = json.loads(out)
    assert found["seconds"][0] >= 2 * DELAY_S
    assert found["seconds"][ROUND_TRIPS // 2] < 3 * DELAY_S
    assert found["is_whole"]
