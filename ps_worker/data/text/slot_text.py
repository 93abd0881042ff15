r"""Reader of PaddleRec's slot text, words of name and value a line; columns are matched by name.

    click:0 dense_feature:0.05 dense_feature:0.006 user:715353 words:12 words:9 \n

Words come in any order; those of other names are ignored. A slot has any number of values, the text after the
first colon; a vector all its numbers in order, or none; a number, label, weight or id comes once at most.
What a line lacks is missing. Blanks are as in `multislot_scanner`.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import hash_bytes, key_of
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.protos.errors import counted
from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader, Columns
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text import text_reader
from ctr_ps.ps_worker.data.text.json_lines import decoder_of_lines, parts_of_vectors
from ctr_ps.ps_worker.data.text.multislot_scanner import count_lines_and_blanks, word_end
from ctr_ps.ps_worker.data.text.svm import colon_after, field_of_index

_HEAD_LINES = 1000
_NAME = 1  # in the place of a slot's number in the hash of a name
_NEWLINE, _BLANK = np.uint8(ord("\n")), np.uint8(ord(" "))

# The columns of words: index of the name, line from 0, start and stop of the value.
INDEX, LINE, START, STOP = range(4)


class SlotTextReader(ColumnReader):
    """Reads the columns of a schema by name; slots are lists. Thread-safe."""

    def splits(self, path: str, num_splits: int) -> list[FileSplit]:
        return text_reader.line_splits(path, num_splits)

    def fields(self, path: str) -> pa.Schema:
        """Returns the names in the first lines."""
        lines = text_reader.first_block(path).tobytes().split(b"\n")[:_HEAD_LINES]
        words = [word.partition(b":") for line in lines for word in line.split()]
        names = dict.fromkeys(name for name, colon, _ in words if colon)
        return pa.schema([(name.decode(errors="replace"), pa.binary()) for name in names])

    def columns(self, split: FileSplit, offset: int | None = None) -> Iterator[Columns]:
        path, schema = split.path, self._schema
        decoder = decoder_of_lines(path, self.fields(path).names, schema, self._bad_rows)
        single = {schema.id, schema.group, *(each.name for each in schema.dense)}
        lists = {*schema.slots} - single - {*decoder.times.values()}
        parts = parts_of_vectors(schema)
        widths = Counter(parts.get(name, (name,))[0] for name in decoder.columns.stored)
        hashes = np.array([key_of(_NAME, name) for name in widths], np.uint64)
        order = np.argsort(hashes)
        layout = np.append(hashes[order], np.uint64(2**64 - 1)), np.append(order, order.size)
        for block, position in text_reader.line_blocks(split, offset):
            starts = np.flatnonzero(np.concatenate([[True], block[:-1] == _NEWLINE]))
            found, faults = _lists(block, starts, *layout)
            arrays: dict[str, pa.Array] = {}
            for (name, width), values in zip(widths.items(), found, strict=True):
                if name in lists:
                    arrays[name] = values
                    continue
                counts = np.diff(values.offsets)
                for line in np.flatnonzero((counts != 0) & (counts != width)).tolist():
                    fault = f"{name!r} has {counted(int(counts[line]), 'value')}, expected {width}"
                    faults.setdefault(line, fault)
                for part in range(width):
                    column = f"{name}[{part}]" if f"{name}[{part}]" in parts else name
                    places = pa.array(values.offsets.to_numpy()[:-1] + part, mask=counts != width)
                    arrays[column] = values.values.take(places)
            batch = pa.RecordBatch.from_pydict(arrays)
            yield from decoder.decode_good(batch, starts + position, faults)


def _lists(
    block: NDArray[np.uint8],
    starts: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    order: NDArray[np.int64],
) -> tuple[list[pa.LargeListArray], dict[int, str]]:
    """Returns the values of each name, a list for each line, null without any; and faults by line.

    Takes the starts of the lines, and the arguments of `scan_words`.
    """
    words = np.empty((sum(count_lines_and_blanks(block)), 4), np.int64)
    words = words[: scan_words(block, hashes, order, words)]
    num_names, num_lines = order.size - 1, starts.size
    faults: dict[int, str] = {}
    for start, stop in words[words[:, INDEX] > num_names, START:].tolist():
        line = int(np.searchsorted(starts, start, side="right")) - 1
        text = text_reader.shown(block[start:stop].tobytes())
        faults.setdefault(line, f"{text} does not have the form name:value")
    for line in np.flatnonzero(np.bincount(words[:, LINE], minlength=num_lines) == 0).tolist():
        faults[line] = "an empty line"
    ends = np.zeros(num_names * num_lines + 1, np.int64)
    bounds, content = np.zeros(len(words) + 1, np.int64), np.empty_like(block)
    put_in_order(block, words, num_lines, ends, bounds, content)
    lists = []
    for first in range(0, ends.size - 1, num_lines):
        own = ends[first : first + num_lines + 1]
        edges = bounds[own[0] : own[-1] + 1]
        buffers = [None, pa.py_buffer(edges), pa.py_buffer(content)]
        values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(edges) - 1, buffers)
        mask = pa.array(np.diff(own) == 0)
        lists.append(pa.LargeListArray.from_arrays(own - own[0], values, mask=mask))
    return lists, faults


@kernel
def scan_words(
    block: NDArray[np.uint8],  # uint8[n], whole lines: the last byte is a newline
    hashes: NDArray[np.uint64],  # uint64[names + 1], ascending, and 2^64 - 1
    order: NDArray[np.int64],  # int64[names + 1], indexes of the names by hash, and their number
    words: NDArray[np.int64],  # int64[words, 4], overwritten from the start
) -> int:
    """Finds the words of a block, and returns their number.

    The index of other names is the number of names; one more is that of a word without a colon.
    """
    line, num_words, position = 0, 0, 0
    while position < len(block):
        if block[position] <= _BLANK:
            line += block[position] == _NEWLINE
            position += 1
            continue
        stop = word_end(block, position)
        colon = colon_after(block, position, stop)
        word = words[num_words]
        word[INDEX] = field_of_index(hash_bytes(block, position, colon, _NAME), hashes, order)
        word[LINE], word[START], word[STOP] = line, colon + 1, stop
        if colon == stop:
            word[INDEX], word[START] = len(hashes), position
        num_words += 1
        position = stop
    return num_words


@kernel
def put_in_order(
    block: NDArray[np.uint8],
    words: NDArray[np.int64],
    num_lines: int,
    ends: NDArray[np.int64],  # int64[names * lines + 1], zeros
    bounds: NDArray[np.int64],  # int64[words + 1], zeros
    content: NDArray[np.uint8],
) -> None:
    """Copies values by name, then line, then in the order of the text; `bounds` are theirs in `content`.

    Those of a name in a line are the values `ends[i]` to `ends[i + 1]`, where i is name * lines + line.
    """
    for word in words:
        if word[INDEX] * num_lines < len(ends) - 1:
            ends[word[INDEX] * num_lines + word[LINE] + 1] += 1
    ends[:] = np.cumsum(ends)
    places = ends[:-1:num_lines].copy()
    order = np.empty(ends[-1], np.int64)
    for index in range(len(words)):
        name = words[index, INDEX]
        if name < len(places):
            order[places[name]] = index
            places[name] += 1
    end = 0
    for place, index in enumerate(order):
        for position in range(words[index, START], words[index, STOP]):
            content[end] = block[position]
            end += 1
        bounds[place + 1] = end
