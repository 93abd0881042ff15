"""Multi-slot text read with Python's own words, integers and floats, a line at a time."""

import math
import re
from collections.abc import Sequence

from ctr_ps.ctr_model.schema import Schema
from tests.reference.criteo import Row
from tests.reference.features import key_of

_DECIMAL = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[nN][aA][nN]")


def parse_row(line: bytes, schema: Schema, columns: Sequence[str], values: str) -> Row | None:
    """Returns (label, unscaled numbers, keys by slot) of a line, None if malformed."""
    try:
        cells = dict(zip(columns, _cells(line, schema, columns, values), strict=True))
    except ValueError:
        return None
    names = [column.name for column in schema.dense]
    dense = cells.get("dense_input") or [
        number for name in names for number in cells[name] or [math.nan]
    ]
    slots = [cells[name] for name in schema.slots]
    return cells["click"][0], dense, slots


def _cells(line: bytes, schema: Schema, columns: Sequence[str], values: str) -> list[list]:
    rest = line
    cells = []
    for name in columns:
        count_text, rest = _word(rest)
        if not re.fullmatch(rb"[0-9]{1,20}", count_text):
            raise ValueError
        words = []
        for _ in range(int(count_text)):
            if name in schema.slots and values == "text":
                if not rest.removesuffix(b"\r"):
                    raise ValueError
                word = re.match(rb"[^\x00-\x20]*", rest[1:]).group()
                rest = rest[1 + len(word) :]
            else:
                word, rest = _word(rest)
                if not word:
                    raise ValueError
            words.append(word)
        cells.append(_values(name, words, schema, values))
    if _word(rest)[0]:
        raise ValueError
    return cells


def _word(text: bytes) -> tuple[bytes, bytes]:
    match = re.match(rb"[\x00-\x20]*([^\x00-\x20]*)", text)
    return match.group(1), text[match.end() :]


def _values(name: str, words: list[bytes], schema: Schema, values: str) -> list:
    if name in schema.slots:
        if values == "text":
            return [key_of(schema.slots.index(name) + 1, word) for word in words]
        if not all(re.fullmatch(rb"[0-9]{1,20}", word) and int(word) < 2**64 for word in words):
            raise ValueError
        return [int(word) for word in words]
    if not all(_DECIMAL.fullmatch(word) for word in words):
        raise ValueError
    numbers = [float(word) for word in words]
    right = {"click": [1], "dense_input": [len(schema.dense)]}.get(name, [0, 1])
    if len(numbers) not in right or any(map(math.isinf, numbers)):
        raise ValueError
    if name == "click" and numbers[0] not in (0, 1):
        raise ValueError
    return numbers
