"""Where the columns of a schema are in a file whose columns have names, and whether they fit."""

import difflib
import json
from dataclasses import dataclass

import pyarrow as pa

from ctr_model.schema import Schema
from protos.errors import DataError
from ps_worker.data.columnar.column_values import is_list_type, is_number_type, is_slot_type

# A schema does not name the label: it is the first of these that the file has and the schema does not use.
LABEL_NAMES = ("label", "click", "clicked", "target")

# Metadata of a file whose slots are keys already, and the names of its slots in their order.
HASH_VERSION_KEY = b"ctr_ps.hash_version"
SLOTS_KEY = b"ctr_ps.slots"

# What is decoded at once: a dictionary is hashed once for all these rows. Lists may be long, so fewer.
READ_ROWS = 65_536
READ_ROWS_OF_LISTS = 4096


@dataclass(frozen=True, slots=True)
class FileColumns:
    """Which columns of a file are read.

    Attributes:
        label: Its name; None where rows have none.
        names: All of them, each once, the label among them.
        are_keys: Whether slots hold keys, not values.
        has_lists: Whether a slot holds lists.
    """

    label: str | None
    names: list[str]
    are_keys: bool
    has_lists: bool

    @property
    def read_rows(self) -> int:
        """How many rows to decode at once."""
        return READ_ROWS_OF_LISTS if self.has_lists else READ_ROWS


def match_columns(path: str, fields: pa.Schema, schema: Schema) -> FileColumns:
    """Finds the columns of `schema` in a file.

    Raises:
        DataError: Names the file, and the column that is not there or there twice, or says that its keys are
            of another feature hash or another order of slots.
    """
    used = [*(column.name for column in schema.dense), *schema.slots]
    for name in used:
        if name not in fields.names:
            nearest = difflib.get_close_matches(name, fields.names, n=1, cutoff=0.0)
            hint = f"; the nearest that it has is {nearest[0]!r}" if nearest else ""
            raise DataError(f"{path}: no column {name!r}, which the schema has{hint}")
    label = next((name for name in LABEL_NAMES if name in fields.names and name not in used), None)
    read = list(dict.fromkeys([*([] if label is None else [label]), *used]))
    for name in read:
        if fields.names.count(name) > 1:
            raise DataError(f"{path}: column {name!r} is there twice, so which one is meant?")
    are_keys = HASH_VERSION_KEY in (fields.metadata or {})
    if are_keys:
        _check_keys(path, fields, schema)
    has_lists = any(is_list_type(fields.field(slot).type) for slot in schema.slots)
    return FileColumns(label, read, are_keys, has_lists)


def check_types(path: str, fields: pa.Schema, schema: Schema, columns: FileColumns) -> None:
    """Refuses columns that hold neither numbers nor values of slots.

    Raises:
        DataError: Names the file, the column and its type, and says what to do.
    """
    for name in [*([columns.label] if columns.label else []), *(c.name for c in schema.dense)]:
        kind = fields.field(name).type
        if not is_number_type(kind):
            raise DataError(f"{path}: column {name!r} is of type {kind}, expected numbers")
    for name in () if columns.are_keys else schema.slots:
        kind = fields.field(name).type
        if not is_slot_type(kind):
            raise DataError(
                f"{path}: column {name!r} is of type {kind}, whose text is not fixed, so it cannot be hashed "
                f"as slot {schema.slot_index(name) + 1}: write it as text, whole numbers or lists of these"
            )


def _check_keys(path: str, fields: pa.Schema, schema: Schema) -> None:
    version = fields.metadata[HASH_VERSION_KEY].decode(errors="replace")
    if version != str(schema.hash_version):
        raise DataError(
            f"{path}: its keys are of feature hash version {version!r}, those of the schema of "
            f"{schema.hash_version}: convert the data again"
        )
    slots = json.loads(fields.metadata.get(SLOTS_KEY, b"[]"))
    for number, name in enumerate(schema.slots, start=1):
        kind = fields.field(name).type
        if not pa.types.is_uint64(kind.value_type if is_list_type(kind) else kind):
            raise DataError(f"{path}: column {name!r} is of type {kind}, expected keys as uint64")
        if slots[number - 1 : number] != [name]:
            raise DataError(
                f"{path}: the keys of {name!r} were not made for slot {number}, its place in the schema, but "
                f"with the slots in the order {slots!r}: convert the data again"
            )
