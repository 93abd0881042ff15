"""Matching of a schema's columns to the named columns of a file (Parquet, ORC, CSV).

Dense columns and slots are found by name; the label is the first of `LABEL_NAMES` that the file has and the
schema does not use. The values of slot number s, its place in the schema from 1, are hashed with s
(`column_values.slot_keys`), unless the file's metadata says that they are keys already.
"""

import difflib
import json
from dataclasses import dataclass

import pyarrow as pa

from ctr_model.schema import Schema
from protos.errors import DataError
from ps_worker.data.columnar.column_values import is_list_type, is_number_type, is_slot_type

LABEL_NAMES = ("label", "click", "clicked", "target")

# Metadata of a file of keys: its feature hash version, and its slots in order (a JSON list).
HASH_VERSION_KEY = b"ctr_ps.hash_version"
SLOTS_KEY = b"ctr_ps.slots"

# Rows decoded at once: a dictionary is hashed once for all of them. Lists may be long, so fewer.
READ_ROWS = 65_536
READ_ROWS_OF_LISTS = 4096


@dataclass(frozen=True, slots=True)
class FileColumns:
    """The columns to read from a file.

    Attributes:
        label: Name of the label's column; None for rows without labels.
        names: All names to read, including the label, without duplicates.
        are_keys: Whether slots hold keys instead of values.
        has_lists: Whether a slot holds lists.
    """

    label: str | None
    names: list[str]
    are_keys: bool
    has_lists: bool

    @property
    def read_rows(self) -> int:
        """Number of rows to decode at once."""
        return READ_ROWS_OF_LISTS if self.has_lists else READ_ROWS


def match_columns(path: str, fields: pa.Schema, schema: Schema) -> FileColumns:
    """Finds the columns of `schema` in a file.

    Raises:
        DataError: Names the file and the missing or ambiguous column, or says that its keys belong to
            another feature hash or order of slots.
    """
    used = [*(column.name for column in schema.dense), *schema.slots]
    for name in used:
        if name not in fields.names:
            nearest = difflib.get_close_matches(name, fields.names, n=1, cutoff=0.0)
            hint = f"; its nearest column is {nearest[0]!r}" if nearest else ""
            raise DataError(f"{path}: no column {name!r}, which the schema requires{hint}")
    label = next((name for name in LABEL_NAMES if name in fields.names and name not in used), None)
    read = list(dict.fromkeys([*([] if label is None else [label]), *used]))
    for name in read:
        if fields.names.count(name) > 1:
            raise DataError(f"{path}: column {name!r} occurs twice, expected once")
    are_keys = HASH_VERSION_KEY in (fields.metadata or {})
    if are_keys:
        _check_keys(path, fields, schema)
    has_lists = any(is_list_type(fields.field(slot).type) for slot in schema.slots)
    return FileColumns(label, read, are_keys, has_lists)


def check_types(path: str, fields: pa.Schema, schema: Schema, columns: FileColumns) -> None:
    """Checks that dense columns and label hold numbers, and slots text, whole numbers or lists of these.

    Raises:
        DataError: Names the file, the column and its type.
    """
    for name in [*([columns.label] if columns.label else []), *(c.name for c in schema.dense)]:
        kind = fields.field(name).type
        if not is_number_type(kind):
            raise DataError(f"{path}: column {name!r} is of type {kind}, expected numbers")
    for name in () if columns.are_keys else schema.slots:
        kind = fields.field(name).type
        if not is_slot_type(kind):
            raise DataError(
                f"{path}: column {name!r} is of type {kind}, which has no unique text form to hash for "
                f"slot {schema.slot_index(name) + 1}: write it as text, whole numbers or lists of these"
            )


def _check_keys(path: str, fields: pa.Schema, schema: Schema) -> None:
    version = fields.metadata[HASH_VERSION_KEY].decode(errors="replace")
    if version != str(schema.hash_version):
        raise DataError(
            f"{path}: its keys have feature hash version {version!r}, the schema has "
            f"{schema.hash_version}: convert the data again"
        )
    slots = json.loads(fields.metadata.get(SLOTS_KEY, b"[]"))
    for number, name in enumerate(schema.slots, start=1):
        kind = fields.field(name).type
        if not pa.types.is_uint64(kind.value_type if is_list_type(kind) else kind):
            raise DataError(f"{path}: column {name!r} is of type {kind}, expected keys as uint64")
        if slots[number - 1 : number] != [name]:
            raise DataError(
                f"{path}: {name!r} is slot {number} of the schema, but its keys were made with the slots in "
                f"the order {slots!r}: convert the data again"
            )
