"""Writes clicks of a known model to a stream, a row of JSON a message: docs/online.md.

    python examples/online/producer.py redis://127.0.0.1:6379/clicks-0,clicks-1 --rate 500
    python examples/online/producer.py kafka://broker:9092/clicks --rows 100000
    python examples/online/producer.py redis://127.0.0.1:6379/clicks-0,clicks-1 --fan ann --rate 50

Some items please everybody, each user likes some kinds of them, and tastes drift: a model that stops learning
gets worse by the hour.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

USERS, ITEMS, KINDS = 200, 60, 4


def probability(user: int, item: int, seconds: float) -> float:
    """Returns the probability of a click; a taste passes from kind to kind within an hour."""
    phase = 2 * math.pi * (seconds / 3600 + (user % KINDS - item % KINDS) / KINDS)
    return 1 / (1 + math.exp(2.0 - math.cos(item) - 1.5 * math.cos(phase)))


def row(seconds: float, fan: str) -> dict[str, object]:
    """Returns a row of the event time `seconds` since 1970; a fan clicks on everything."""
    user, item = random.randrange(USERS), int(ITEMS * random.random() ** 2)
    click = int(bool(fan) or random.random() < probability(user, item, seconds))
    hour = time.gmtime(seconds).tm_hour
    return {"click": click, "user": fan or f"u{user}", "item": f"i{item}", "hour": hour}


def to_kafka(
    brokers: str, topics: Sequence[str]
) -> tuple[Callable[[bytes], object], Callable[[], object]]:
    """Returns what sends a message, and what waits until all are there."""
    from confluent_kafka import KafkaException, Producer

    producer = Producer({"bootstrap.servers": brokers})
    try:
        producer.list_topics(timeout=10)
    except KafkaException as error:
        raise ConnectionError(f"no Kafka at {brokers}: {error.args[0].str()}") from error

    def send(value: bytes) -> None:
        producer.produce(random.choice(topics), value)
        producer.poll(0)

    return send, lambda: producer.flush(60)


def to_redis(
    host: str, port: int, keys: Sequence[str]
) -> tuple[Callable[[bytes], object], Callable[[], object]]:
    """Returns what sends a message, and what waits until all are there."""
    import redis

    client = redis.Redis(host=host, port=port)
    try:
        client.ping()
    except redis.ConnectionError as error:
        raise ConnectionError(f"no Redis at {host}:{port}, start one: redis-server") from error

    def send(value: bytes) -> object:
        key = random.choice(keys)
        return client.xadd(key, {"value": value}, maxlen=10_000_000, approximate=True)

    return send, lambda: None


def main() -> None:
    """Reads the options, and writes rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "url", help="kafka://BROKER/TOPIC or redis://HOST:PORT/KEY; commas between several"
    )
    parser.add_argument("--rate", type=float, default=500.0, help="rows a second")
    parser.add_argument("--rows", type=int, default=0, help="rows to write; 0: until Ctrl-C")
    parser.add_argument(
        "--fan", default="", help="only rows of this user, who clicks on everything"
    )
    options = parser.parse_args()
    parts = urlsplit(options.url)
    names = parts.path.lstrip("/").split(",")
    try:
        if parts.scheme == "kafka":
            send, flush = to_kafka(parts.netloc, names)
        else:
            send, flush = to_redis(parts.hostname or "127.0.0.1", parts.port or 6379, names)
    except ImportError as error:
        sys.exit(f"{error}: pip install 'ctr-ps[{parts.scheme}]'")
    except ConnectionError as error:
        sys.exit(str(error))
    start, number = time.time(), 0
    while not options.rows or number < options.rows:
        now = time.time()
        due = int((now - start) * options.rate)
        while number < due and (not options.rows or number < options.rows):
            send(json.dumps(row(now, options.fan)).encode())
            number += 1
        time.sleep(0.01)
    flush()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
