"""Values and names in messages."""

from collections.abc import Sequence

import pyarrow as pa

_SHOWN = 5


def first_values(array: pa.Array) -> str:
    """Returns the first distinct values."""
    if len(array) == 0:
        return "none"
    found = list(dict.fromkeys(map(str, map(_readable, array[:10_000].to_pylist()))))
    return ", ".join(map(repr, found[:_SHOWN])) + (", ..." if len(found) > _SHOWN else "")


def one_of(names: Sequence[str]) -> str:
    """Returns the names as in "'a', 'b' or 'c'"."""
    return " or ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))


def _readable(value: object) -> object:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
