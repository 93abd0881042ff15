"""Streams for tests: in memory, in a Redis server, and in Kafka's mock brokers in a process of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from ctr_ps.ps_worker.data.streams.source import START, Message, offset_and_rows
from tests.support.needs import is_missing
from tests.support.waiting import wait_until

Messages = Mapping[str, Sequence[tuple[int, bytes]]]
"""Time in ms and value of each message, by partition."""


def clicks(
    number: int, seed: int = 0, *, rows: int = 3, start_ms: int = 0, step_ms: int = 10
) -> list[tuple[int, bytes]]:
    """Returns messages of 1 to `rows` rows of JSON with slots "user" and "item", at times in order."""
    random, found = Random(seed), []
    for index in range(number):
        lines = [
            json.dumps(
                {
                    "click": int(random.random() < 0.3),
                    "user": f"u{random.randrange(50)}",
                    "item": f"i{seed}-{index}-{row}",
                }
            )
            for row in range(random.randrange(1, rows + 1))
        ]
        found.append((start_ms + index * step_ms, "\n".join(lines).encode()))
    return found


class MemorySource:
    """A `StreamSource` that brings messages in pieces of random sizes, as brokers do."""

    def __init__(self, messages: Messages, random: Random | None = None) -> None:
        self.messages = {name: list(each) for name, each in messages.items()}
        self.at_end: set[str] = set()
        self._random = random or Random(0)
        self._next: dict[str, int] = {}
        self.polled: list[set[str]] = []
        self.is_closed = False

    def partitions(self) -> list[str]:
        return list(self.messages)

    def start_of(self, partition: str) -> str:
        return START

    def last_of(self, partition: str) -> str:
        return str(len(self.messages[partition]) - 1) if self.messages[partition] else START

    def order_of(self, offset: str) -> int:
        return int(offset)

    def seek(self, positions: Mapping[str, str]) -> None:
        for partition, position in positions.items():
            offset, rows = offset_and_rows(position)
            self._next[partition] = int(offset) + (not rows) if offset else 0

    def poll(self, wanted: Collection[str], timeout_s: float) -> Sequence[Message]:
        self.polled.append(set(wanted))
        found = []
        for name in self._random.sample(sorted(wanted), self._random.randint(0, len(wanted))):
            first = self._next[name]
            stop = min(first + self._random.randint(0, 7), len(self.messages[name]))
            self._next[name] = stop
            found += [
                Message(name, str(offset), *self.messages[name][offset])
                for offset in range(first, stop)
            ]
            if stop == len(self.messages[name]):
                self.at_end.add(name)
            else:
                self.at_end.discard(name)
        return found

    def lag(self) -> Mapping[str, int]:
        return {name: len(self.messages[name]) - at for name, at in self._next.items()}

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def redis_server(folder: Path, port: int = 0, *, keeps: bool = False) -> Iterator[int]:
    """Runs a Redis server, which may keep its data in the folder; yields its port, 0: a free one."""
    if is_missing("redis-server"):
        pytest.skip("needs redis-server")
    log = folder / "redis.log"
    with socket.socket() as free:  # to Redis port 0 is none
        free.bind(("127.0.0.1", 0))
        port = port or free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--dir", str(folder), "--appendonly", "yes" if keeps else "no"],
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: b"Ready to accept" in log.read_bytes())
        yield port
    finally:
        process.terminate()
        process.wait(10)


class Broker:
    """Kafka's mock brokers in a process; `produce` adds messages by partition."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self._process = process
        self.address = address

    def produce(self, topic: str, messages: Mapping[int, Sequence[tuple[int, bytes]]]) -> None:
        """Adds messages to partitions 0 to 3."""
        assert self._process.stdin
        assert self._process.stdout
        texts = {
            key: [[at, value.decode()] for at, value in each] for key, each in messages.items()
        }
        self._process.stdin.write(json.dumps([topic, texts]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def pause(self) -> None:
        """Has the brokers answer nothing until `resume`."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def kafka_broker() -> Iterator[Broker]:
    """Runs Kafka's mock brokers, of which each topic has 4 partitions."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.streams"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout
        yield Broker(process, process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def _serve() -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1})
    brokers = producer.list_topics(timeout=10).brokers.values()
    print(",".join(f"{each.host}:{each.port}" for each in brokers), flush=True)
    for line in sys.stdin:
        topic, messages = json.loads(line)
        producer.list_topics(topic, timeout=10)  # makes it
        for partition, each in messages.items():
            for at, value in each:
                producer.produce(topic, value.encode(), partition=int(partition), timestamp=at)
            producer.flush(30)
        print("done", flush=True)


if __name__ == "__main__":
    _serve()
