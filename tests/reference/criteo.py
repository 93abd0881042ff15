"""Criteo rows read with Python's own strings, integers and floats, one row at a time."""

import math
import re

from ctr_ps.ctr_model.schema import Schema
from tests.reference.dense import seen
from tests.reference.features import key_of

Row = tuple[float, list[float], list[int]]


def parse_row(line: bytes, schema: Schema) -> Row | None:
    """Returns (label, dense, keys) of a line without its end, None if malformed."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != 1 + len(schema.dense) + len(schema.slots) or fields[0] not in (b"0", b"1"):
        return None
    numbers = fields[1 : 1 + len(schema.dense)]
    if not all(is_number(number) for number in numbers):
        return None
    dense = [
        seen(float(int(number)) if number else math.nan, column)
        for number, column in zip(numbers, schema.dense, strict=True)
    ]
    values = fields[1 + len(schema.dense) :]
    return float(fields[0]), dense, [key_of(slot, value) for slot, value in enumerate(values, 1)]


def is_number(text: bytes) -> bool:
    if not text:
        return True
    if not re.fullmatch(rb"-?[0-9]{1,19}", text):
        return False
    return -(2**63) <= int(text) < 2**63
