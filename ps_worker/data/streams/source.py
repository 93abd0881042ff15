"""Sources of messages, and the URLs that name them.

    kafka://broker:9092/clicks?start=earliest      a topic; other options are those of librdkafka
    redis://host:6379/clicks                       a Redis stream, or several: clicks-0,clicks-1
    folder:///data/incoming?pattern=*.parquet      finished files, in the order of their names

A position in a partition is a text: "" at its start, "41" after the message with offset 41, and "41 +3" after
three rows of that message.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from ctr_ps.protos.errors import UsageError

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d)")
_LEAST_MS = 10**11  # in seconds the year 5138, in milliseconds 1973
_LEAST_US = 10**14  # in milliseconds the year 5138, in microseconds 1973
_PARTLY = re.compile(r"(.*) \+([0-9]+)", re.DOTALL)

_NUMBER = re.compile(r"[0-9]+\Z")

START = ""
"""The position at the start of a partition."""

_SOURCES = {
    "kafka": "kafka.KafkaSource",
    "redis": "redis_streams.RedisSource",
    "rediss": "redis_streams.RedisSource",
    "folder": "folder.FolderSource",
}


_EXAMPLES = {
    "kafka": "kafka://broker:9092/topic",
    "redis": "redis://host:6379/key",
    "rediss": "rediss://host:6379/key",
    "folder": "folder:///data/incoming",
}


@dataclass(frozen=True, slots=True)
class Message:
    """A message, the unit of a stream; it has any number of rows."""

    partition: str
    offset: str  # in the partition, opaque but to its source
    time_ms: int  # since 1970
    value: bytes


class StreamSource(Protocol):
    """A reader of some partitions of one stream. Not thread-safe.

    Readers know nothing of each other: `owner_of` says which worker reads a partition.
    """

    # partitions of which all messages up to now were polled
    at_end: set[str]

    def partitions(self) -> list[str]:
        """Returns the names of all partitions of the stream, in their order; they only become more."""
        ...

    def start_of(self, partition: str) -> str:
        """Returns the offset after which a run starts, by the option `start`; `START`: at the beginning."""
        ...

    def last_of(self, partition: str) -> str:
        """Returns the offset of the last message now; `START` without one."""
        ...

    def order_of(self, offset: str) -> Any:
        """Returns what offsets of a partition are compared by."""
        ...

    def seek(self, positions: Mapping[str, str]) -> None:
        """Reads these partitions from now on, too, each from its first row after a position."""
        ...

    def poll(self, wanted: Collection[str], timeout_s: float) -> Sequence[Message]:
        """Returns the next messages of some partitions, each partition's in order; none after `timeout_s`.

        Returns as soon as there is one, or a partition came to its end. Raises DataError if the stream cannot
        be read, or messages after the position in a partition are gone.
        """
        ...

    def lag(self) -> Mapping[str, int]:
        """Returns the number of messages of each partition that were not polled, as far as known."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUrl:
    """A stream, and from where to where it is read."""

    kind: str
    address: str  # host and port
    name: str  # of the topic or streams, or the path of the folder
    start: str  # "earliest", "latest" or a time
    end: str  # "", "latest" or a time
    time: str  # column of JSON with the time of a message, by its first row; "": the message's own
    late_ms: float  # messages older than the newest by more are left out
    options: Mapping[str, str]  # all others

    def __str__(self) -> str:
        host = self.address.rpartition("@")[2]  # without a password
        return f"{self.kind}://{host}/{self.name.lstrip('/')}"

    @property
    def start_ms(self) -> int | None:
        """The time to start at; None: no time."""
        return None if self.start in ("earliest", "latest") else time_ms(self.start, "start")

    @property
    def end_ms(self) -> int | None:
        """The time to end at; None: no time."""
        return None if self.end in ("", "latest") else time_ms(self.end, "end")


