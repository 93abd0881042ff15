"""Topics of Kafka, by confluent-kafka (extra `kafka`).

A rule assigns partitions (`owner_of`), never a consumer group: so no rebalance moves them. No offset is
committed, since positions are saved with the model.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.streams.source import START, Message, StreamUrl, offset_and_rows

T = TypeVar("T")

logger = logging.getLogger(__name__)

_REQUEST_S = 30.0
_LOOK_S = 2.0  # for new partitions
_QUIET_S = 10.0  # between two warnings of the client
_POLLED = 1000
_FATAL = (
    KafkaError._AUTO_OFFSET_RESET,
    KafkaError.OFFSET_OUT_OF_RANGE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
)


class KafkaSource:
    """A `StreamSource` of one topic, or of several with commas between; partitions are `topic/number`."""

    def __init__(self, url: StreamUrl) -> None:
        """Connects; raises DataError if no broker answers, or there is no such topic."""
        self._url = url
        self._topics = url.name.split(",")
        self.at_end: set[str] = set()
        self._quiet_s = 0.0  # until this time
        self._paused: set[str] = set()
        self._assigned: set[str] = set()
        try:
            self._consumer = Consumer(
                {
                    "auto.offset.reset": "error",
                    "queued.max.messages.kbytes": 16384,
                    "fetch.wait.max.ms": 50,  # else the end of a partition is known half a second later
                    "log_level": 2,  # to stderr; what is less than that comes by `_log`
                    **url.options,
                    "bootstrap.servers": url.address,
                    "group.id": "ctr-ps",  # librdkafka asks for one; there is no group, see above
                    "enable.auto.commit": False,
                    "enable.partition.eof": True,
                    "error_cb": self._log,
                }
            )
        except KafkaException as error:
            raise UsageError(f"{url}: {error.args[0].str()}") from error
        self.partitions()

    def partitions(self) -> list[str]:
        found: list[str] = []
        for topic in self._topics:
            timeout_s = _LOOK_S if self._assigned else _REQUEST_S
            ask = partial(self._consumer.list_topics, topic, timeout=timeout_s)
            metadata = self._asked(ask).topics[topic]
            if metadata.error is not None or not metadata.partitions:
                fault = metadata.error.str() if metadata.error else "it has no partitions"
                raise DataError(f"{self._url}: topic {topic!r}: {fault}")
            found += [f"{topic}/{number}" for number in sorted(metadata.partitions)]
        return found

    def start_of(self, partition: str) -> str:
        start_ms = self._url.start_ms
        if self._url.start == "earliest":
            return START
        if start_ms is None:
            return self.last_of(partition)
        wanted = _topic_partition(partition, start_ms)
        found = self._asked(lambda: self._consumer.offsets_for_times([wanted], timeout=_REQUEST_S))
        offset: int = found[0].offset
        return _text(offset - 1) if offset >= 0 else self.last_of(partition)

    def last_of(self, partition: str) -> str:
        _, high = self._watermarks(partition)
        return _text(high - 1)

    def order_of(self, offset: str) -> int:
        return int(offset)

    def seek(self, positions: Mapping[str, str]) -> None:
        self._assigned |= set(positions)
        wanted = []
        for partition, position in positions.items():
            offset, rows = offset_and_rows(position)
            at = OFFSET_BEGINNING
            if offset:
                at = int(offset) + (not rows)
                low, high = self._watermarks(partition)
                if not low <= at <= high:
                    raise DataError(
                        f"{self._url}: partition {partition} has offsets {low} to {high - 1}, but the run "
                        f"goes on at {at}: its messages are gone. Start from a later checkpoint, or a new "
                        "run with start="
                    )
            wanted.append(_topic_partition(partition, at))
        self._asked(lambda: self._consumer.incremental_assign(wanted))

    def poll(self, wanted: Collection[str], timeout_s: float) -> Sequence[Message]:
        self._pause(self._assigned - set(wanted))
        found = []
        # The first one is waited for, the others are there.
        for message in self._asked(lambda: self._consumer.consume(1, timeout_s)) + self._asked(
            lambda: self._consumer.consume(_POLLED, 0)
        ):
            partition = f"{message.topic()}/{message.partition()}"
            if (error := message.error()) is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    self.at_end.add(partition)
                    continue
                if error.code() in _FATAL or error.fatal():
                    raise DataError(f"{self._url}: partition {partition}: {error.str()}")
                logger.warning("%s: %s", self._url, error.str())
                continue
            self.at_end.discard(partition)
            _, time_ms = message.timestamp()
            found.append(
                Message(partition, str(message.offset()), max(time_ms, 0), message.value() or b"")
            )
        return found

    def lag(self) -> Mapping[str, int]:
        found = {}
        for at in self._consumer.position(
            [_topic_partition(each) for each in sorted(self._assigned)]
        ):
            _, high = self._consumer.get_watermark_offsets(at, cached=True)
            if at.offset >= 0 and high >= 0:
                found[f"{at.topic}/{at.partition}"] = max(high - at.offset, 0)
        return found

    def close(self) -> None:
        self._consumer.close()

    def _pause(self, unwanted: set[str]) -> None:
        """Has brokers asked for the other partitions alone, so that none fills the memory."""
        if new := unwanted - self._paused:
            self._consumer.pause([_topic_partition(each) for each in new])
        if over := self._paused - unwanted:
            self._consumer.resume([_topic_partition(each) for each in over])
        self._paused = unwanted

    def _watermarks(self, partition: str) -> tuple[int, int]:
        found: tuple[int, int] = self._asked(
            lambda: self._consumer.get_watermark_offsets(
                _topic_partition(partition), timeout=_REQUEST_S
            )
        )
        return found

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except KafkaException as error:
            raise DataError(f"{self._url}: {error.args[0].str()}") from error

    def _log(self, error: KafkaError) -> None:
        if time.monotonic() >= self._quiet_s:  # there are many a second while a broker is away
            self._quiet_s = time.monotonic() + _QUIET_S
            logger.warning("%s: %s", self._url, error.str())


def _topic_partition(partition: str, offset: int = OFFSET_BEGINNING) -> TopicPartition:
    topic, _, number = partition.rpartition("/")
    return TopicPartition(topic, int(number), offset)


def _text(offset: int) -> str:
    return str(offset) if offset >= 0 else START
