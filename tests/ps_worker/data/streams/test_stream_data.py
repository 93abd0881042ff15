"""Batches of a stream: each row once, wherever reading stops and goes on."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import BadRowError
from ctr_ps.protos.store import WorkerProgress
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block, DataPosition
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling
from ctr_ps.ps_worker.data.streams import stream_data
from ctr_ps.ps_worker.data.streams.decoding import Lost, MessageDecoder
from ctr_ps.ps_worker.data.streams.source import stream_url
from ctr_ps.ps_worker.data.streams.stream_data import (
    END,
    LATE_S,
    StreamData,
    StreamPosition,
    StreamSettings,
    dealt_again,
    newest_ms,
    position_of,
    without_ends,
)
from tests.support.streams import MemorySource, Messages, clicks

SCHEMA = Schema(slots=("user", "item"), dense=(), label="click")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `data` opens: set "messages", and "seed" for the pieces that they come in."""
    found: dict[str, Any] = {"seed": 0}
    monkeypatch.setattr(
        stream_data,
        "open_source",
        lambda _: MemorySource(found["messages"], Random(found["seed"])),
    )
    return found


def data(
    positions: Mapping[str, str] | None = None,
    *,
    options: str = "?end=latest",
    worker: int = 0,
    num_workers: int = 1,
    batch_size: int = 8,
    decoder: MessageDecoder | None = None,
    **others: Any,
) -> StreamData:
    settings = StreamSettings(
        url=stream_url(f"kafka://broker:9092/clicks{options}"),
        schema=SCHEMA,
        batch_size=batch_size,
        worker=worker,
        num_workers=num_workers,
    )
    decoder = decoder or MessageDecoder("clicks", SCHEMA, "json", BadRows())
    return StreamData(settings, decoder, positions=positions or {}, **others)


def items(batch: Batch) -> list[int]:
    """The keys of slot "item", of which each row has its own."""
    return batch.keys[1::2].tolist()


def places(position: StreamPosition) -> dict[str, str]:
    """Where reading is in each partition, without its end."""
    return {name: at for name, at in position.partitions.items() if not name.startswith(END)}


def rows_of(messages: Messages) -> list[int]:
    """The keys of all rows in the order of the times of their messages."""
    ordered = sorted(
        (at, name, offset, value)
        for name, each in messages.items()
        for offset, (at, value) in enumerate(each)
    )
    texts = [line for *_, value in ordered for line in value.splitlines()]
    return [int(key_of(2, json.loads(text)["item"])) for text in texts]


def three_partitions() -> Messages:
    return {f"clicks/{k}": clicks(20, seed=k, start_ms=k) for k in range(3)}


def test_batches_have_the_rows_of_all_partitions_in_the_order_of_time(stream: Any) -> None:
    stream["messages"] = three_partitions()

    batches = [batch for batch, _ in data().batches(1)]

    assert [key for batch in batches for key in items(batch)] == rows_of(stream["messages"])
    assert {batch.size for batch in batches[:-1]} == {8}


@settings(max_examples=30, deadline=None)
@given(stops=st.lists(st.integers(1, 9), max_size=8), seed=st.integers(0, 2**32))
def test_reading_goes_on_after_the_last_row_from_any_position(stops: list[int], seed: int) -> None:
    messages = three_partitions()
    random = Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_data, "open_source", lambda _: MemorySource(messages, random))
        found: list[int] = []
        positions: dict[str, str] = {}
        for stop in [*stops, None]:
            for number, (batch, position) in enumerate(data(positions).batches(1)):
                if number == stop:
                    break
                found += items(batch)
                positions |= position.partitions

    assert found == rows_of(messages)


def test_a_position_inside_a_message_has_the_row_in_it(stream: Any) -> None:
    stream["messages"] = {
        "clicks/0": [*clicks(1, rows=1), (5, b"\n".join(_line(k) for k in range(5)))]
    }

    batches = data(batch_size=3).batches(1)

    assert places(next(batches)[1]) == {"clicks/0": "1 +2"}
    assert places(next(batches)[1]) == {"clicks/0": "1"}


