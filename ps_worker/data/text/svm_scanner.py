r"""Scanner of libsvm and libffm text, in one pass over the bytes: a label, and words of two or three fields.

    libsvm    label index:value ...             +1 3:0.5 17:1 204:1 \n
    libffm    label field:index:value ...       1 0:0:0.5 1:u7:1 2:a3:1 2:b9:1 \n

Words come in any order; one that begins with # begins a comment, up to the end of the line. Blanks, and the
use of & and | in conditions, are as in `multislot_scanner`. A malformed line is reported with the word at
fault and not written.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import hash_bytes
from ctr_ps.ctr_model.jit import kernel
from ctr_ps.ps_worker.data.text.criteo_scanner import line_end
from ctr_ps.ps_worker.data.text.decimals import parse_decimal, parse_key
from ctr_ps.ps_worker.data.text.multislot_scanner import skip_blanks, word_end

# The columns of `malformed`, which describe a malformed line: its number from 0, its start, and the position
# of the word at fault.
LINE, START, POSITION = range(3)

_NEWLINE, _COLON, _HASH = (np.uint8(ord(character)) for character in "\n:#")

_NO_FIELD = -1


@kernel
def parse_label(block: NDArray[np.uint8], start: int, stop: int) -> int:
    """Returns 1 for the number 1, as "+1" and "1.0", 0 for 0 and -1, -1 for anything else."""
    number, _ = parse_decimal(block, start, stop)
    is_label = (number == 0) | (abs(number) == 1)  # not if nan
    return int(np.int64(number > 0)) if is_label else -1


@kernel
def colon_after(block: NDArray[np.uint8], start: int, stop: int) -> int:
    """Returns the position of the first colon in `block[start:stop]`, or `stop`."""
    position = start
    while (position < stop) & (block[position] != _COLON):
        position += 1
    return position


@kernel
def field_of_index(
    index: np.uint64, dense_indexes: NDArray[np.uint64], dense_columns: NDArray[np.int64]
) -> int:
    """Returns the dense column of an index, or the number of dense columns, which is the slot's field."""
    place = np.searchsorted(dense_indexes, index)
    is_dense = dense_indexes[place] == index
    return int(dense_columns[place if is_dense else -1])


@kernel
def scan_word(
    block: NDArray[np.uint8],
    start: int,
    stop: int,
    has_fields: bool,
    dense_indexes: NDArray[np.uint64],
    dense_columns: NDArray[np.int64],
) -> tuple[int, int, int, float]:
    """Parses a word; arguments as for `scan_lines`.

    Returns its field, dense columns first, then slots, or _NO_FIELD if it is malformed; start and stop of its
    index; its number.
    """
    key, end = parse_key(block, start)
    is_valid = (end > start) & (block[end] == _COLON)
    # A missing component is an empty one at the end of the word.
    index_start = min(end + 1, stop) if has_fields else start
    index_stop = colon_after(block, index_start, stop) if has_fields else end
    number, _ = parse_decimal(block, min(index_stop + 1, stop), stop)
    is_valid &= (index_stop > index_start) & (not np.isnan(number))
    field = int(np.int64(key)) if has_fields else field_of_index(key, dense_indexes, dense_columns)
    return (field if is_valid else _NO_FIELD), index_start, index_stop, number


@kernel
def scan_features(
    block: NDArray[np.uint8],
    position: int,
    has_fields: bool,
    dense_indexes: NDArray[np.uint64],
    dense_columns: NDArray[np.int64],
    row: int,
    dense: NDArray[np.float64],
    counts: NDArray[np.int64],
    found: NDArray[np.int64],
) -> tuple[int, int]:
    """Writes the numbers of a row, and the positions of its values; see `scan_lines`.

    Overwrites `counts` int64[S], zeros before, with the number of values of each slot, and `found`
    int64[words, 3] with slot, start and stop of each value. Returns the number of values and the position of
    the end of the line, or -1 and that of the word at fault.
    """
    num_dense = dense.shape[1]
    num_fields = num_dense + len(counts)
    num_found = 0
    start = skip_blanks(block, position)
    while (block[start] != _NEWLINE) & (block[start] != _HASH):
        stop = word_end(block, start)
        field, index_start, index_stop, number = scan_word(
            block, start, stop, has_fields, dense_indexes, dense_columns
        )
        if (field < 0) | (field >= num_fields):
            return -1, start
        if field < num_dense:
            if not np.isnan(dense[row, field]):
                return -1, start
            dense[row, field] = number
        else:
            if number != 1:
                return -1, start
            slot = field - num_dense
            found[num_found, 0] = slot
            found[num_found, 1] = index_start
            found[num_found, 2] = index_stop
            counts[slot] += 1
            num_found += 1
        start = skip_blanks(block, stop)
    return num_found, line_end(block, start)


