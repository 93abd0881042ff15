"""Writes clicks of a known model to a stream, a row of JSON a message: docs/online.md.

    python examples/online/producer.py redis://127.0.0.1:6379/clicks --rate 500
    python examples/online/producer.py kafka://broker:9092/clicks --rows 100000

Each user likes some kinds of items, and tastes drift: a model that stops learning gets worse by the hour.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from urllib.parse import urlsplit

USERS, ITEMS, KINDS = 200, 60, 4


def probability(user: int, item: int, seconds: float) -> float:
    """Returns the probability of a click; a taste passes from kind to kind within an hour."""
    phase = 2 * math.pi * (seconds / 3600 + (user % KINDS - item % KINDS) / KINDS)
    return 1 / (1 + math.exp(2.0 - 1.5 * math.cos(phase)))


def row(seconds: float) -> dict[str, object]:
    """Returns a row of the event time `seconds` since 1970."""
    user, item = random.randrange(USERS), int(ITEMS * random.random() ** 2)
    click = int(random.random() < probability(user, item, seconds))
    hour = time.gmtime(seconds).tm_hour
    return {"click": click, "user": f"u{user}", "item": f"i{item}", "hour": hour}


def sender(url: str) -> Callable[[bytes], object]:
    """Returns what sends a message."""
    parts = urlsplit(url)
    name = parts.path.lstrip("/")
    if parts.scheme == "kafka":
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": parts.netloc})

        def produce(value: bytes) -> None:
            producer.produce(name, value)
            producer.poll(0)

        return produce
    import redis

    client = redis.Redis(host=parts.hostname or "127.0.0.1", port=parts.port or 6379)
    return lambda value: client.xadd(name, {"value": value}, maxlen=10_000_000, approximate=True)


def main() -> None:
    """Reads the options, and writes rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="kafka://BROKER/TOPIC or redis://HOST:PORT/KEY")
    parser.add_argument("--rate", type=float, default=500.0, help="rows a second")
    parser.add_argument("--rows", type=int, default=0, help="rows to write; 0: until Ctrl-C")
    options = parser.parse_args()
    send, start, number = sender(options.url), time.time(), 0
    while not options.rows or number < options.rows:
        now = time.time()
        due = int((now - start) * options.rate)
        while number < due and (not options.rows or number < options.rows):
            send(json.dumps(row(now)).encode())
            number += 1
        time.sleep(0.01)


if __name__ == "__main__":
    main()
