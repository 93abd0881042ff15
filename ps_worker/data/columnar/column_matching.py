"""Matching of a schema's columns to the named columns of a file (`formats.NAMED`).

Columns are found by name; an unnamed label is the first of `LABEL_NAMES` that the file has and the schema
does not use. The values of slot number s, its place in the schema from 1, are hashed with s
(`column_values.slot_keys`), unless the file's metadata says that they are keys already.
"""

import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pyarrow as pa

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, did_you_mean
from ctr_ps.ps_worker.data.columnar.column_values import (
    is_list_type,
    is_number_type,
    is_slot_type,
    is_text_type,
    type_of_values,
)
from ctr_ps.ps_worker.data.slot_values import SlotValues

LABEL_NAMES = ("label", "click", "clicked", "target", "is_click", "is_clicked", "clk")
"""Usual names of a label, in the order in which they are looked for."""

# Metadata of a file of keys: its feature hash version, and its slots in order (a JSON list).
HASH_VERSION_KEY = b"ctr_ps.hash_version"
SLOTS_KEY = b"ctr_ps.slots"
# The numbers of the slots in the feature hash (a JSON list); without it, their places in SLOTS_KEY from 1.
SLOT_NUMBERS_KEY = b"ctr_ps.slot_numbers"

_MEANING = {
    "labels": "the label of the schema",
    "weights": "the weight of the schema",
    "ids": "the id of the schema",
    "groups": "which valid.group_by names",
}
"""Origin of the name of a column of `ROW_COLUMNS`, for messages."""

_TEXTS = {"ids": "the id", "groups": "valid.group_by"}
"""Columns of `ROW_COLUMNS` with text or whole numbers, which may be slots; their use, for messages."""

_INT64 = "; in pandas, astype('Int64') makes whole numbers again of those beside missing values"

# Rows decoded at once: a dictionary is hashed once for all of them. Lists may be long, so fewer.
READ_ROWS = 65_536
READ_ROWS_OF_LISTS = 4096


@dataclass(frozen=True, slots=True)
class FileColumns:
    """The columns to read from a file."""

    # names of the columns of `ROW_COLUMNS` to read, without other labels
    row_columns: Mapping[str, str]
    other_labels: Sequence[str]  # names of the other labels to read: all or none
    names: list[str]  # all names to read, without duplicates
    stored: list[str]  # likewise, but those of vectors for their numbers, of times for their parts
    are_keys: bool  # whether slots hold keys instead of values
    has_lists: bool  # whether a slot holds lists

    @property
    def read_rows(self) -> int:
        """Number of rows to decode at once."""
        return READ_ROWS_OF_LISTS if self.has_lists else READ_ROWS


def match_columns(
    path: str, fields: pa.Schema, schema: Schema, times: Mapping[str, str] = MappingProxyType({})
) -> FileColumns:
    """Finds the columns of `schema` in a file; a DataError names a missing, ambiguous or incompatible one.

    `times` are the columns of `times_in` among its fields.
    """
    known = set(fields.names)
    for name in schema.features:
        if name not in known:
            nearest = did_you_mean(name, fields.names)
            raise DataError(f"{path}: no column {name!r}, which the schema requires{nearest}")
    row_columns = _row_columns(path, fields, schema)
    other_labels = _other_labels(path, fields, schema)
    read = list(dict.fromkeys([*row_columns.values(), *other_labels, *schema.features]))
    counts = Counter(fields.names)
    for name in read:
        if counts[name] > 1:
            raise DataError(f"{path}: column {name!r} occurs twice, expected once")
    are_keys = HASH_VERSION_KEY in (fields.metadata or {})
    if are_keys:
        _check_keys(path, fields, schema)
        if row_columns.get("ids") in schema.slots:
            raise DataError(
                f"{path}: column {row_columns['ids']!r} holds keys, not values, so it cannot be the "
                "id that is printed before predictions: name another id column in the schema"
            )
    has_lists = any(
        slot in schema.split or is_list_type(fields.field(slot).type) for slot in schema.slots
    )
    parts = {f"{name}[{i}]": name for name, width in schema.vectors.items() for i in range(width)}
    # A column of lists, or of missing ones alone.
    whole = {each.name for each in fields if is_list_type(each.type) or pa.types.is_null(each.type)}
    stored = [parts[n] if parts.get(n) in whole else times.get(n, n) for n in read]
    stored = list(dict.fromkeys(stored))
    return FileColumns(row_columns, other_labels, read, stored, are_keys, has_lists)


