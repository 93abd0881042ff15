r"""One pass over the bytes of Paddle's multi-slot text: for each column a count, and so many values.

    1 0.5   2 1926 8   0   1 1 \n        a dense column, a slot of two values, one of none, the label

Blanks are the bytes up to 32 but the newline; between two columns there may be any number of them. A value is
a number, or in a slot of text any bytes that are no blanks; before such a value stands exactly one blank, so
nothing between two blanks is the empty value. A line that breaks this is reported, with the column at fault,
and takes no place in the columns of the batch.

Conditions on words are joined with & and |: after a short-circuit numba counts references to the arrays in
every call, which takes longer than scanning a word (26 slots and 13 numbers: 0.3M instead of 0.7M rows/s).
"""

import numpy as np
from numpy.typing import NDArray

from ctr_model.features import hash_bytes
from ctr_model.jit import kernel
from ps_worker.data.text.criteo_scanner import line_end
from ps_worker.data.text.decimals import parse_decimal, parse_key

# What a column of the text is.
LABEL, NUMBER, NUMBERS, KEYS, TEXTS = range(5)

# The columns of `malformed`, a row of which describes a malformed line: its number from 0, where it begins
# and ends, what is wrong, in which column, where the text at fault begins, how many values should be there,
# and how many were read before it.
LINE, START, STOP, FAULT, COLUMN, POSITION, COUNT, NUM_READ = range(8)

# What is wrong: something else or nothing where a count should be; a count that is wrong for the column;
# something else or nothing where a value should be; something after the last column.
NO_FAULT, BAD_COUNT, WRONG_COUNT, BAD_VALUE, NO_END = range(5)

_NEWLINE, _RETURN, _BLANK = (np.uint8(ord(character)) for character in "\n\r ")
_MAX_COUNT = np.uint64(2**31 - 1)


@kernel
def skip_blanks(block: NDArray[np.uint8], position: int) -> int:
    """Returns where the next word or the end of the line is."""
    while block[position] <= _BLANK and block[position] != _NEWLINE:
        position += 1
    return position


@kernel
def word_end(block: NDArray[np.uint8], position: int) -> int:
    """Returns where the word that `position` is in ends: at a blank or a newline."""
    while block[position] > _BLANK:
        position += 1
    return position


@kernel
def is_at_line_end(block: NDArray[np.uint8], position: int) -> bool:
    r"""Returns whether the line ends at `position`, which is in the line, with "\n" or "\r\n"."""
    return bool(block[position + (block[position] == _RETURN)] == _NEWLINE)


@kernel
def scan_count(block: NDArray[np.uint8], position: int) -> tuple[int, int]:
    """Returns the count at `position` and where it ends; -1 and its start, if it is none."""
    count, end = parse_key(block, position)
    is_count = (end > position) & (block[end] <= _BLANK) & (count <= _MAX_COUNT)
    return (int(np.int64(count)), end) if is_count else (-1, position)


@kernel
def scan_numbers(
    block: NDArray[np.uint8],
    position: int,
    count: int,
    row: int,
    first: int,
    dense: NDArray[np.float64],
) -> tuple[int, int]:
    """Writes numbers from `dense[row, first]` on.

    Returns:
        How many of `count` are right, and the position: after them, or at what is at fault.
    """
    for index in range(count):
        start = skip_blanks(block, position)
        position = word_end(block, start)
        number, is_valid = parse_decimal(block, start, position)
        if not is_valid:
            return index, start
        dense[row, first + index] = number
    return count, position


@kernel
def scan_keys(
    block: NDArray[np.uint8], position: int, count: int, first: int, keys: NDArray[np.uint64]
) -> tuple[int, int]:
    """Writes keys that stand there as numbers from `keys[first]` on; returns as `scan_numbers`."""
    for index in range(count):
        start = skip_blanks(block, position)
        key, position = parse_key(block, start)
        if (position == start) | (block[position] > _BLANK):
            return index, start
        keys[first + index] = key
    return count, position


@kernel
def scan_texts(
    block: NDArray[np.uint8],
    position: int,
    count: int,
    slot: int,
    first: int,
    keys: NDArray[np.uint64],
) -> tuple[int, int]:
    """Writes the keys of values of a slot from `keys[first]` on; returns as `scan_numbers`."""
    for index in range(count):
        if is_at_line_end(block, position):
            return index, position
        start = position + 1
        position = word_end(block, start)
        keys[first + index] = hash_bytes(block, start, position, slot)
    return count, position


@kernel
def scan_label(
    block: NDArray[np.uint8], position: int, row: int, labels: NDArray[np.float32]
) -> tuple[int, int]:
    """Writes the label, 0 or 1, of a row; returns as `scan_numbers`."""
    start = skip_blanks(block, position)
    end = word_end(block, start)
    label, _ = parse_decimal(block, start, end)
    if label not in (0.0, 1.0):
        return 0, start
    labels[row] = label
    return 1, end


@kernel
def is_right_count(kind: int, count: int, num_dense: int) -> bool:
    """Returns whether a column of this kind may have so many values."""
    if kind == LABEL:
        return count == 1
    if kind == NUMBER:
        return count <= 1
    return kind != NUMBERS or count == num_dense