def _line(number: int) -> bytes:
    return json.dumps({"click": 0, "user": "u", "item": f"{number}"}).encode()


@pytest.mark.parametrize("before_ms", [50, 100])
def test_a_pass_ends_before_a_time_and_the_next_begins_there(stream: Any, before_ms: int) -> None:
    stream["messages"] = three_partitions()
    reader = data()

    first = [batch for batch, _ in reader.batches(1, before_ms=before_ms)]
    next_ms = reader.next_ms()
    rest = [batch for batch, _ in reader.batches(2)]

    earlier = {
        name: [each for each in of_name if each[0] < before_ms]
        for name, of_name in stream["messages"].items()
    }
    assert [key for batch in first for key in items(batch)] == rows_of(earlier)
    assert next_ms == before_ms
    assert [key for batch in first + rest for key in items(batch)] == rows_of(stream["messages"])
    assert reader.next_ms() == float("inf")


def test_a_pass_of_a_number_of_rows_has_as_many(stream: Any) -> None:
    stream["messages"] = three_partitions()
    reader = data()

    sizes = [
        sum(batch.size for batch, _ in reader.batches(number, max_rows=50, rows=10 * (number == 1)))
        for number in range(1, 4)
    ]

    whole = len(rows_of(stream["messages"]))
    assert sizes == [40, 50, whole - 90]


def test_partitions_of_all_workers_are_those_of_the_stream(stream: Any) -> None:
    stream["messages"] = {f"clicks/{k}": clicks(5, seed=k) for k in range(7)}

    own = [data(worker=worker, num_workers=3).partitions for worker in range(3)]

    assert own[1] == ["clicks/1", "clicks/4"]
    assert sorted(each for of_worker in own for each in of_worker) == sorted(stream["messages"])


@pytest.mark.parametrize("sent", [1, 2, 3])
def test_batches_that_a_lost_process_sent_are_of_the_very_rows(stream: Any, sent: int) -> None:
    """Even where messages have come since, which would be before them."""
    stream["messages"] = three_partitions()
    late = stream["messages"].pop("clicks/0")
    stream["messages"]["clicks/0"] = []
    lost = data(batch_size=10).batches(1)
    first_batch, first = next(lost)
    further = [next(lost) for _ in range(sent)]
    positions, sent_positions = dict(first.partitions), dict[str, str]()
    for _, position in further:
        sent_positions |= position.partitions
    stream["messages"]["clicks/0"] = late

    again = data(positions, batch_size=10, sent=sent, sent_positions=sent_positions).batches(1)
    found = [next(again) for _ in range(sent)]

    assert [items(batch) for batch, _ in found] == [items(batch) for batch, _ in further]
    told = dict[str, str]()
    for _, position in found:
        told |= position.partitions
    assert told.items() >= sent_positions.items()
    rest = [key for batch, _ in again for key in items(batch)]
    whole = items(first_batch) + [key for batch, _ in found for key in items(batch)] + rest
    assert sorted(whole) == sorted(rows_of(stream["messages"]))


def test_sent_rows_of_one_time_are_in_the_order_of_partitions(stream: Any) -> None:
    """In whatever order servers name them: sums of gradients are of that order, to the last bit."""
    stream["messages"] = {f"clicks/{k}": clicks(4, seed=k, rows=1) for k in range(3)}
    batch, position = next(data(batch_size=12).batches(1))
    names = list(places(position))

    for order in (names, names[::-1]):
        positions = {name: position.partitions[name] for name in order}
        again, _ = next(data(batch_size=12, sent=1, sent_positions=positions).batches(1))
        assert items(again) == items(batch)


def test_an_empty_batch_that_was_sent_is_empty_again(stream: Any) -> None:
    stream["messages"] = three_partitions()

    batch, position = next(data(sent=1, sent_positions={}).batches(1))

    assert batch.size == 0
    assert batch.labels is not None
    assert batch.labels.size == 0
    assert position.rows == 0


