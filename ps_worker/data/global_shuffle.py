"""Global shuffle: redistributes the rows of all workers at random, through an exchange of the store.

    own rows --a stretch at a time--> by receiver | 0 --post--> exchange
                                                  | 1 (itself) --> new rows <--take-- exchange

Each worker posts and takes concurrently, so bounded inboxes cannot deadlock. Sent rows are released at once,
so a worker never holds its old and its new rows together.

The receiver of a row is drawn from the sending worker's generator, and new rows are ordered by sender, so the
outcome depends on the seed and on the order of rows, not on timing.

A message of rows:

    header | keys uint64[L] | dense float32[n, num_dense] | labels float32[n] | ... | counts uint16[n, S]

Little-endian. The header says which of `STORED_COLUMNS` there are, in their order, and whether there are
counts: they are omitted if each slot has one key. Other labels are float32[n, T - 1]. Wider columns come
first, so that all are aligned.
"""

import logging
import math
import secrets
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import DataError, ProtocolError, counted
from ctr_ps.protos.store import Exchange, Future, Message, Numbers, ReduceOp
from ctr_ps.ps_worker.data.blocks import offsets_of
from ctr_ps.ps_worker.data.rows_in_memory import (
    STORED_COLUMNS,
    Index,
    RowsInMemory,
    has_one_key_a_slot,
    stored_columns,
)

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 2**20

# Number of rows and keys, width of dense, number of slots, a bit for each of STORED_COLUMNS, number of other
# labels, has counts.
_HEADER = struct.Struct("<QQIIHHI")


@dataclass(frozen=True, slots=True)
class Peers:
    """All workers of a run, as seen by one of them."""

    store: Exchange  # carries messages
    worker: int  # index of this worker
    num_workers: int
    # reduces float64[N] over all workers; collective: called in the same order by all
    all_reduce: Callable[[Numbers, ReduceOp], Numbers]

    def total(self, *counts: int) -> list[int]:
        """Returns the sums of counts over all workers, up to 2**53; collective."""
        return [int(each) for each in self.all_reduce(np.array(counts, np.float64), ReduceOp.SUM)]


class HasPeers(Protocol):
    """An object with peers, such as the module `ps_worker.fleet`."""

    def peers(self) -> Peers:
        """Returns the workers of the run."""
        ...


def shuffle_globally(
    # this worker's rows, possibly none; they are released and must not be used afterwards
    rows: RowsInMemory,
    peers: Peers,
    # draws the receiver of each row; a different generator on each worker
    random: np.random.Generator,
    *,
    message_bytes: int = MESSAGE_BYTES,  # approximate size of a message
) -> RowsInMemory:
    """Returns this worker's new rows, assigned at random but ordered by sender; collective.

    Raises ProtocolError if a worker has left, has another schema, or rows were lost, DataError if only some
    workers have rows with a column, and WaitTimeoutError, which names it, if a worker died.
    """
    if peers.num_workers == 1:
        return rows
    token, num_rows = _agree(rows, peers)
    shuffled = RowsInMemory(rows.num_dense, rows.num_slots)
    with _Exchange(peers, f"shuffle-{token}", shuffled) as exchange:
        _send_all(rows, peers, exchange, random, message_bytes)
        exchange.end()
    (num_shuffled,) = peers.total(shuffled.size)
    if num_shuffled != num_rows:
        raise ProtocolError(
            f"the workers had {num_rows} rows before the shuffle, but have {num_shuffled} after it"
        )
    logger.info("shuffled globally: rows=%d of_all=%d", shuffled.size, num_rows)
    return shuffled


def _agree(rows: RowsInMemory, peers: Peers) -> tuple[int, int]:
    """Returns a random number for the name of the exchange, and the number of rows of all workers."""
    columns = rows.row_columns
    has = [columns is not None and name in columns for name in STORED_COLUMNS]
    has_not = [columns is not None and name not in columns for name in STORED_COLUMNS]
    # 40 bits, so that float64 sums over thousands of workers are exact.
    token, num_workers, num_rows, *nums = peers.total(
        secrets.randbits(40), 1, rows.size, *has, *has_not
    )
    if num_workers != peers.num_workers:
        raise ProtocolError(
            f"rows are shuffled for {counted(num_workers, 'worker')}, but the run has {peers.num_workers}: "
            "rows sent to other workers would be lost"
        )
    for name, num_with, num_without in zip(
        STORED_COLUMNS, nums, nums[len(STORED_COLUMNS) :], strict=False
    ):
        if num_with and num_without:
            raise DataError(
                f"rows of {counted(num_with, 'worker')} have {name}, but rows of {num_without} have none: "
                "read them separately"
            )
    return token, num_rows


