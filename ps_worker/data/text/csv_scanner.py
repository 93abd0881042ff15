r"""Scanner of delimiter-separated values: checks number of fields and quotes of each line.

A row is one line. A quoted field ends at the next quote that is not doubled and may contain separators, but
no newline, so that reading can start at any line.
"""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.jit import kernel

# Values of `faults`: a good line, wrong number of fields, unclosed quote, carriage return inside the line.
GOOD, FIELDS, QUOTE, RETURN = range(4)

NO_QUOTE = -1

_NEWLINE, _RETURN = np.uint8(ord("\n")), np.uint8(ord("\r"))


@kernel
def skip_quoted(block: NDArray[np.uint8], position: int, quote: int) -> tuple[bool, int]:
    """Returns whether the quote opened at `position` is closed on the line, and the position after it."""
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
    """Returns the fault of the line at `position`, or GOOD, and the start of the next line."""
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
    """Finds the starts of all lines of a block of whole lines, and their faults.

    Overwrites `starts` int64[number of lines + 1] with the starts and the end of the block, and `faults`
    uint8[number of lines].
    """
    position = 0
    for line in range(faults.size):
        starts[line] = position
        faults[line], position = scan_line(block, position, separator, quote, num_fields)
    starts[faults.size] = position