def test_bad_rows_are_counted_and_kept_and_no_place_is_lost(stream: Any) -> None:
    good = _line(1)
    stream["messages"] = {
        "clicks/0": [(1, good + b"\nnot JSON\n" + good), (2, b"\xff{"), (3, good), (4, b"")]
    }
    lost: list[Lost] = []
    bad_rows = BadRows(10)
    decoder = MessageDecoder("clicks", SCHEMA, "json", bad_rows, on_lost=lost.append)

    (batch, position), *rest = data(decoder=decoder).batches(1)

    assert batch.size == 3
    assert not rest
    assert places(position) == {"clicks/0": "3"}
    assert [(each.message.offset, each.line, each.value) for each in lost] == [
        ("0", 1, b"not JSON"),
        ("1", 0, b"\xff{"),
    ]
    assert bad_rows.total == 2
    assert "partition clicks/0, offset 0, row 2" in bad_rows.first


@pytest.mark.parametrize("format", ["json", "arrow"])
def test_what_cannot_be_read_is_kept_up_to_the_row_above_the_limit(
    format: str, stream: Any
) -> None:
    bad = [b"no", b"nor this", b"nor that"]
    joined = [b"\n".join([bad[0], _line(1), bad[1]]), bad[2]] if format == "json" else bad[:2]
    stream["messages"] = {"clicks/0": list(enumerate(joined))}
    lost: list[Lost] = []
    decoder = MessageDecoder("clicks", SCHEMA, format, BadRows(1), on_lost=lost.append)

    with pytest.raises(BadRowError):
        list(data(decoder=decoder).batches(1))

    assert [each.value for each in lost] == (bad if format == "json" else bad[:2])


