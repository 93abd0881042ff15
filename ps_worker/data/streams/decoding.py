r"""Messages to rows: those of many messages are read at once, by the readers of files.

messages    {"click": 1, ...} | {...}\n{...} | ...         text is joined by line breaks
rows        one batch, and of each row its message and its number in it
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import BadRowError, DataError, UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows, silent_bad_rows
from ctr_ps.ps_worker.data.blocks import Block, Reader, joined, rows_between, rows_where
from ctr_ps.ps_worker.data.columnar.tables import TableReader
from ctr_ps.ps_worker.data.files.content import Content
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import reader_of
from ctr_ps.ps_worker.data.negative_sampling import NegativeSampling
from ctr_ps.ps_worker.data.streams.source import Message, position_after
from ctr_ps.ps_worker.data.text.criteo import CriteoScanner
from ctr_ps.ps_worker.data.text.text_reader import BLOCK_BYTES, TextReader

_NEWLINE = ord("\n")

FORMATS = ("json", "csv", "criteo", "multislot", "libsvm", "libffm", "arrow")
"""Formats of messages; Arrow's is that of IPC streams."""

Positions = Mapping[str, str]
"""A position by partition."""


class Lost(NamedTuple):
    """A line or message that could not be read."""

    message: Message
    line: int
    value: bytes


Piece = tuple[Batch | None, NDArray[np.int64], NDArray[np.int64]]
"""Rows, int64[n], the index of each one's message, and int64[n], its number in it, from 0."""


@dataclass(slots=True)
class Rows:
    """The good rows of messages, in their order, to be taken from the front; read piece by piece."""

    messages: Sequence[Message]
    pieces: Iterator[Piece]  # that were not read yet
    batch: Batch | None = None  # the rows of the piece that was read last
    message_of: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    line_of: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    taken: int = 0  # of these rows
    time_ms: int = 0  # of the newest message of which a position was told
    _finished: int = 0  # messages whose positions are told

    @property
    def left(self) -> int:
        """The rows that can be taken now; 0: there are no more. Reads the next piece if it must."""
        while self.batch is None or self.taken == self.batch.size:
            if (piece := next(self.pieces, None)) is None:
                return 0
            (self.batch, self.message_of, self.line_of), self.taken = piece, 0
        return self.batch.size - self.taken

    def take(self, number: int) -> tuple[Batch, Positions]:
        """Returns the next rows, at most those left, and the positions after them that have changed."""
        stop = min(number, self.left) + self.taken
        assert self.batch is not None
        found = rows_between(self.batch, self.taken, stop)
        self.taken = stop
        last, line = int(self.message_of[stop - 1]), int(self.line_of[stop - 1])
        is_whole = not self.left or int(self.message_of[self.taken]) > last
        positions = self._positions_to(last + is_whole)
        if not is_whole:
            message = self.messages[last]
            self.time_ms = max(self.time_ms, message.time_ms)
            positions[message.partition] = position_after(message.offset, line + 1)
        return found, positions

    def rest(self) -> Positions:
        """Returns the positions after all messages, once no row is left."""
        return self._positions_to(len(self.messages))

    def _positions_to(self, stop: int) -> dict[str, str]:
        passed = self.messages[self._finished : stop]
        self._finished = max(self._finished, stop)
        self.time_ms = max([self.time_ms, *(each.time_ms for each in passed)])
        return {each.partition: each.offset for each in passed}


