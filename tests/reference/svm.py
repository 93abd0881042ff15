"""libsvm and libffm text read with Python's own words and floats, a line at a time."""

import math

from ctr_ps.ctr_model.schema import Schema
from tests.reference.criteo import Row
from tests.reference.features import key_of

_LABELS = {0.0: 0.0, -1.0: 0.0, 1.0: 1.0}


def parse_row(line: bytes, schema: Schema, has_fields: bool) -> Row | None:
    """Returns (label, unscaled numbers, keys by slot) of a line, None if malformed."""
    label, *words = line.split() or [b""]
    names = [column.name for column in schema.dense]
    dense: dict[int, float] = {}
    slots: list[list[int]] = [[] for _ in schema.slots]
    for word in words:
        if word.startswith(b"#"):
            break
        try:
            *field_text, index, number_text = word.split(b":")
            (field,) = (int(text) for text in field_text or [index])
            number = float(number_text)
        except ValueError:
            return None
        if not has_fields:
            field = names.index(str(field)) if str(field) in names else len(names)
        if not index or bool(field_text) != has_fields or field >= len(names) + len(slots):
            return None
        if field < len(names) and field not in dense:
            dense[field] = number
        elif field >= len(names) and number == 1:
            slots[field - len(names)].append(key_of(field - len(names) + 1, index))
        else:
            return None
    try:
        number = float(label)
    except ValueError:
        return None
    if number not in _LABELS:
        return None
    absent = math.nan if has_fields else 0.0
    if has_fields:
        slots = [keys or [key_of(slot, b"")] for slot, keys in enumerate(slots, 1)]
    return _LABELS[number], [dense.get(field, absent) for field in range(len(names))], slots