def test_bad_rows_count_to_the_limit_of_their_pass_alone(
    stream: Any, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [(at, b"\n".join([b"no", _line(at)])) for at in range(60)]
    stream["messages"] = {"clicks/0": messages}
    decoder = MessageDecoder("clicks", SCHEMA, "json", BadRows(25))
    found = data(decoder=decoder, batch_size=1, options="")

    for number, before_ms in enumerate((20.0, 40.0), start=1):
        assert len(list(found.batches(number, before_ms=before_ms))) == 20
    assert decoder.bad_rows.total >= 40
    assert caplog.text.count("malformed rows skipped") >= 1


def test_a_slot_that_no_row_has_is_told_once(stream: Any, caplog: pytest.LogCaptureFixture) -> None:
    line = json.dumps({"click": 1, "user": "u1", "itme": "i1"}).encode()
    stream["messages"] = {"clicks/0": [(1, b"\n".join([line] * 100))] * 25}

    assert sum(batch.size for batch, _ in data().batches(1)) == 2_500
    assert caplog.messages == ["no row at the start of clicks has 'item': read as missing"]


def test_rows_without_a_click_are_sampled_alike_wherever_a_batch_begins(stream: Any) -> None:
    stream["messages"] = three_partitions()
    negatives = NegativeSampling(0.5, seed=3)

    def read(size: int) -> Iterator[tuple[int, float]]:
        decoder = MessageDecoder("clicks", SCHEMA, "json", BadRows(), negatives=negatives)
        for batch, _ in data(decoder=decoder, batch_size=size).batches(1):
            assert batch.labels is not None
            yield from zip(items(batch), batch.labels.tolist(), strict=True)

    kept = list(read(8))
    stream["seed"] = 5

    assert list(read(3)) == kept
    all_rows = rows_of(stream["messages"])
    assert set(all_rows) > {key for key, _ in kept}
    values = [value for each in stream["messages"].values() for _, value in each]
    clicked = [json.loads(line)["click"] for value in values for line in value.splitlines()]
    assert sum(label for _, label in kept) == sum(clicked)


def test_places_of_any_number_of_workers_are_dealt_to_another() -> None:
    position = StreamPosition(epoch=4, rows=70, before_ms=9.0, time_ms=50)
    progress = {
        worker: WorkerProgress(
            incarnation=1,
            sequence=5,
            step=10 + worker,
            position=replace(position, time_ms=50 + worker).to_json(),
            partitions={f"clicks/{k}": f"{k}0" for k in range(worker, 10, 3)},
        )
        for worker in range(3)
    }

    dealt = dealt_again(progress, 2)

    assert {worker: each.step for worker, each in dealt.items()} == {0: 10, 1: 11}
    assert dealt[0].partitions == {f"clicks/{k}": f"{k}0" for k in range(0, 10, 2)}
    assert dealt[1].partitions == {f"clicks/{k}": f"{k}0" for k in range(1, 10, 2)}
    assert StreamPosition.from_json(dealt[0].position, {}) == replace(position, rows=0)


def test_a_position_of_a_later_release_is_read_and_one_without_news_by_those_before() -> None:
    position = StreamPosition(epoch=3, rows=7, before_ms=5.0, time_ms=4)
    written = json.loads(position.to_json())

    assert StreamPosition.from_json(json.dumps({**written, "colour": 1}), {}) == position
    assert written.keys() == {"epoch", "rows", "before_ms", "time_ms"}


def test_json_csv_and_arrow_are_formats_of_messages(stream: Any) -> None:
    rows = {"click": [1, 0], "user": ["a", "b"], "item": ["x", "y"]}
    table = pa.table(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    values = {
        "json": b'{"click": 1, "user": "a", "item": "x"}\n{"click": 0, "user": "b", "item": "y"}',
        "csv": b"1,a,x\n0,b,y\n",
        "arrow": sink.getvalue().to_pybytes(),
    }

    for format, value in values.items():
        stream["messages"] = {"clicks/0": [(1, value), (2, value)]}
        decoder = MessageDecoder(
            "clicks", SCHEMA, format, BadRows(), columns=["click", "user", "item"]
        )
        (batch, position), *_ = data(decoder=decoder, batch_size=3).batches(1)
        assert batch.labels is not None
        assert batch.labels.tolist() == [1, 0, 1], format
        expected = [key_of(1, "a"), key_of(2, "x"), key_of(1, "b"), key_of(2, "y")]
        np.testing.assert_array_equal(batch.keys[:4], np.array(expected, np.uint64))
        assert places(position) == {"clicks/0": "1 +1"}


def test_a_stream_without_an_end_yields_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then an empty batch, with which training ends the last one, and more only if it is asked to."""
    source = MemorySource({"clicks/0": clicks(5, rows=2), "clicks/1": []})
    monkeypatch.setattr(stream_data, "open_source", lambda _: source)
    number = len(rows_of(source.messages))
    asked: list[bool] = []

    def on_idle() -> bool:
        asked.append(len(asked) == 1)
        return asked[-1]

    batches = data(options="", batch_size=number - 1, on_idle=on_idle).batches(1)

    sizes = [next(batches)[0].size for _ in range(3)]
    were_asked = bool(asked)
    sizes.append(next(batches)[0].size)
    source.messages["clicks/1"] += clicks(1, seed=1, rows=1, start_ms=0)
    found, position = next(batches)

    assert sizes == [number - 1, 1, 0, 0]
    assert not were_asked
    assert asked[:2] == [False, True]
    assert items(found) == rows_of({"clicks/1": source.messages["clicks/1"]})
    assert places(position) == {"clicks/1": "0"}


def test_new_partitions_are_read_from_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_data, "LOOK_S", 0.0)
    source = MemorySource({"clicks/0": clicks(2, rows=1)})
    monkeypatch.setattr(stream_data, "open_source", lambda _: source)
    reader = data({"clicks/0": "0"}, options="?start=latest", batch_size=1)
    batches = reader.batches(1)
    next(batches)

    source.messages["clicks/1"] = clicks(1, seed=1, rows=1)
    found = next((batch, at) for batch, at in batches if batch.size)

    assert items(found[0]) == rows_of({"clicks/1": source.messages["clicks/1"]})
    assert places(found[1]) == {"clicks/1": "0"}
    assert reader.partitions == ["clicks/0", "clicks/1"]


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_process_in_a_lost_ones_place_reads_to_the_same_end(
    stream: Any, *, is_empty: bool
) -> None:
    stream["messages"] = {"clicks/0": [] if is_empty else clicks(20)}
    before = rows_of(stream["messages"])
    (batch, position), *_ = data().batches(1)
    later = clicks(5, seed=1, start_ms=10**6)
    stream["messages"]["clicks/0"] += later

    found = {
        keeps_ends: [
            key
            for batch, _ in data(position.partitions, keeps_ends=keeps_ends).batches(1)
            for key in items(batch)
        ]
        for keeps_ends in (True, False)
    }

    assert items(batch) + found[True] == before
    assert items(batch) + found[False] == rows_of(stream["messages"]), "another run"
    progress = WorkerProgress(
        incarnation=0, sequence=0, step=1, position="", partitions=position.partitions
    )
    assert without_ends({0: progress})[0].partitions.keys() == {"clicks/0"}


def test_an_end_that_only_a_sent_batch_has_told_is_kept(stream: Any) -> None:
    stream["messages"] = {"clicks/0": clicks(20)}
    before = rows_of(stream["messages"])
    _, position = next(data().batches(1))
    stream["messages"]["clicks/0"] += clicks(5, seed=1, start_ms=10**6)

    again = data(keeps_ends=True, sent=1, sent_positions=position.partitions)

    assert [key for batch, _ in again.batches(1) for key in items(batch)] == before


def test_ends_are_told_once_by_a_batch_without_rows_if_there_is_no_other(stream: Any) -> None:
    stream["messages"] = {"clicks/0": clicks(3, rows=2)}
    rows = rows_of(stream["messages"])
    (batch, position), *further = data(batch_size=len(rows)).batches(1)
    again = data(position.partitions, keeps_ends=True)

    assert (items(batch), further) == (rows, [])
    assert position.partitions == {"clicks/0": "2", f"{END}clicks/0": "2"}
    assert list(again.batches(1)) == [], "they are known"
    stream["messages"] = {"clicks/0": []}
    ((empty, position),) = data().batches(1)
    assert (empty.size, position.partitions.keys()) == (0, {"clicks/0", f"{END}clicks/0"})


def test_a_file_is_read_block_by_block(stream: Any) -> None:
    """From the start, and from each position in it."""
    stream["messages"] = {"clicks/0": [(1, b"a"), (2, b"b")]}
    sizes, read = {"a": [3, 5, 4], "b": [7]}, list[int]()

    class Blocks:
        def blocks(self, split: FileSplit) -> Iterator[Block]:
            first = 100 * (split.path == "b")
            for size in sizes[split.path]:
                keys = np.repeat(np.arange(first, first + size, dtype=np.uint64), 2)
                offsets = np.arange(2 * size + 1, dtype=np.int32)
                labels, dense = np.zeros(size, np.float32), np.empty((size, 0), np.float32)
                read.append(size)
                yield Block(
                    Batch(labels=labels, dense=dense, keys=keys, offsets=offsets, num_slots=2),
                    first,
                )
                first += size

    def decoder() -> MessageDecoder:
        return MessageDecoder("x", SCHEMA, lambda *_: Blocks(), BadRows(), are_files=True)

    expected, found, places_of = [*range(12), *range(100, 107)], list[int](), [dict[str, str]()]
    for batch, position in data(batch_size=2, decoder=decoder()).batches(1):
        found += items(batch)
        places_of.append(places(position))
        if len(found) == 2:
            assert read == [3], "no more than is needed"

    assert found == expected
    assert [each.get("clicks/0") for each in places_of] == [
        None, *(f"0 +{n}" for n in (2, 4, 6, 8, 10)), "0", *(f"1 +{n}" for n in (2, 4, 6)), "1"
    ]  # fmt: skip
    for number, each in enumerate(places_of):
        again = data(each, batch_size=2, decoder=decoder()).batches(1)
        assert [key for batch, _ in again for key in items(batch)] == expected[2 * number :]
    sent = data(batch_size=5, decoder=decoder(), sent=2, sent_positions={"clicks/0": "0 +10"})
    batches = sent.batches(1)
    assert [items(next(batches)[0]) for _ in range(2)] == [expected[:5], expected[5:10]]


def test_a_sent_batch_of_two_files_has_the_positions_in_both(stream: Any) -> None:
    """Else a further loss between two sent batches would have rows of the first file trained again."""
    stream["messages"] = {"clicks/0": [(1, b"a")], "clicks/1": [(2, b"b")]}

    class Blocks:
        def blocks(self, split: FileSplit) -> Iterator[Block]:
            first = 100 * (split.path == "b")
            keys = np.repeat(np.arange(first, first + 3, dtype=np.uint64), 2)
            offsets, labels = np.arange(7, dtype=np.int32), np.zeros(3, np.float32)
            dense = np.empty((3, 0), np.float32)
            yield Block(
                Batch(labels=labels, dense=dense, keys=keys, offsets=offsets, num_slots=2), first
            )

    decoder = MessageDecoder("x", SCHEMA, lambda *_: Blocks(), BadRows(), are_files=True)
    all_sent = {"clicks/0": "0", "clicks/1": "0 +2"}

    batches = data(batch_size=4, decoder=decoder, sent=2, sent_positions=all_sent).batches(1)
    (first, position), (second, end) = next(batches), next(batches)

    assert (items(first), items(second)) == ([0, 1, 2, 100], [101])
    assert (places(position), places(end)) == ({"clicks/0": "0", "clicks/1": "0 +1"}, all_sent)


def test_rows_that_wait_for_more_when_told_to_end_are_not_trained(stream: Any) -> None:
    """A batch of them would be another one than that of an undisturbed run."""
    stream["messages"] = {"clicks/0": clicks(2, rows=1)}
    told: list[bool] = []

    def is_told_to_end() -> bool:
        told.append(len(told) > 1)
        return told[-1]

    reader = data(options="", is_told_to_end=is_told_to_end)

    assert list(reader.batches(1)) == []
    assert True in told


def test_nothing_is_trained_in_the_place_of_a_sent_batch_when_told_to_end(stream: Any) -> None:
    """Also where the first messages are there at once."""
    stream["messages"] = {"clicks/0": clicks(20)}
    _, position = next(data(batch_size=2).batches(1))
    options = {"batch_size": 2, "sent": 1, "sent_positions": position.partitions}

    for stream["seed"] in range(10):
        assert list(data(**options, is_told_to_end=lambda: True).batches(1)) == []
        assert items(next(data(**options).batches(1))[0]) == rows_of(stream["messages"])[:2]


def test_late_messages_are_counted_by_how_late_they_are(stream: Any) -> None:
    behind_s = [0.5, 1.0, 1.5, 7200.0, 7201.0, 90000.0, 0.0]
    stream["messages"] = {
        "clicks/0": [(10**8, _line(0))]
        + [(10**8 - int(1000 * each), _line(number)) for number, each in enumerate(behind_s, 1)]
    }

    reader = data(options="?end=latest&late=2 h")
    list(reader.batches(1))

    assert LATE_S == (1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0)
    assert reader.lateness == {
        "trained": [2, 1, 0, 0, 0, 1, 0, 0, 0.5 + 1.0 + 1.5 + 7200.0],
        "left_out": [0, 0, 0, 0, 0, 1, 0, 1, 7201.0 + 90000.0],
    }


def test_messages_that_are_too_late_are_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = [0, 50, 100, 49, 60, 200, 99]
    messages = {"clicks/0": [(at, _line(number)) for number, at in enumerate(times)]}
    monkeypatch.setattr(stream_data, "open_source", lambda _: MemorySource(messages))
    late = "?end=latest&late=0.05 s"

    def read(**settings: Any) -> tuple[StreamData, list[int], StreamPosition]:
        reader = data(options=late, batch_size=10, **settings)
        ((batch, position),) = reader.batches(1)
        return reader, items(batch), position

    reader, kept, position = read()
    _, resumed, _ = read(positions={"clicks/0": "2"}, time_ms=100)
    first = next(data(options=late, batch_size=2).batches(1))[1]

    on_time = [number for number in range(7) if number not in (3, 6)]
    assert kept == [int(key_of(2, str(number))) for number in on_time]
    assert resumed == kept[3:]
    assert first.time_ms == 50, "it would leave out rows that are not late"
    assert (*reader.late(), reader.latest_ms) == (3, 2, 101)
    assert places(position) == {"clicks/0": "6"}
    assert position.time_ms == 200


def test_the_time_of_a_message_may_be_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    times = ["1970-01-01T00:00:03", 2, 1_700_000_000_000, "never"]
    values = [
        json.dumps({"click": 0, "user": "u", "item": str(number), "at": at}).encode()
        for number, at in enumerate(times)
    ]
    messages = {f"clicks/{number}": [(7, value)] for number, value in enumerate(values)}
    monkeypatch.setattr(stream_data, "open_source", lambda _: MemorySource(messages))
    reader = data(options="?end=latest&time=at", batch_size=10)

    ((batch, position),) = reader.batches(1)

    assert items(batch) == [int(key_of(2, str(number))) for number in (3, 1, 0, 2)]
    assert position.time_ms == 1_700_000_000_000


def test_lag_is_that_of_some_seconds_ago_and_asks_nobody(
    stream: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream["messages"] = {"clicks/0": clicks(100, 1, rows=1)}
    monkeypatch.setattr(stream_data, "LAG_S", 0.0)
    reader = data()

    assert reader.lag() == {}, "nothing was read"
    batches = reader.batches(1)
    next(batches)
    first = reader.lag()["clicks/0"]
    assert reader.lag()["clicks/0"] == first <= 100
    for _ in batches:
        pass
    assert reader.lag() == {"clicks/0": 0}


def test_time_of_the_newest_row_stays_known_after_a_restart(stream: dict[str, Any]) -> None:
    stream["messages"] = {"clicks/0": clicks(10, 1, rows=1, start_ms=5_000)}
    *_, (_, end) = data().batches(1)
    assert end.time_ms == 5_090
    # A late message, and a worker that has read further.
    stream["messages"]["clicks/0"] += clicks(1, 2, start_ms=4_000)
    (_, after), *_ = data(end.partitions, time_ms=end.time_ms).batches(1)
    assert after.time_ms == 5_090

    def progress(position: StreamPosition, partitions: Mapping[str, str]) -> WorkerProgress:
        return WorkerProgress(
            incarnation=1, sequence=1, step=1, position=position.to_json(), partitions=partitions
        )

    workers = {
        0: progress(end, {"clicks/0": "9"}),
        1: progress(replace(end, time_ms=6_000), {"clicks/1": "9"}),
    }
    assert newest_ms(workers) == 5_090
    workers[0] = progress(replace(end, is_idle=True), {"clicks/0": "9"})
    assert newest_ms(workers) == 6_000


def test_position_says_whether_there_was_more_to_read(stream: dict[str, Any]) -> None:
    stream["messages"] = {"clicks/0": clicks(100, 1, rows=1)}
    found = []
    for batch, position in data(options="", batch_size=10).batches(1):
        found.append((batch.size, position.is_idle))
        if position.is_idle:
            break

    assert found == [(10, False)] * 10 + [(0, True)]


def test_a_worker_without_partitions_is_in_the_stream() -> None:
    """One that sends empty parts has a position without partitions; a process in its place reads on."""
    end = StreamPosition(epoch=3, before_ms=60_000.0)
    of_stream = WorkerProgress(incarnation=1, sequence=4, step=5, position=end.to_json())
    of_files = replace(of_stream, position=DataPosition(epoch=3).to_json())

    assert position_of(of_stream) == end
    assert position_of(of_files) is None
    assert position_of(replace(of_stream, position="")) is None
