"""The same behaviour of all sources: Kafka's mock brokers, a Redis server, a folder of files."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.streams import redis_streams
from ctr_ps.ps_worker.data.streams.folder import FolderSource
from ctr_ps.ps_worker.data.streams.merging import Merger
from ctr_ps.ps_worker.data.streams.redis_streams import RedisSource
from ctr_ps.ps_worker.data.streams.source import (
    Message,
    StreamSource,
    has_reached,
    open_source,
    owner_of,
    stream_url,
)
from tests.support.processes import free_port
from tests.support.streams import Broker, redis_server
from tests.support.waiting import wait_until

START_MS = 1_700_000_000_000


@dataclass
class Stream:
    """A stream of one kind: its URL, and a function that adds messages of a partition from 0 to 3."""

    url: str
    add: Callable[[int, Sequence[tuple[int, bytes]]], None]
    value_of: Callable[[Message], bytes] = lambda message: message.value


@pytest.fixture(params=["kafka", "redis", "folder"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Stream:
    topic = f"{request.node.name}"[:60].replace("[", "-").replace("]", "")
    if request.param == "kafka":
        broker: Broker = request.getfixturevalue("broker")
        broker.produce(topic, {})
        return Stream(
            f"kafka://{broker.address}/{topic}",
            lambda partition, messages: broker.produce(topic, {partition: messages}),
        )
    if request.param == "redis":
        redis_port = request.getfixturevalue("redis_port")
        client = redis.Redis(port=redis_port)

        def add(partition: int, messages: Sequence[tuple[int, bytes]]) -> None:
            for at, value in messages:
                client.xadd(f"{topic}-{partition}", {"value": value}, id=f"{at}-*")

        keys = ",".join(f"{topic}-{k}" for k in range(4))
        return Stream(f"redis://127.0.0.1:{redis_port}/{keys}", add)
    names = {number: _names_of(number) for number in range(4)}

    def write(partition: int, messages: Sequence[tuple[int, bytes]]) -> None:
        for at, value in messages:
            hidden = tmp_path / ".new"
            hidden.write_bytes(value)
            os.utime(hidden, ns=(at * 1_000_000, at * 1_000_000))
            hidden.rename(tmp_path / next(names[partition]))

    return Stream(
        f"folder://{tmp_path}?partitions=4",
        write,
        lambda message: Path(message.value.decode()).read_bytes(),
    )


def _names_of(partition: int) -> Iterator[str]:
    """Names in order that go to a partition of 4."""
    import itertools
    import zlib

    for number in itertools.count():
        name = f"part-{number}"
        if zlib.crc32(name.encode()) % 4 == partition:
            yield name


def opened(stream: Stream, options: str = "") -> StreamSource:
    mark = "&" if "?" in stream.url else "?"
    return open_source(stream_url(stream.url + (mark + options if options else "")))


def read(
    source: StreamSource, number: int, partitions: Sequence[str] | None = None
) -> list[Message]:
    found: list[Message] = []

    def has_all() -> bool:
        found.extend(source.poll(partitions or source.partitions(), 0.5))
        return len(found) >= number

    wait_until(has_all)
    return found


def values(stream: Stream, messages: Sequence[Message], partition: str) -> list[bytes]:
    return [stream.value_of(each) for each in messages if each.partition == partition]


MESSAGES: Mapping[int, list[tuple[int, bytes]]] = {
    0: [(START_MS + 10 * k, b"zero %d" % k) for k in range(5)],
    2: [(START_MS + 10 * k + 1, b"two %d" % k) for k in range(3)],
}


def filled(stream: Stream) -> Stream:
    for partition, messages in MESSAGES.items():
        stream.add(partition, messages)
    return stream


def test_a_partition_is_read_in_its_order_up_to_its_end(stream: Stream) -> None:
    source = opened(filled(stream))
    names = source.partitions()
    source.seek(dict.fromkeys(names, ""))

    found = read(source, 8)
    wait_until(lambda: bool(source.poll(names, 0.2)) or source.at_end >= set(names))

    assert len(names) == 4
    for partition, messages in MESSAGES.items():
        name = next(each for each in names if owner_of(each, 4) == partition)
        assert values(stream, found, name) == [value for _, value in messages]
        own = [each.time_ms for each in found if each.partition == name]
        assert own == [at for at, _ in messages]
    assert sum(source.lag().values()) == 0
    source.close()


def test_reading_goes_on_after_a_position(stream: Stream) -> None:
    filled(stream)
    first = opened(stream)
    names = first.partitions()
    first.seek(dict.fromkeys(names, ""))
    messages = [each for each in read(first, 8) if each.partition == names[0]]
    first.close()

    for position, expected in (
        (messages[1].offset, MESSAGES[0][2:]),
        (f"{messages[1].offset} +3", MESSAGES[0][1:]),
    ):
        source = opened(stream)
        source.seek({names[0]: position})
        found = read(source, len(expected), names[:1])
        assert [stream.value_of(each) for each in found] == [value for _, value in expected]
        source.close()


def test_messages_that_come_later_are_read(stream: Stream) -> None:
    source = opened(filled(stream))
    names = source.partitions()
    source.seek(dict.fromkeys(names, ""))
    read(source, 8)

    stream.add(3, [(START_MS + 99, b"new")])

    assert [stream.value_of(each) for each in read(source, 1)] == [b"new"]
    source.close()


def test_a_run_starts_at_a_time_or_at_the_end(stream: Stream) -> None:
    filled(stream)
    for options, expected in (
        ("start=2023-11-14T22:13:20.020", [b"zero 2", b"zero 3", b"zero 4"]),
        ("start=latest", []),
        ("start=earliest", [value for _, value in MESSAGES[0]]),
    ):
        if "kafka" in stream.url and "T" in options:
            continue  # mock brokers know no times; see below
        source = opened(stream, options)
        name = source.partitions()[0]
        source.seek({name: source.start_of(name)})
        stream_values = []
        for _ in range(3):
            stream_values += [stream.value_of(each) for each in source.poll([name], 0.3)]
        assert stream_values == expected, options
        source.close()


def test_kafka_is_asked_for_the_offset_of_a_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from confluent_kafka import TopicPartition

    broker.produce("times", {0: MESSAGES[0]})
    source: Any = open_source(
        stream_url(f"kafka://{broker.address}/times?start=2023-11-14T22:13:20.020")
    )
    asked = []

    class Timed:
        def offsets_for_times(self, positions: list[TopicPartition], timeout: float) -> Any:
            asked.extend((each.topic, each.partition, each.offset) for each in positions)
            return [TopicPartition("times", 0, 2)]

    monkeypatch.setattr(source, "_consumer", Timed())

    assert source.start_of("times/0") == "1"
    assert asked == [("times", 0, START_MS + 20)]


def test_the_last_message_is_known_and_offsets_compare(stream: Stream) -> None:
    source = opened(filled(stream))
    names = source.partitions()
    source.seek(dict.fromkeys(names, ""))
    messages = [each for each in read(source, 8) if each.partition == names[0]]

    assert source.last_of(names[0]) == messages[-1].offset
    assert source.last_of(names[1]) == ""
    assert has_reached(source, messages[2].offset, messages[1].offset)
    assert has_reached(source, messages[1].offset, messages[1].offset)
    assert not has_reached(source, messages[0].offset, messages[1].offset)
    assert not has_reached(source, "", messages[0].offset)
    assert has_reached(source, "", "")
    source.close()


def test_only_wanted_partitions_are_polled(stream: Stream) -> None:
    source = opened(filled(stream))
    names = source.partitions()
    source.seek(dict.fromkeys(names, ""))

    first = []
    for _ in range(3):
        first += source.poll([names[2]], 0.3)
    second = read(source, 5)

    assert {each.partition for each in first} == {names[2]}
    assert {each.partition for each in second} == {names[0]}
    assert len(second) == 5
    source.close()


def test_offsets_that_are_gone_are_named(redis_port: int, broker: Broker) -> None:
    client = redis.Redis(port=redis_port)
    for number in range(5):
        client.xadd("trimmed", {"value": b"x"}, id=f"{number + 1}-0")
    client.xtrim("trimmed", maxlen=1, approximate=False)
    broker.produce("short", {0: [(1, b"x")]})

    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/trimmed"))
    with pytest.raises(DataError, match="'trimmed' is 5-0, but the run goes on after 2-0"):
        source.seek({"trimmed": "2-0"})
    source.close()
    source = open_source(stream_url(f"kafka://{broker.address}/short"))
    with pytest.raises(DataError, match="has offsets 0 to 0, but the run goes on at 8"):
        source.seek({"short/0": "7"})
    source.close()


@pytest.mark.parametrize("at_end", [True, False])
def test_messages_that_are_trimmed_while_a_redis_stream_is_read_are_counted(
    redis_port: int, *, at_end: bool
) -> None:
    client, key = redis.Redis(port=redis_port), f"trim-{at_end}"

    def add(*numbers: int) -> None:
        for number in numbers:
            client.xadd(key, {"value": b"x"}, id=f"{number}-0")

    add(1, 2, 3)
    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/{key}"))
    source.seek({key: "" if at_end else "3-0"})
    if at_end:
        read(source, 3)
    add(4, 5)
    client.xtrim(key, minid="4-0", approximate=False)
    assert [each.offset for each in read(source, 2)] == ["4-0", "5-0"], "nothing is lost"
    add(6, 7, 8, 9)
    client.xdel(key, "6-0", "8-0")
    assert [each.offset for each in read(source, 2)] == ["7-0", "9-0"], "they were deleted"
    add(10, 11, 12, 13)
    client.xtrim(key, maxlen=2, approximate=False)

    with pytest.raises(
        DataError, match=r"is 12-0, but the run goes on after 9-0, .* gone \(2 messages\)"
    ):
        source.poll([key], 1.0)
    source.close()


def test_lag_of_redis_counts_messages_far_behind_once_their_number_is_known(
    redis_port: int,
) -> None:
    client = redis.Redis(port=redis_port)

    def add(number: int, first: int) -> None:
        pipe = client.pipeline()
        for at in range(first, first + number):
            pipe.xadd("far", {"value": b"x"}, id=f"{at}-1")
        pipe.execute()

    add(3_000, first=1)
    client.xtrim("far", maxlen=2_500, approximate=False)
    from_start = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/far,absent"))
    from_start.seek({"far": "", "absent": ""})
    further = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/far"))
    further.seek({"far": "1000-1"})

    assert from_start.lag() == {"far": 2_500, "absent": 0}
    assert further.lag() == {"far": 4}, "at least"
    first = read(from_start, 1_000)
    assert from_start.lag()["far"] == 2_500 - len(first)
    read(further, 2_000)
    assert further.lag() == {"far": 0}
    before = from_start.lag()["far"]
    add(7_000, first=3_001)
    assert further.lag() == {"far": 7_000}, "it was at the end, so it knows its number"
    assert from_start.lag()["far"] == before + 7_000
    from_start.close()
    further.close()


def test_a_redis_server_that_goes_away_and_comes_back_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server(tmp_path, keeps=True) as port:
        client = redis.Redis(port=port)
        client.xadd("kept", {"value": b"1"}, id="1-0")
        source = open_source(stream_url(f"redis://127.0.0.1:{port}/kept"))
        source.seek({"kept": ""})
        first = read(source, 1)
        client.xadd("kept", {"value": b"2"}, id="2-0")

    lag = source.lag()
    assert [source.poll(["kept"], 0.1) for _ in range(2)] == [[], []]
    assert caplog.text.count("a server is away, and waited for") == 1
    with redis_server(tmp_path, keeps=True, port=port):
        client.xadd("kept", {"value": b"3"}, id="3-0")
        found = first + read(source, 2)

        assert [each.value for each in found] == [b"1", b"2", b"3"]
        assert (lag, source.lag()) == ({}, {"kept": 0})
        source.close()


class Flaky:
    """A Redis client whose connection is lost at some calls, numbered from 0."""

    def __init__(self, client: Any, lost: range) -> None:
        self._client, self._lost, self.calls = client, lost, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls - 1 in self._lost:
                raise redis.ConnectionError("lost")
            return getattr(self._client, name)(*args, **options)

        return call


def test_a_connection_that_is_lost_at_any_call_loses_no_message(
    redis_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_streams, "_PAUSE_S", 0.01)
    client, keys = redis.Redis(port=redis_port), ("flaky-0", "flaky-1", "flaky-2")
    for number in range(30):
        client.xadd(keys[number % 3], {"value": str(number)}, id=f"{number + 1}-0")
    url = stream_url(f"redis://127.0.0.1:{redis_port}/{','.join(keys)}?end=latest")
    at, calls = 0, 1
    while at < calls:
        source = cast(RedisSource, open_source(url))
        ends = {key: source.last_of(key) for key in keys}
        flaky = Flaky(source._redis, range(at, at + 2))
        monkeypatch.setattr(source, "_redis", flaky)
        merger = Merger(source, dict.fromkeys(keys, ""), ends=ends, stall_limit_s=10.0)
        found: list[Message] = []
        while not merger.is_over:
            found += merger.take(math.inf, 0.01)

        assert [int(each.value) for each in found] == [*range(30)], at
        at, calls = at + 1, flaky.calls
    assert calls > 12


def test_a_redis_server_that_lost_unread_messages_is_named(redis_port: int) -> None:
    client, key = redis.Redis(port=redis_port), "less"
    for number in range(30):
        client.xadd(key, {"value": b"1"}, id=f"{number + 1}-0")
    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/{key}"))
    source.seek({key: ""})
    assert len(source.poll([key], 0.1)) < 30
    client.delete(key)
    for number in range(50, 60):
        client.xadd(key, {"value": b"2"}, id=f"{number}-0")

    with pytest.raises(DataError, match="what was between is gone"):
        source.poll([key], 0.1)
    source.close()


def test_a_time_to_start_at_needs_no_message_before_it(redis_port: int) -> None:
    client, key = redis.Redis(port=redis_port), "from-time"
    client.xadd(key, {"value": b"1"}, id="1000-0")
    url = f"redis://127.0.0.1:{redis_port}/{key}?start=1970-01-01T00:00:02"
    source = open_source(stream_url(url))
    source.seek({key: source.start_of(key)})
    client.xtrim(key, 0)
    client.xadd(key, {"value": b"2"}, id="3000-0")

    assert [each.value for each in source.poll([key], 0.1)] == [b"2"]
    source.close()


def test_a_password_may_have_any_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cr/et?#@:")

    url = stream_url("redis://user:$SECRET@127.0.0.1:1/clicks")

    options = redis.connection.parse_url(f"redis://{url.address}")
    assert (options["host"], options["port"]) == ("127.0.0.1", 1)
    assert (options["username"], options["password"]) == ("user", "s3cr/et?#@:")


def test_a_key_that_is_not_there_yet_and_an_unknown_option_of_redis_are_named(
    redis_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis://127.0.0.1:{redis_port}/not-yet"

    open_source(stream_url(url)).close()
    with pytest.raises(UsageError, match="unexpected option 'colour'"):
        open_source(stream_url(f"{url}?colour=red"))

    assert caplog.messages == [f"{url}: there is no key 'not-yet' yet, it is waited for"]


def test_one_message_that_was_trimmed_is_lost_and_one_that_was_deleted_is_not(
    redis_port: int,
) -> None:
    client = redis.Redis(port=redis_port)
    for number in range(1, 7):
        client.xadd("one", {"value": b"x"}, id=f"{number}-0")
    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/one"))
    source.seek({"one": ""})
    assert len(read(source, 6)) == 6
    for number in range(7, 9):
        client.xadd("one", {"value": b"x"}, id=f"{number}-0")
    client.xtrim("one", minid="7-0", approximate=False)
    client.xdel("one", "7-0")
    assert [each.offset for each in read(source, 1)] == ["8-0"]
    for number in range(9, 12):
        client.xadd("one", {"value": b"x"}, id=f"{number}-0")
    assert [each.offset for each in read(source, 3)] == ["9-0", "10-0", "11-0"]
    for number in range(12, 15):
        client.xadd("one", {"value": b"x"}, id=f"{number}-0")
    client.xtrim("one", minid="13-0", approximate=False)

    with pytest.raises(DataError, match=r"is 13-0, .* after 11-0, .* gone \(1 message\)"):
        source.poll(["one"], 1.0)
    source.close()


def test_a_redis_server_that_is_away_at_the_start_is_waited_for_but_not_one_that_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with free_port() as port:
        url = stream_url(f"redis://127.0.0.1:{port}/kept")
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_source, url)
        wait_until(lambda: f"a server is away, and waited for: {url}" in caplog.text)
        with redis_server(tmp_path, port=port):
            source = opening.result(30)
            assert source.partitions() == ["kept"]
            source.close()
            redis.Redis(port=port).config_set("requirepass", "secret")
            monkeypatch.setenv("SECRET", "another")
            with pytest.raises(DataError, match="invalid username-password pair"):
                open_source(stream_url(f"redis://127.0.0.1:{port}/kept?password=$SECRET"))


def test_each_time_that_a_redis_server_is_away_is_told_once(
    redis_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source: Any = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/times"))
    is_away = iter([True, True, False, True, True])

    def poll(*_: object) -> None:
        if next(is_away):
            raise redis_streams._AwayError("no answer")

    monkeypatch.setattr(source, "_poll", poll)
    for _ in range(5):
        assert source.poll(["times"], 0.0) == []

    assert caplog.text.count("a server is away, and waited for: no answer") == 2
    source.close()


def test_after_large_messages_of_redis_more_come_at_a_time_again(redis_port: int) -> None:
    client = redis.Redis(port=redis_port)
    for size in (4 << 20, *[1] * 399):
        client.xadd("larger", {"value": b"x" * size})
    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/larger"))
    source.seek({"larger": ""})

    assert [len(source.poll(["larger"], 0.5)) for _ in range(9)] == [
        4,
        4,
        8,
        16,
        32,
        64,
        128,
        144,
        0,
    ]
    source.close()


def test_large_messages_of_redis_come_a_few_at_a_time(redis_port: int) -> None:
    client, size = redis.Redis(port=redis_port), 5 << 20
    for number in range(12):
        client.xadd("large", {"value": b"x" * size}, id=f"{number + 1}-0")
    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/large"))
    source.seek({"large": ""})

    assert [len(source.poll(["large"], 0.5)) for _ in range(4)] == [4, 3, 3, 2]
    source.close()


def test_kafka_delivers_messages_above_the_limits_of_a_fetch(broker: Broker) -> None:
    """`fetch.message.max.bytes` and the like are no limits of a message; one is, and the client names it."""
    value = b"x" * 400_000
    broker.produce("large", {0: [(1, value), (2, b"y")]})
    limits = "fetch.message.max.bytes=1000&message.max.bytes=2000&fetch.max.bytes=3000"
    source = open_source(stream_url(f"kafka://{broker.address}/large?{limits}"))
    source.seek({"large/0": ""})
    assert [each.value for each in read(source, 2, ["large/0"])] == [value, b"y"]
    source.close()


def test_a_kafka_message_that_no_answer_has_room_for_ends_the_run(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.produce("huge", {0: [(1, b"x" * 400_000)]})
    limits = "message.max.bytes=2000&fetch.max.bytes=3000&receive.message.max.bytes=4000"
    source = open_source(stream_url(f"kafka://{broker.address}/huge?{limits}"))
    merger = Merger(source, {"huge/0": ""}, stall_limit_s=1.5)

    with pytest.raises(DataError, match="partition huge/0 has messages, but none came"):
        merger.take(float("inf"), 0.0)
    assert "increase receive.message.max.bytes" in caplog.text
    source.close()


def test_redis_messages_without_the_field_are_all_fields_as_json(redis_port: int) -> None:
    client = redis.Redis(port=redis_port)
    client.xadd("fields", {"click": 1, "user": "é"}, id="5-1")
    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/fields"))
    source.seek({"fields": ""})

    (message,) = source.poll(["fields"], 1.0)

    assert message == Message("fields", "5-1", 5, b'{"click": "1", "user": "\\u00e9"}')
    source.close()


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("amqp://host/queue", "is not a stream: expected one of kafka://"),
        ("kafka://host:9092/", "names no stream, expected one such as kafka://broker:9092/topic"),
        ("redis://host:6379", "names no stream, expected one such as redis://host:6379/key"),
        ("kafka://host:9092/clicks?start=yesterday", "start is 'yesterday', expected earliest"),
        ("kafka://host:9092/clicks?start=2026-13-05", "start is '2026-13-05', expected earliest"),
        ("folder:///tmp?color=red", "has the unknown option 'color'"),
        ("folder://data/in", "write folder:///data/in, with three slashes"),
        ("kafka://me:pw@host/x", r"kafka://host/x: a password is saved with the job"),
        (
            "kafka://host/x?sasl.password=pw",
            r"write a variable of the environment, as sasl.password=\$NAME",
        ),
        ("kafka://host/x?sasl.password=$MISSING_ONE", "the environment has no MISSING_ONE"),
        ("kafka://127.0.0.1:1/clicks?no.such=1", 'No such configuration property: "no.such"'),
        ("redis://127.0.0.1:1/clicks?no_such=1", "no_such"),
    ],
)
def test_wrong_urls_are_refused(url: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        open_source(stream_url(url))


def test_files_that_come_too_late_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "part-2").write_text("x")
    source = FolderSource(stream_url(f"folder://{tmp_path}?partitions=1"))
    source.seek({"0": ""})
    source.poll(["0"], 0.0)

    (tmp_path / "part-1").write_text("x")
    found = [source.poll(["0"], 0.0) for _ in range(2)]

    assert found == [[], []]
    assert [each.message for each in caplog.records] == [
        "a file came after later ones, and is not read: part-1"
    ]


@pytest.mark.parametrize("cause", ["emptied", "deleted", "overtaken"])
def test_messages_of_redis_that_are_trimmed_unread_are_named(redis_port: int, cause: str) -> None:
    client = redis.Redis(port=redis_port)
    for number in range(1, 6):
        client.xadd(cause, {"value": b"x"}, id=f"{number}-0")
    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/{cause}"))
    if cause == "overtaken":
        source.seek({cause: "2-0"})
        client.xtrim(cause, maxlen=1, approximate=False)
    elif cause == "emptied":
        client.xtrim(cause, maxlen=0, approximate=False)
    else:
        client.delete(cause)

    def go_on() -> object:
        return source.poll([cause], 0.1) if cause == "overtaken" else source.seek({cause: "2-0"})

    with pytest.raises(DataError, match="and what was between is gone"):
        go_on()
    source.close()


def test_what_was_read_may_be_trimmed(redis_port: int) -> None:
    client = redis.Redis(port=redis_port)
    client.xadd("read", {"value": b"x"}, id="1-0")
    source = open_source(stream_url(f"redis://127.0.0.1:{redis_port}/read?socket_timeout=5&db=0"))
    source.seek({"read": ""})
    source.poll(["read"], 0.1)
    client.xtrim("read", maxlen=0, approximate=False)
    client.xadd("read", {"value": b"y"}, id="2-0")

    assert [each.value for each in source.poll(["read"], 0.1)] == [b"y"]
    source.close()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        FolderSource(stream_url(f"folder://{tmp_path}/none"))


def test_unfinished_files_are_not_read(tmp_path: Path) -> None:
    for name in (".hidden", "_SUCCESS", "part.tmp", "part-1.jsonl"):
        (tmp_path / name).write_text("x")
    source = FolderSource(stream_url(f"folder://{tmp_path}?partitions=1"))
    source.seek({"0": ""})

    assert [each.offset for each in source.poll(["0"], 0.0)] == ["part-1.jsonl"]


def test_passwords_come_from_the_environment_and_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET", "p4ss")

    url = stream_url("redis://:$SECRET@host:6379/clicks?username=me&password=$SECRET&field=v")

    assert url.address == ":p4ss@host:6379"
    assert url.options == {"username": "me", "password": "p4ss", "field": "v"}
    assert str(url) == "redis://host:6379/clicks"
    assert "p4ss" not in str(url)


def test_a_broker_that_goes_away_is_waited_for(broker: Broker) -> None:
    broker.produce("away", {0: MESSAGES[0]})
    source = open_source(stream_url(f"kafka://{broker.address}/away?socket.timeout.ms=1000"))
    source.seek({"away/0": "1"})
    before = read(source, 3, ["away/0"])
    broker.pause()
    try:
        while_away = [each for _ in range(3) for each in source.poll(["away/0"], 0.5)]
    finally:
        broker.resume()
    broker.produce("away", {0: [(START_MS + 99, b"after")]})

    assert [each.value for each in before] == [b"zero 2", b"zero 3", b"zero 4"]
    assert while_away == []
    assert [each.value for each in read(source, 1, ["away/0"])] == [b"after"]
    source.close()