@kernel
def put_values(
    block: NDArray[np.uint8],
    has_fields: bool,
    found: NDArray[np.int64],
    num_found: int,
    row: int,
    slot_numbers: NDArray[np.int64],
    counts: NDArray[np.int64],
    offsets: NDArray[np.int32],
    keys: NDArray[np.uint64],
) -> None:
    """Writes the keys of a row by slot; the values of a slot keep the order of the line."""
    num_slots = len(counts)
    first = row * num_slots
    for slot in range(num_slots):
        start = offsets[first + slot]
        if has_fields and counts[slot] == 0:
            keys[start] = hash_bytes(block, 0, 0, slot_numbers[slot])
            counts[slot] = 1
        offsets[first + slot + 1] = start + counts[slot]
        counts[slot] = 0
    for index in range(num_found):
        slot = found[index, 0]
        place = offsets[first + slot] + counts[slot]
        keys[place] = hash_bytes(block, found[index, 1], found[index, 2], slot_numbers[slot])
        counts[slot] += 1


@kernel
def scan_lines(
    block: NDArray[np.uint8],  # uint8[n], whole lines: the last byte is a newline
    # whether the format is libffm, where a slot without values gets the empty value
    has_fields: bool,
    # uint64[num_dense + 1], for libsvm: indexes of dense columns, ascending, and 2^64 - 1
    dense_indexes: NDArray[np.uint64],
    # int64[num_dense + 1], for libsvm: the dense column of each, and num_dense
    dense_columns: NDArray[np.int64],
    slot_numbers: NDArray[np.int64],  # int64[S], of each slot in the feature hash
    found: NDArray[np.int64],  # int64[blanks, 3], overwritten
    # int64[lines], overwritten from the start with the rows' positions in the block
    starts: NDArray[np.int64],
    # float32[lines], overwritten from the start, as the other columns are
    labels: NDArray[np.float32],
    dense: NDArray[np.float64],  # float64[lines, num_dense], nan where missing
    counts: NDArray[np.int64],  # int64[S], overwritten
    keys: NDArray[np.uint64],  # uint64[blanks + lines * S]
    offsets: NDArray[np.int32],  # int32[lines * S + 1], the first is 0
    malformed: NDArray[np.int64],  # int64[lines, 3]
) -> tuple[int, int]:
    """Scans the lines of a block; returns the numbers of rows written and of malformed lines."""
    num_rows = 0
    num_malformed = 0
    position = 0
    while position < len(block):
        start = position
        word = skip_blanks(block, start)
        position = word_end(block, word)
        label = parse_label(block, word, position)
        num_found = -1
        if label >= 0:
            labels[num_rows] = label
            dense[num_rows] = np.nan
            counts[:] = 0
            num_found, word = scan_features(
                block,
                position,
                has_fields,
                dense_indexes,
                dense_columns,
                num_rows,
                dense,
                counts,
                found,
            )
        if num_found >= 0:
            put_values(
                block,
                has_fields,
                found,
                num_found,
                num_rows,
                slot_numbers,
                counts,
                offsets,
                keys,
            )
            starts[num_rows] = start
            num_rows += 1
            position = word + 1
            continue
        malformed[num_malformed, LINE] = num_rows + num_malformed
        malformed[num_malformed, START] = start
        malformed[num_malformed, POSITION] = word
        num_malformed += 1
        position = line_end(block, word) + 1
    return num_rows, num_malformed
