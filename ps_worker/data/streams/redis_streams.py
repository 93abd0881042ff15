"""Streams of Redis, by redis-py (extra `redis`); each key is a partition: `clicks-0,clicks-1` are two.

The value of a message is its field `value` (option `field`); without that field all of its fields, as JSON.
"""

import json
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis

from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.ps_worker.data.streams.source import START, Message, StreamUrl, offset_and_rows

logger = logging.getLogger(__name__)

_POLLED = 1000
_POLLED_FIRST = 4
_LARGEST = 2**64 - 1
_FIRST = "0-0"  # before all ids
_NOTHING = {"entries-added": 0, "length": 0, "last-generated-id": b"0-0", "first-entry": None}
_PATIENCE_S = (
    600.0  # for how long a server is asked that does not answer, but by `poll`, which comes again
)
_PAUSE_S = 0.5
_POLLED_BYTES = 16 << 20
"""About how many bytes are asked for at once, by the messages before; Redis counts messages alone."""


class _AwayError(DataError):
    """A server does not answer."""


class RedisSource:
    """A `StreamSource` of one key, or of several with commas between; partitions are keys."""

    def __init__(self, url: StreamUrl) -> None:
        """Connects; raises DataError if the server does not answer for long, or a key is no stream."""
        self._url = url
        self._keys = url.name.split(",")
        options: dict[str, Any] = {
            key: int(value) if value.isdecimal() and "password" not in key else value
            for key, value in url.options.items()
        }
        self._field = str(options.pop("field", "value")).encode()
        db = options.pop("db", 0)
        self.at_end: set[str] = set()
        self._is_away = False
        self._polled = _POLLED_FIRST  # messages to ask for at once
        self._largest = 1  # bytes of a message; of old ones less
        self._ids: dict[str, str] = {}
        self._lag: dict[str, int] = {}
        self._ends: dict[str, str] = {}  # ids after which nothing was, or need not be
        # The entries ever added up to the one polled last, as far as known: then lost ones are counted.
        self._counts: dict[str, int] = {}
        # A connection that was lost while nothing was asked is no server that is away.
        once = redis.retry.Retry(redis.backoff.NoBackoff(), 1, (redis.ConnectionError,))
        try:
            self._redis = redis.Redis.from_url(
                f"{url.kind}://{url.address}/{db}",
                **{"retry": once, "socket_timeout": 5, **options},
            )
            kinds = {key: self._asked("type", key) for key in self._keys}
        except (TypeError, ValueError) as error:
            fault = str(error).replace("AbstractConnection.__init__() got an ", "")
            raise UsageError(f"{url}: {fault.replace('keyword argument', 'option')}") from error
        for key, kind in kinds.items():
            if kind == b"none":
                logger.warning("%s: there is no key %r yet, it is waited for", url, key)
            elif kind != b"stream":
                raise DataError(f"{url}: key {key!r} is a {kind.decode()}, expected a stream")

    def partitions(self) -> list[str]:
        return list(self._keys)

    def start_of(self, partition: str) -> str:
        if self._url.start == "earliest":
            return START
        if (start_ms := self._url.start_ms) is None:
            return self.last_of(partition)
        return f"{start_ms - 1}-{_LARGEST}"

    def last_of(self, partition: str) -> str:
        found = self._asked("xrevrange", partition, count=1)
        return found[0][0].decode() if found else START

    def order_of(self, offset: str) -> tuple[int, int]:
        return _numbers(offset)

    def seek(self, positions: Mapping[str, str]) -> None:
        for partition, position in positions.items():
            offset, rows = offset_and_rows(position)
            self._require_kept(partition, offset)
            self._ids[partition] = _before(offset) if rows else offset or _FIRST
            if _is_time(offset) and not rows:
                self._ends[partition] = offset
            info = self._info(partition)
            if not offset and "entries-added" in info:
                self._counts[partition] = info["entries-added"] - info["length"]
            elif not rows:
                self._note_end(partition, info)

    def poll(self, wanted: Collection[str], timeout_s: float) -> Sequence[Message]:
        found: list[Message] = []
        try:
            self._poll(wanted, timeout_s, found)
        except _AwayError as error:
            self.at_end -= set(wanted)  # nobody knows
            self._note_away(error)
        else:
            if self._is_away:
                logger.info("the server answers again: %s", self._url)
            self._is_away = False
        return found

    def _note_away(self, error: Exception) -> None:
        if not self._is_away:
            logger.warning("a server is away, and waited for: %s", error)
        self._is_away = True

    def _poll(self, wanted: Collection[str], timeout_s: float, found: list[Message]) -> None:
        """Appends messages to `found`, of each key all or, if the server is away then, none."""
        if not wanted:
            return
        ids = {key: self._ids[key] for key in wanted}
        block = max(int(timeout_s * 1000), 0) or None  # 0 would wait for ever
        answer = self._asked("xread", ids, count=self._polled, block=block, patience_s=0.0) or []
        at_end = set(wanted) - {name.decode() for name, _ in answer}
        self._largest = max(self._largest // 2, 1)
        for name, entries in answer:
            key = name.decode()
            self._require_all(key, [number.decode() for number, _ in entries])
            self._ids[key] = entries[-1][0].decode()
            self._ends.pop(key, None)
            if len(entries) < self._polled:
                at_end.add(key)
                self._ends[key] = self._ids[key]
            for number, fields in entries:
                offset = number.decode()
                found.append(Message(key, offset, _numbers(offset)[0], self._value(fields)))
                self._largest = max(self._largest, len(found[-1].value))
        self.at_end = (self.at_end - set(wanted)) | at_end
        if answer:
            most = min(4 * self._polled, _POLLED_BYTES // (self._largest * len(wanted)), _POLLED)
            self._polled = max(most, 1)

    def lag(self) -> Mapping[str, int]:
        with suppress(_AwayError):
            self._lag = {key: self._lag_of(key, last) for key, last in self._ids.items()}
        return self._lag

    def _lag_of(self, key: str, last: str) -> int:
        """Returns the number of entries after `last`; or some of them, where that is unknown."""
        info, count = self._info(key, patience_s=0.0), self._counts.get(key)
        if count is not None and "entries-added" in info:
            return max(int(info["entries-added"]) - count, 0)
        return len(self._asked("xrange", key, f"({last}", count=self._polled, patience_s=0.0))

    def _info(self, key: str, patience_s: float = _PATIENCE_S) -> Mapping[str, Any]:
        """Returns what Redis says of a stream; before version 7 it has no `entries-added`."""
        found: Mapping[str, Any] = _NOTHING
        if self._asked("exists", key, patience_s=patience_s):
            found = self._asked("xinfo_stream", key, patience_s=patience_s)
        return found

    def _note_end(self, key: str, info: Mapping[str, Any]) -> None:
        """Notes how many entries were added up to the last id, if it is that of the stream."""
        if info["last-generated-id"].decode() == self._ids[key] and "entries-added" in info:
            self._counts[key] = info["entries-added"]

    def close(self) -> None:
        self._redis.close()

    def _value(self, fields: Mapping[bytes, bytes]) -> bytes:
        if self._field in fields:
            return fields[self._field]
        text = {
            name.decode(errors="surrogateescape"): value.decode(errors="surrogateescape")
            for name, value in fields.items()
        }
        return json.dumps(text).encode()

    def _require_all(self, key: str, ids: Sequence[str]) -> None:
        """Raises DataError if messages between those polled before and these were trimmed.

        Trimming takes the oldest ones, so none is lost while one is there that was polled before. Else the
        number of those ever added tells; where it is unknown, only what follows an end, or its own id.
        """
        last, count = self._ids[key], self._counts.get(key)
        info = self._info(key, patience_s=0.0)
        added, first = info.get("entries-added", 0), _first_of(info)
        deleted = info.get("max-deleted-entry-id", b"").decode() or _FIRST
        # One that was deleted by itself is no loss, and a server with fewer has lost its memory.
        if _numbers(deleted) > _numbers(last) or (count or 0) + len(ids) > added:
            count = None
        if not first or _numbers(first) > _numbers(last):
            if count is not None:
                passed = (
                    sum(_numbers(each) < _numbers(first) for each in ids) if first else len(ids)
                )
                lost = added - info["length"] - passed - count
                if lost > 0 and passed < len(ids):
                    raise self._gone(key, last, ids[0], f" ({counted(lost, 'message')})")
            elif last not in (_FIRST, self._ends.get(key), _before(ids[0])):
                raise self._gone(key, last, ids[0])
        self._counts.pop(key, None)
        if count is not None:
            self._counts[key] = count + len(ids)
        elif info["last-generated-id"].decode() == ids[-1] and added:
            self._counts[key] = added

    def _gone(self, key: str, offset: str, first: str, number: str = "") -> DataError:
        return DataError(
            f"{self._url}: the first message of {key!r} is {first or 'gone'}, but the run goes on after "
            f"{offset}, and what was between is gone{number}: start from a later checkpoint, or a new run "
            "with start="
        )

    def _require_kept(self, key: str, offset: str) -> None:
        """Raises DataError if messages after an offset were trimmed, as far as Redis tells.

        Where the message of the offset itself is gone, only a stream that was at its end then is known to
        have lost nothing.
        """
        if offset in ("", _FIRST) or _is_time(offset):
            return
        info = self._info(key)
        last, first = info["last-generated-id"].decode(), _first_of(info)
        is_lost = _numbers(last) != _numbers(offset)
        if first:
            is_lost = _numbers(first) > _numbers(offset)
        if is_lost:
            raise self._gone(key, offset, first)

    def _asked(self, call: str, *args: Any, patience_s: float = _PATIENCE_S, **options: Any) -> Any:
        """Returns an answer; raises _AwayError if none comes within `patience_s`, DataError for a refusal."""
        end_s = time.monotonic() + patience_s
        while True:
            try:
                return getattr(self._redis, call)(*args, **options)
            except (redis.ConnectionError, redis.TimeoutError) as error:
                away = _AwayError(f"{self._url}: {error}")
                if time.monotonic() >= end_s or isinstance(error, redis.AuthenticationError):
                    raise away from error
                self._note_away(away)
                time.sleep(_PAUSE_S)
            except redis.RedisError as error:
                raise DataError(f"{self._url}: {error}") from error


def _first_of(info: Mapping[str, Any]) -> str:
    """Returns the id of the first message that is there; "": none is."""
    return info["first-entry"][0].decode() if info["first-entry"] else ""


def _numbers(offset: str) -> tuple[int, int]:
    milliseconds, _, sequence = offset.partition("-")
    return int(milliseconds), int(sequence or 0)


def _is_time(offset: str) -> bool:
    """Whether it is a time to start at, and no message's."""
    return bool(offset) and _numbers(offset)[1] == _LARGEST


def _before(offset: str) -> str:
    milliseconds, sequence = _numbers(offset)
    return f"{milliseconds}-{sequence - 1}" if sequence else f"{milliseconds - 1}-{_LARGEST}"