@kernel
def scan_line(
    block: NDArray[np.uint8],
    position: int,
    kinds: NDArray[np.int64],
    indexes: NDArray[np.int64],
    row: int,
    num_keys: int,
    labels: NDArray[np.float32],
    dense: NDArray[np.float64],
    keys: NDArray[np.uint64],
    counts: NDArray[np.int64],
) -> tuple[int, int, int, int, int, int]:
    """Writes a row, whole only if there is no fault.

    Returns:
        The fault, the column, its count, how many of its values are right, the number of keys before and in
        the row, and the position: of the next line, or of what is at fault.
    """
    num_slots = 0
    for column in range(len(kinds)):
        kind, index = kinds[column], indexes[column]
        position = skip_blanks(block, position)
        count, position = scan_count(block, position)
        if count < 0:
            return BAD_COUNT, column, 0, 0, num_keys, position
        if not is_right_count(kind, count, dense.shape[1]):
            return WRONG_COUNT, column, count, 0, num_keys, position
        if kind == KEYS:
            num_read, position = scan_keys(block, position, count, num_keys, keys)
        elif kind == TEXTS:
            num_read, position = scan_texts(block, position, count, index, num_keys, keys)
        elif kind == LABEL:
            num_read, position = scan_label(block, position, row, labels)
        else:
            if count == 0:
                dense[row, index] = np.nan
            num_read, position = scan_numbers(block, position, count, row, index, dense)
        if num_read < count:
            return BAD_VALUE, column, count, num_read, num_keys, position
        if kind in (KEYS, TEXTS):
            counts[row, num_slots] = count
            num_slots += 1
            num_keys += count
    position = skip_blanks(block, position)
    if block[position] != _NEWLINE:
        return NO_END, len(kinds) - 1, 0, 0, num_keys, position
    return NO_FAULT, 0, 0, 0, num_keys, position + 1


@kernel
def scan_lines(
    block: NDArray[np.uint8],
    kinds: NDArray[np.int64],
    indexes: NDArray[np.int64],
    labels: NDArray[np.float32],
    dense: NDArray[np.float64],
    keys: NDArray[np.uint64],
    counts: NDArray[np.int64],
    malformed: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Scans the lines of a block.

    Args:
        block: uint8[n], whole lines: the last byte is a newline.
        kinds: int64[columns], what each column of the text is.
        indexes: int64[columns], of a NUMBER its dense column from 0, of TEXTS their slot's number from 1.
        labels: float32[lines], overwritten from the start, as the other columns are.
        dense: float64[lines, num_dense], nan where missing.
        keys: uint64[blanks], row by row, inside it slot by slot as the text has them.
        counts: int64[lines, S], the number of keys of each.
        malformed: int64[lines, 8].

    Returns:
        The number of rows written, of their keys, and of malformed lines.
    """
    num_rows = 0
    num_keys = 0
    num_malformed = 0
    position = 0
    while position < len(block):
        start = position
        fault, column, count, num_read, keys_after, position = scan_line(
            block, start, kinds, indexes, num_rows, num_keys, labels, dense, keys, counts
        )
        if fault == NO_FAULT:
            num_keys = keys_after
            num_rows += 1
            continue
        stop = line_end(block, position)
        entry = malformed[num_malformed]
        entry[LINE] = num_rows + num_malformed
        entry[START], entry[STOP] = start, stop
        entry[FAULT], entry[COLUMN], entry[POSITION] = fault, column, position
        entry[COUNT], entry[NUM_READ] = count, num_read
        num_malformed += 1
        position = stop + 1
    return num_rows, num_keys, num_malformed


@kernel
def count_lines_and_blanks(block: NDArray[np.uint8]) -> tuple[int, int]:
    """Returns how many lines and how many blanks a block has; no slot has more values than these."""
    num_lines = 0
    num_blanks = 0
    for byte in block:
        if byte == _NEWLINE:
            num_lines += 1
        elif byte <= _BLANK:
            num_blanks += 1
    return num_lines, num_blanks


@kernel
def put_slots_in_order(
    keys: NDArray[np.uint64],
    counts: NDArray[np.int64],
    places: NDArray[np.int64],
    ordered: NDArray[np.uint64],
    offsets: NDArray[np.int32],
) -> None:
    """Copies the keys of N rows into the order of the schema.

    Args:
        keys: uint64[L], row by row, inside it slot by slot as the text has them.
        counts: int64[N, S], in the order of the text.
        places: int64[S], where the text has each slot of the schema.
        ordered: uint64[L], overwritten.
        offsets: int32[N * S + 1], overwritten: slot s of row n has `ordered[offsets[n * S + s] : ...]`.
    """
    num_rows, num_slots = counts.shape
    starts = np.empty(num_slots, np.int64)
    row_start = 0
    position = 0
    offsets[0] = 0
    for row in range(num_rows):
        for slot in range(num_slots):
            starts[slot] = row_start
            row_start += counts[row, slot]
        for slot in range(num_slots):
            start, count = starts[places[slot]], counts[row, places[slot]]
            for index in range(start, start + count):
                ordered[position] = keys[index]
                position += 1
            offsets[row * num_slots + slot + 1] = position