class MessageDecoder:
    """Reads the rows of messages in one format."""

    def __init__(
        self,
        name: str,  # of the stream, for messages
        schema: Schema,
        format: Any,  # a name of `FORMATS`, or a factory of readers of text
        bad_rows: BadRows,
        *,
        columns: Sequence[str] = (),  # of CSV, in order
        negatives: NegativeSampling | None = None,
        on_lost: Callable[[Lost], None] = lambda _: None,  # gets what cannot be read
        are_files: bool = False,  # whether messages are names of files, in a format of files
    ) -> None:
        if not are_files and format not in FORMATS and not callable(format):
            raise UsageError(
                f"messages cannot be {format!r}, expected one of {', '.join(FORMATS)}: set data.format"
            )
        if format == "csv" and not columns and not are_files:
            raise UsageError(
                "messages of CSV have no header: set data.columns to the names in order"
            )
        self._name, self._schema, self.bad_rows = name, schema, bad_rows
        self._head = ",".join(columns).encode() + b"\n" if format == "csv" else b""  # of `_of_text`
        self._format = format
        self._reader: Reader | None = None
        self._are_files = are_files
        self._read = self._of_tables if format == "arrow" else self._of_text
        if not are_files and self._read == self._of_text:
            self._reader = self._reader_with(bad_rows)
        self._negatives = negatives
        self._on_lost = on_lost

    def _reader_with(self, bad_rows: BadRows) -> Reader:
        if self._format == "criteo":  # else the first rows decide whether rows have labels
            return TextReader(CriteoScanner(self._schema, has_label=True), bad_rows)
        return reader_of(self._name, self._schema, bad_rows, self._format)

    def rows(
        self,
        messages: Sequence[Message],
        after: Mapping[tuple[str, str], int],  # rows to leave out at the start of a message
        before: Mapping[tuple[str, str], int],  # rows to read of a message; all of the others
    ) -> Rows:
        """Returns the good rows of messages; it and they raise BadRowError as a pass over files does."""
        after, before = dict(after), dict(before)
        pieces = self._of_files(messages) if self._are_files else iter([self._piece(messages)])
        return Rows(messages, (self._wanted(each, messages, after, before) for each in pieces))

    def _piece(self, messages: Sequence[Message]) -> Piece:
        blocks, offsets, num_lines = self._read(messages)
        starts = np.cumsum(num_lines) - num_lines
        message_of = np.searchsorted(starts + num_lines, offsets, side="right")
        line_of = offsets - starts[message_of] if offsets.size else offsets
        return joined([block.rows for block in blocks]) if blocks else None, message_of, line_of

    def _wanted(
        self,
        piece: Piece,
        messages: Sequence[Message],
        after: Mapping[tuple[str, str], int],
        before: Mapping[tuple[str, str], int],
    ) -> Piece:
        batch, message_of, line_of = piece
        is_wanted = np.ones(line_of.size, np.bool_)
        for index, message in enumerate(messages) if after or before else ():
            of_message = message.partition, message.offset
            is_own = message_of == index
            is_wanted &= ~is_own | (line_of >= after.get(of_message, 0))
            if of_message in before:
                is_wanted &= ~is_own | (line_of < before[of_message])
        if batch is not None and not is_wanted.all():
            batch = rows_where(batch, is_wanted) if is_wanted.any() else None
            message_of, line_of = message_of[is_wanted], line_of[is_wanted]
        if batch is not None and self._negatives is not None:
            batch, kept = self._sampled(batch, messages, message_of, line_of)
            message_of, line_of = message_of[kept], line_of[kept]
        return batch, message_of, line_of

    def _sampled(
        self,
        batch: Batch,
        messages: Sequence[Message],
        message_of: NDArray[np.int64],
        line_of: NDArray[np.int64],
    ) -> tuple[Batch | None, NDArray[np.int64]]:
        """Returns the rows that are kept, and their numbers; the choice is by partition, offset and line."""
        assert self._negatives is not None
        hashes = np.array(
            [key_of(1, f"{each.partition} {each.offset}") for each in messages], np.uint64
        )
        positions = (hashes[message_of] + line_of.astype(np.uint64)).view(np.int64)
        marked = Block(batch, 0, positions)
        kept = self._negatives.sampled("stream", marked)  # wherever the broker is
        if kept is None:
            return None, np.empty(0, np.int64)
        return kept.rows, np.flatnonzero(np.isin(positions, kept.positions()))

    def _of_text(
        self, messages: Sequence[Message]
    ) -> tuple[list[Block], NDArray[np.int64], NDArray[np.int64]]:
        """Returns blocks of good rows, the number of each one's line, and those of each message's lines."""
        texts = [self._lines_of(each) for each in messages]
        num_lines = np.array([each.count(b"\n") for each in texts], np.int64)
        content = Content(self._name)
        content.data = self._head + b"".join(texts)
        line_ends = np.flatnonzero(np.frombuffer(content.data, np.uint8) == _NEWLINE)
        before = 1 if self._head else 0
        content.place = partial(self._place, messages, num_lines, line_ends, before)
        assert self._reader is not None
        failure: BadRowError | None = None
        try:
            blocks = list(self._reader.blocks(FileSplit(content)))
        except BadRowError as error:  # above the limit: once more, for all that cannot be read
            failure = error
            blocks = list(self._reader_with(silent_bad_rows()).blocks(FileSplit(content)))
        offsets = [np.searchsorted(line_ends, block.positions()) - before for block in blocks]
        found = np.concatenate(offsets) if offsets else np.empty(0, np.int64)
        if found.size < int(num_lines.sum()):
            lines = content.data.split(b"\n")[before:-1]
            owners = np.repeat(np.arange(len(messages)), num_lines)
            firsts = np.cumsum(num_lines) - num_lines
            for line in sorted({*range(len(lines))} - {*found.tolist()}):
                owner = int(owners[line])
                self._on_lost(Lost(messages[owner], line - int(firsts[owner]), lines[line]))
        if failure is not None:
            raise failure
        return blocks, found, num_lines

    def _lines_of(self, message: Message) -> bytes:
        """Returns the text of a message; a line that no reader takes counts as malformed, and is left out."""
        text = message.value
        if text and text[-1] != _NEWLINE:
            text += b"\n"
        if len(text) <= BLOCK_BYTES:
            return text
        lines = text.split(b"\n")
        for number, line in enumerate(lines):
            if len(line) >= BLOCK_BYTES:
                fault = f"a line of {len(line)} bytes, expected fewer than {BLOCK_BYTES}"
                self._on_lost(Lost(message, number, line))
                self.bad_rows.add(self._name, place_in(message, number), fault)
        return b"\n".join(line for line in lines if len(line) < BLOCK_BYTES)

    @staticmethod
    def _place(
        messages: Sequence[Message],
        num_lines: NDArray[np.int64],
        line_ends: NDArray[np.int64],
        before: int,
        offset: int,
    ) -> str:
        line = int(np.searchsorted(line_ends, offset)) - before
        index = int(np.searchsorted(np.cumsum(num_lines), line, side="right"))
        return place_in(messages[index], line - int(num_lines[:index].sum()))

    def _of_tables(
        self, messages: Sequence[Message]
    ) -> tuple[list[Block], NDArray[np.int64], NDArray[np.int64]]:
        blocks: list[Block] = []
        offsets: list[NDArray[np.int64]] = []
        num_lines = np.zeros(len(messages), np.int64)
        first = 0
        for index, message in enumerate(messages):
            if not message.value:
                continue
            name = f"{self._name}: {place_in(message, 0)}"
            try:
                with pa.ipc.open_stream(message.value) as stream:
                    table = stream.read_all()
                own = [*TableReader(table, self._schema, self.bad_rows).blocks(FileSplit(name))]
            except BadRowError:
                raise
            except (pa.ArrowException, OSError, DataError) as error:
                self._on_lost(Lost(message, 0, message.value))
                self.bad_rows.add(
                    self._name, place_in(message, 0), f"not a readable Arrow IPC stream: {error}"
                )
                num_lines[index] = 1
            else:
                num_lines[index] = len(table)
                blocks += own
                offsets += [first + block.positions() for block in own]
            first += int(num_lines[index])
        return blocks, np.concatenate(offsets) if offsets else np.empty(0, np.int64), num_lines

    def _of_files(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """Yields a block of rows at a time; a row's number in a file is that among its good rows."""
        for index, path in enumerate(each.value.decode() for each in messages):
            first = 0
            if not path:
                continue
            reader = reader_of(path, self._schema, self.bad_rows, self._format)
            for block in reader.blocks(FileSplit(path)):
                line_of = first + np.arange(block.rows.size)
                yield block.rows, np.full(line_of.size, index), line_of
                first += line_of.size


def place_in(message: Message, line: int) -> str:
    """Returns where a row is, for messages to people."""
    return f"partition {message.partition}, offset {message.offset}, row {line + 1}"
