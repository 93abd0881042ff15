r"""Scanner of Paddle's multi-slot text, in one pass over the bytes: per column a count and its values.

    1 0.5   2 1926 8   0   1 1 \n        a dense column, a slot of two values, one of none, the label

Blanks are the bytes up to 32 except the newline. Columns are separated by any number of blanks. A value is a
number, or in a slot of text any bytes except blanks; a text is preceded by exactly one blank, so two blanks
in a row enclose the empty value. Any other line is malformed: it is reported with the column at fault and not
written.

Conditions are combined with & and | because after a short-circuit numba counts references to the arrays in
every call, which takes longer than scanning a word (26 slots and 13 numbers: 0.3M instead of 0.7M rows/s).
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import hash_bytes
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ps_worker.data.text.criteo import line_end
from ctr_ps.ps_worker.data.text.decimals import parse_decimal, parse_key

# Kinds of columns of the text.
LABEL, NUMBER, NUMBERS, KEYS, TEXTS = range(5)

# The columns of `malformed`, which describe a malformed line: its number from 0, start and stop, the fault,
# the column at fault, the position of the fault, the count of the column, and the values read before it.
LINE, START, STOP, FAULT, COLUMN, POSITION, COUNT, NUM_READ = range(8)

# Faults: an invalid or missing count; a count that the column cannot have; an invalid or missing value; text
# after the last column.
NO_FAULT, BAD_COUNT, WRONG_COUNT, BAD_VALUE, NO_END = range(5)

_NEWLINE, _RETURN, _BLANK = (np.uint8(ord(character)) for character in "\n\r ")
_MAX_COUNT = np.uint64(2**31 - 1)


@kernel
def skip_blanks(block: NDArray[np.uint8], position: int) -> int:
    """Returns the position of the next word or of the end of the line."""
    while block[position] <= _BLANK and block[position] != _NEWLINE:
        position += 1
    return position


@kernel
def word_end(block: NDArray[np.uint8], position: int) -> int:
    """Returns the end of the word that contains `position`: a blank or a newline."""
    while block[position] > _BLANK:
        position += 1
    return position


@kernel
def is_at_line_end(block: NDArray[np.uint8], position: int) -> bool:
    r"""Returns whether the line ends at `position`, with "\n" or "\r\n"."""
    return bool(block[position + (block[position] == _RETURN)] == _NEWLINE)


@kernel
def scan_count(block: NDArray[np.uint8], position: int) -> tuple[int, int]:
    """Returns the count at `position` and its end, or -1 and `position` if there is none."""
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

    Returns the number of valid ones out of `count`, and the position after them, or of the fault.
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
    """Writes keys given as numbers from `keys[first]` on; returns as `scan_numbers`."""
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
    """Hashes the values of a slot and writes their keys from `keys[first]` on; returns as `scan_numbers`."""
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
    """Writes the label of a row, 0 or 1; returns as `scan_numbers`."""
    start = skip_blanks(block, position)
    end = word_end(block, start)
    label, _ = parse_decimal(block, start, end)
    if label not in (0.0, 1.0):
        return 0, start
    labels[row] = label
    return 1, end


@kernel
def is_right_count(kind: int, count: int, num_dense: int) -> bool:
    """Returns whether a column of this kind may have `count` values."""
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
    """Writes a row, partially if it is malformed.

    Returns:
        The fault, the column, its count, the number of its valid values, the number of keys up to and with
        the row, and the position of the next line or of the fault.
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
    block: NDArray[np.uint8],  # uint8[n], whole lines: the last byte is a newline
    kinds: NDArray[np.int64],  # int64[columns], the kind of each column of the text
    # int64[columns], for a NUMBER its dense column from 0, for TEXTS the slot's number in the
    # feature hash
    indexes: NDArray[np.int64],
    # int64[lines], overwritten from the start with the rows' positions in the block
    starts: NDArray[np.int64],
    # float32[lines], overwritten from the start, as the other columns are
    labels: NDArray[np.float32],
    dense: NDArray[np.float64],  # float64[lines, num_dense], nan where missing
    keys: NDArray[np.uint64],  # uint64[blanks], by row, then by slot in the order of the text
    counts: NDArray[np.int64],  # int64[lines, S], the number of keys of each slot
    malformed: NDArray[np.int64],  # int64[lines, 8]
) -> tuple[int, int, int]:
    """Scans the lines of a block; returns the numbers of rows, of their keys, and of malformed lines."""
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
            starts[num_rows] = start
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
    """Returns the number of lines and of blanks in a block; the blanks bound the number of values."""
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
    """Copies the keys of N rows from the order of the text into that of the schema.

    Overwrites `ordered` uint64[L] and `offsets` int32[N * S + 1] of a batch, given `counts` int64[N, S] of
    the text; `places` int64[S] are the slots' places in it.
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