def _row_columns(path: str, fields: pa.Schema, schema: Schema) -> dict[str, str]:
    named = {"labels": schema.label, "weights": schema.weight, "groups": schema.group}
    if schema.is_for_prediction:
        named["ids"] = schema.id
    if schema.label is None:
        free = (name for name in LABEL_NAMES if name not in (*schema.features, *named.values()))
        named["labels"] = next((name for name in free if name in fields.names), None)
    found: dict[str, str] = {}
    for key, name in named.items():
        # Rows to predict need groups only with labels.
        is_required = (
            not schema.is_for_prediction or key == "ids" or (key == "groups" and "labels" in found)
        )
        if name is not None and name in fields.names:
            found[key] = name
        elif name is not None and is_required:
            others = [each for each in fields.names if key in _TEXTS or each not in schema.features]
            raise DataError(
                f"{path}: no column {name!r}, {_MEANING[key]}{did_you_mean(name, others)}"
            )
    return found


def _other_labels(path: str, fields: pa.Schema, schema: Schema) -> tuple[str, ...]:
    missing = [name for name in schema.labels if name not in fields.names]
    if missing and schema.is_for_prediction:
        return ()
    for name in missing:
        others = [each for each in fields.names if each not in schema.features]
        raise DataError(
            f"{path}: no column {name!r}, a label of the schema{did_you_mean(name, others)}"
        )
    return schema.other_labels


def check_types(path: str, fields: pa.Schema, schema: Schema, columns: FileColumns) -> None:
    """Checks the types of columns; a DataError names file, column and type.

    Dense columns and weight hold numbers, id, group and slots text or whole numbers, a slot also lists of
    these; the label numbers or text, "0" and "1".
    """
    row_columns = dict(columns.row_columns)
    for key in [each for each in _TEXTS if each in row_columns]:
        name = row_columns.pop(key)
        kind = fields.field(name).type
        if not is_slot_type(kind) or is_list_type(kind):
            raise DataError(
                f"{path}: column {name!r} is of type {kind}, expected text or whole numbers for {_TEXTS[key]}"
            )
    labels = (columns.row_columns.get("labels"), *columns.other_labels)
    read = (*row_columns.values(), *columns.other_labels)
    for name in (*read, *(column.name for column in schema.dense)):
        kind = fields.field(name).type
        is_text = is_text_type(type_of_values(kind)) and not is_list_type(kind)
        if not (is_number_type(kind) or (is_text and name in labels)):
            raise DataError(f"{path}: column {name!r} is of type {kind}, expected numbers")
    for name in () if columns.are_keys else schema.slots:
        kind = fields.field(name).type
        if not is_slot_type(kind):
            raise DataError(
                f"{path}: column {name!r} is of type {kind}, whose values have no unique text to hash for "
                f"slot {schema.slot_index(name) + 1}: write it as text, whole numbers or lists of these"
                f"{_INT64 if pa.types.is_floating(kind) else ''}"
            )


def kinds_of_values(
    fields: pa.Schema, slots: Sequence[str], split: Container[str] = ()
) -> SlotValues:
    """Returns the kinds of slot values in a file with these columns; text of slots in `split` is lists."""
    found = SlotValues()
    for slot in slots:
        kind = fields.field(slot).type
        if is_list_type(kind) or slot in split:
            found.note(slot, "lists")
        kind = type_of_values(kind)
        if HASH_VERSION_KEY in (fields.metadata or {}):
            found.note(slot, "keys", "text")  # the hashes of texts
        elif not pa.types.is_null(kind):
            found.note(slot, "text" if is_text_type(kind) else "integers")
    return found


def _check_keys(path: str, fields: pa.Schema, schema: Schema) -> None:
    version = fields.metadata[HASH_VERSION_KEY].decode(errors="replace")
    if version != str(schema.hash_version):
        raise DataError(
            f"{path}: its keys have feature hash version {version!r}, but the schema has "
            f"{schema.hash_version}: convert the data again"
        )
    slots = json.loads(fields.metadata.get(SLOTS_KEY, b"[]"))
    hashed = json.loads(fields.metadata.get(SLOT_NUMBERS_KEY, b"[]")) or range(1, len(slots) + 1)
    for number, name in enumerate(schema.slots, start=1):
        kind = fields.field(name).type
        if not pa.types.is_uint64(kind.value_type if is_list_type(kind) else kind):
            raise DataError(f"{path}: column {name!r} is of type {kind}, expected keys as uint64")
        if slots[number - 1 : number] != [name]:
            raise DataError(
                f"{path}: {name!r} is slot {number} of the schema, but keys were hashed with the slots in "
                f"the order {slots!r}: convert the data again"
            )
        expected = schema.slot_numbers[number - 1]
        if hashed[number - 1] != expected:
            raise DataError(
                f"{path}: {name!r} was hashed with slot {hashed[number - 1]}, but 'shares' of the schema "
                f"expects slot {expected}: convert the data again"
            )