def stream_url(text: str) -> StreamUrl:
    """Returns what a URL says; "$NAME" in host or options is an environment variable. Raises UsageError."""
    parts = urlsplit(text)
    # Without what may be a password.
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.scheme not in _SOURCES:
        known = ", ".join(f"{each}://" for each in _SOURCES)
        raise UsageError(f"{shown!r} is not a stream: expected one of {known}")
    options = dict(parse_qsl(parts.query.replace("+", "%2B")))
    for key, value in {**options, "password": parts.password or "$"}.items():
        if "password" in key and not value.startswith("$"):
            raise UsageError(
                f"{shown}: a password is saved with the job: write a variable of the environment, as "
                f"{key}=$NAME"
            )
    options = {key: _expanded(value) for key, value in options.items()}
    path = unquote(parts.path)
    user, at, host = parts.netloc.rpartition("@")
    if parts.scheme == "folder" and parts.netloc:
        raise UsageError(f"{shown}: write folder:///{parts.netloc}{path}, with three slashes")
    found = StreamUrl(
        kind=parts.scheme,
        address=_quoted(user) + at + _expanded(host),
        name=path if parts.scheme == "folder" else path.lstrip("/"),
        start=options.pop("start", "earliest"),
        end=options.pop("end", ""),
        time=options.pop("time", ""),
        late_ms=duration_ms(late) if (late := options.pop("late", "")) else math.inf,
        options=options,
    )
    if not found.name:
        raise UsageError(
            f"{shown!r} names no stream, expected one such as {_EXAMPLES[parts.scheme]}"
        )
    _ = found.start_ms, found.end_ms
    return found


def _quoted(text: str) -> str:
    """Returns user and password with variables in the form of URLs: they may have any characters."""
    return re.sub(r"\$\w+", lambda found: quote(_expanded(found[0]), safe=""), text)


def _expanded(text: str) -> str:
    found = os.path.expandvars(text)
    if missing := re.search(r"\$(\w+)", found):
        raise UsageError(f"the environment has no {missing[1]}, which the stream's URL names")
    return found


def time_ms(text: str, name: str) -> int:
    """Returns a time, in milliseconds since 1970, UTC without a zone; raises UsageError."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"{name} is {text!r}, expected earliest, latest or a time such as 2026-11-07T00:00"
        ) from error
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


def duration_ms(text: str) -> float:
    """Returns a duration such as "10 min" in milliseconds; raises UsageError."""
    if (found := _DURATION.fullmatch(text)) is None:
        raise UsageError(f'{text!r} is no duration, expected one such as "10 min": s, min, h or d')
    return float(found[1]) * _UNITS[found[2]] * 1000


def event_ms(value: bytes, column: str) -> int | None:
    """Returns the time in a column of the first row of JSON: ISO, or s, ms or us since 1970; None: none."""
    with suppress(ValueError, TypeError, KeyError, UsageError, OverflowError, RecursionError):
        found = json.loads(value.partition(b"\n")[0])[column]
        if isinstance(found, str):
            return time_ms(found, column)
        return int(
            found / 1000 if found >= _LEAST_US else found if found >= _LEAST_MS else found * 1000
        )
    return None


def open_source(url: StreamUrl) -> StreamSource:
    """Opens a stream; raises DataError if it cannot be read, UsageError for an unknown option."""
    module, _, kind = _SOURCES[url.kind].rpartition(".")
    try:
        source = getattr(import_module(f"{__package__}.{module}"), kind)
    except ModuleNotFoundError as error:
        extra = "redis" if url.kind == "rediss" else url.kind
        raise UsageError(f"{url} needs {error.name}: pip install 'ctr-ps[{extra}]'") from error
    found: StreamSource = source(url)
    return found


def has_reached(source: StreamSource, offset: str, other: str) -> bool:
    """Whether an offset is another one of the partition or after it; all are after `START`."""
    return not other or (bool(offset) and source.order_of(offset) >= source.order_of(other))


def owner_of(partition: str, num_workers: int) -> int:
    """Returns the worker that reads a partition: by the number that its name ends with, else by a hash."""
    number = _NUMBER.search(partition)
    return (int(number[0]) if number else zlib.crc32(partition.encode())) % num_workers


def position_after(offset: str, rows: int) -> str:
    """Returns the position after some rows of a message; 0: after all."""
    return f"{offset} +{rows}" if rows else offset


def offset_and_rows(position: str) -> tuple[str, int]:
    """Inverse of `position_after`."""
    found = _PARTLY.fullmatch(position)
    return (found[1], int(found[2])) if found else (position, 0)
