r"""One pass over the bytes of separated values: which lines are rows, by number of fields and quotes.

A row is one line. A field that begins with a quote goes on to the next quote that is not doubled, and may
hold separators; it may not hold a newline, because then no one could begin to read at a line.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_model.jit import kernel

# What a line may be, in `faults`.
GOOD, FIELDS, QUOTE, RETURN = range(4)

NO_QUOTE = -1

_NEWLINE, _RETURN = np.uint8(ord("\n")), np.uint8(ord("\r"))


@kernel
def skip_quoted(block: NDArray[np.uint8], position: int, quote: int) -> tuple[bool, int]:
    """Returns whether the quotes that open at `position` close on the line, and where what follows begins."""
    position += 1
    while block[position] != _NEWLINE:
        if block[position] == quote:
            if block[position + 1] != quote:
                return True, position + 1
            position += 1
        position += 1
    return False, position


@kernel
def scan_line(
    block: NDArray[np.uint8], position: int, separator: int, quote: int, num_fields: int
) -> tuple[int, int]:
    """Returns what the line at `position` is, and where the next one begins."""
    num_separators = 0
    fault = GOOD
    is_start = True  # of a field
    while block[position] != _NEWLINE:
        if is_start and block[position] == quote:
            is_start = False
            is_closed, position = skip_quoted(block, position, quote)
            if not is_closed:
                fault = QUOTE
            continue
        if block[position] == _RETURN and block[position + 1] != _NEWLINE:
            fault = RETURN
        is_start = block[position] == separator
        num_separators += is_start
        position += 1
    if fault == GOOD and num_separators + 1 != num_fields:
        fault = FIELDS
    return fault, position + 1


@kernel
def scan_lines(
    block: NDArray[np.uint8],
    separator: int,
    quote: int,
    num_fields: int,
    starts: NDArray[np.int64],
    faults: NDArray[np.uint8],
) -> None:
    """Writes where each line of the block begins, then where the block ends, and what each line is.

    Args:
        block: uint8[n], whole lines: the last byte is a newline.
        separator: The byte between fields.
        quote: The byte around fields that hold separators, or NO_QUOTE.
        num_fields: How many fields a row has.
        starts: int64[number of lines + 1].
        faults: uint8[number of lines], GOOD or what is wrong.
    """
    position = 0
    for line in range(faults.size):
        starts[line] = position
        faults[line], position = scan_line(block, position, separator, quote, num_fields)
    starts[faults.size] = position
