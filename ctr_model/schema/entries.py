"""Checks of plain values in a schema; errors name the entry and the value."""

import difflib
from collections.abc import Iterable, Mapping, Sequence


class SchemaError(ValueError):
    """Raised when a schema is invalid, cannot be read, or needs another version of this package."""


def list_entry(where: str, value: object) -> list[object]:
    """Returns `value` as a list."""
    if not isinstance(value, list | tuple):
        raise SchemaError(f"{where} is {value!r}, expected a list")
    return list(value)


def table_entry(where: str, value: object) -> Mapping[str, object]:
    """Returns `value`, a table of TOML."""
    if not isinstance(value, Mapping):
        raise SchemaError(f"{where} is {value!r}, expected a table")
    return value


def text_entry(where: str, value: object) -> str:
    """Returns `value`, a non-empty string."""
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{where} is {value!r}, expected a non-empty string")
    return value


def number_entry(where: str, value: object) -> float:
    """Returns `value` as a float."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SchemaError(f"{where} is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError as error:  # an integer of more than 308 digits
        raise SchemaError(f"{where} is an integer too large for a float64") from error


def flag_entry(where: str, value: object) -> bool:
    """Returns `value`, a bool."""
    if not isinstance(value, bool):
        raise SchemaError(f"{where} is {value!r}, expected true or false")
    return value


def refuse_unknown_keys(where: str, entry: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuses an unknown key; the error names the nearest known one."""
    for key in entry:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise SchemaError(f"{where}: unknown key {key!r}, did you mean {nearest!r}?")


def refuse_duplicates(kind: str, names: Iterable[str]) -> None:
    """Refuses a repeated name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SchemaError(f"{kind} {name!r} is listed twice, expected unique names")
        seen.add(name)