def _send_all(
    rows: RowsInMemory,
    peers: Peers,
    exchange: "_Exchange",
    random: np.random.Generator,
    message_bytes: int,
) -> None:
    order = rows.in_order()
    stretch_bytes = message_bytes * peers.num_workers
    stretch_rows = max(1, stretch_bytes * rows.size // max(1, rows.size_bytes))
    for start in range(0, rows.size, stretch_rows):
        stretch = order[start : start + stretch_rows]
        receivers = random.integers(peers.num_workers, size=stretch.size, dtype=np.uint16)
        by_receiver = np.argsort(receivers, kind="stable")
        bounds = np.searchsorted(receivers[by_receiver], np.arange(peers.num_workers + 1))
        # From the next worker on, so that not all send to the same one first.
        for distance in range(1, peers.num_workers + 1):
            receiver = (peers.worker + distance) % peers.num_workers
            index = stretch[by_receiver[bounds[receiver] : bounds[receiver + 1]]]
            for chunk in _chunks(index, rows.bytes_of(index), message_bytes):
                exchange.send(rows, chunk, receiver)
        rows.release(stretch)


def _chunks(index: Index, sizes: NDArray[np.int64], chunk_bytes: int) -> list[Index]:
    """Splits rows of these sizes into chunks of `chunk_bytes`, exceeded by less than a row."""
    numbers = (np.cumsum(sizes) - sizes) // chunk_bytes
    return [chunk for chunk in np.split(index, np.flatnonzero(np.diff(numbers)) + 1) if chunk.size]


class _Exchange:
    def __init__(self, peers: Peers, exchange: str, rows: RowsInMemory) -> None:
        self._peers = peers
        self._exchange = exchange
        self._rows = rows
        self._num_posted = [0] * peers.num_workers
        self._answers: dict[int, Future[None]] = {}
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        # A daemon, because after an error nobody joins it. It ends with its call, which has a time limit.
        self._thread = threading.Thread(target=self._take_all, name="global-shuffle", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def send(self, rows: RowsInMemory, index: Index, receiver: int) -> None:
        batch = rows.gather(index)
        if receiver == self._peers.worker:
            self._rows.extend(batch, source=receiver)
        else:
            self._post(receiver, pack_rows(batch))

    def end(self) -> None:
        """Posts the end to all workers, and waits for the ends of all workers."""
        for receiver in range(self._peers.num_workers):
            self._post(receiver, None)
        for answer in self._answers.values():
            answer.result()
        self._thread.join()
        self._require_health()

    def _post(self, receiver: int, content: bytes | None) -> None:
        """Posts a message after the previous one to the same worker was accepted."""
        self._require_health()
        if receiver in self._answers:
            self._answers.pop(receiver).result()
        message = Message(
            sender=self._peers.worker,
            receiver=receiver,
            sequence=self._num_posted[receiver],
            content=content,
        )
        self._answers[receiver] = self._peers.store.post(self._exchange, message)
        self._num_posted[receiver] += 1

    def _require_health(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_all(self) -> None:
        received = 0
        try:
            while not self._is_over.is_set():
                answer = self._peers.store.take(
                    self._exchange, self._peers.worker, received=received
                )
                if not (messages := answer.result()):
                    return
                for message in messages:
                    self._add(message)
                received += len(messages)
        except BaseException as error:  # raised by the sending thread
            self._error = error

    def _add(self, message: Message) -> None:
        widths = {"num_dense": self._rows.num_dense, "num_slots": self._rows.num_slots}
        try:
            rows = unpack_rows(message.content or b"", **widths)
        except ProtocolError as error:
            raise ProtocolError(f"from worker {message.sender}: {error}") from error
        self._rows.extend(rows, source=message.sender)


def pack_rows(rows: Batch) -> bytes:
    """Serializes rows, of up to 65,535 keys a slot."""
    is_single = has_one_key_a_slot(rows)
    stored = stored_columns(rows)
    header = _HEADER.pack(
        rows.size,
        rows.keys.size,
        rows.dense.shape[1],
        rows.num_slots,
        sum(1 << bit for bit, name in enumerate(STORED_COLUMNS) if name in stored),
        0 if rows.other_labels is None else rows.other_labels.shape[1],
        not is_single,
    )
    columns: list[NDArray[Any]] = [rows.keys.astype("<u8", copy=False)]
    columns.append(rows.dense.astype("<f4", copy=False))
    columns += (column.astype("<f4", copy=False) for column in stored.values())
    if not is_single:
        columns.append(np.diff(rows.offsets).astype("<u2"))
    return b"".join([header, *(np.ascontiguousarray(column).data for column in columns)])


def unpack_rows(data: bytes, *, num_dense: int, num_slots: int) -> Batch:
    """Returns the rows in `data` as read-only views; ProtocolError if truncated or of another schema."""
    if len(data) < _HEADER.size:
        raise ProtocolError(
            f"a message of {len(data)} bytes is shorter than its header of {_HEADER.size}"
        )
    size, num_keys, width, slots, bits, num_others, has_counts = _HEADER.unpack_from(data)
    if (width, slots) != (num_dense, num_slots):
        raise ProtocolError(
            f"received rows of {width} numbers and {slots} slots, expected {num_dense} and {num_slots}: all "
            f"workers need the same schema"
        )
    names = [name for bit, name in enumerate(STORED_COLUMNS) if bits >> bit & 1]
    shapes = [(size, num_others) if name == "other_labels" else (size,) for name in names]
    sizes = [
        num_keys * 8,
        size * width * 4,
        *(4 * math.prod(shape) for shape in shapes),
        size * slots * 2 * has_counts,
    ]
    ends = _HEADER.size + np.cumsum(sizes)
    if ends[-1] != len(data):
        raise ProtocolError(f"received {len(data)} bytes of rows, their header says {ends[-1]}")
    view = memoryview(data)
    if not has_counts and size * slots != num_keys:  # before memory is allocated for them
        raise ProtocolError(
            f"received {num_keys} keys, expected {size} x {slots}: one for each row and slot"
        )
    counts = np.frombuffer(view[ends[-2] :], "<u2") if has_counts else np.ones(size * slots, "<u2")
    if (num_counted := int(counts.sum(dtype=np.int64))) != num_keys:
        raise ProtocolError(f"received {num_keys} keys, but the counts add up to {num_counted}")
    return Batch(
        **{
            name: np.frombuffer(view[start:stop], "<f4").reshape(shape)
            for name, shape, start, stop in zip(names, shapes, ends[1:], ends[2:], strict=False)
        },
        dense=np.frombuffer(view[ends[0] : ends[1]], "<f4").reshape(size, width),
        keys=np.frombuffer(view[_HEADER.size : ends[0]], "<u8"),
        offsets=offsets_of(counts.reshape(size, slots)),
        num_slots=slots,
    )
