"""What stands in a schema as plain values, checked one by one: errors name the entry and the value."""

import difflib
from collections.abc import Iterable, Mapping, Sequence


class SchemaError(ValueError):
    """A schema contradicts itself, cannot be read, or needs another version of this package."""


def list_entry(where: str, value: object) -> list[object]:
    """Returns the list that `value` is."""
    if not isinstance(value, list | tuple):
        raise SchemaError(f"{where} is {value!r}, expected a list")
    return list(value)


def text_entry(where: str, value: object) -> str:
    """Returns the text that `value` is; an empty one is refused."""
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{where} is {value!r}, expected a text that is not empty")
    return value


def number_entry(where: str, value: object) -> float:
    """Returns the number that `value` is."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SchemaError(f"{where} is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError as error:  # an integer of more than 308 digits
        raise SchemaError(f"{where} is an integer too large for a float64") from error


def flag_entry(where: str, value: object) -> bool:
    """Returns the truth value that `value` is."""
    if not isinstance(value, bool):
        raise SchemaError(f"{where} is {value!r}, expected true or false")
    return value


def refuse_unknown_keys(where: str, entry: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuses a key that is not known; the error names the nearest."""
    for key in entry:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise SchemaError(f"{where}: unknown key {key!r}, did you mean {nearest!r}?")


def refuse_duplicates(kind: str, names: Iterable[str]) -> None:
    """Refuses a name that comes twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SchemaError(f"{kind} {name!r} is listed twice; names must be unique")
        seen.add(name)
