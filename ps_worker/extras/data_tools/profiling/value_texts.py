"""Lookup of the values of keys in the data, since hashes cannot be inverted."""

from collections.abc import Collection, Sequence

import numpy as np

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.ps_worker.data.bad_rows import silent_bad_rows
from ctr_ps.ps_worker.data.columnar.record_batches import Columns
from ctr_ps.ps_worker.data.columns import FORMATS, columns_of, slots_only
from ctr_ps.ps_worker.data.distinct_values import distinct_values, keys_of
from ctr_ps.ps_worker.data.formats import format_of

_MAX_SHOWN = 24


def value_texts(
    files: Sequence[str],
    schema: Schema,
    wanted: Sequence[Collection[int]],
    format: str | None = None,
) -> list[dict[int, str]]:
    """Returns the texts of keys, from a second pass that ends when all are found.

    Args:
        files: Those without values, of keys or of a format that has none, are passed over.
        schema: Its slots, and all columns of files in Criteo's layout.
        wanted: For each slot the keys to find.
        format: Of the files; None: determined by the suffix.

    Returns:
        For each slot the texts by key; long ones are truncated.
    """
    missing = [set(keys) for keys in wanted]
    texts: list[dict[int, str]] = [{} for _ in wanted]
    silent = silent_bad_rows()  # the first pass has said them
    for path in files:
        if (format or format_of(path)) not in FORMATS:
            continue
        for columns in columns_of(
            path, slots_only(schema.slots), silent, format=format, layout=schema
        ):
            if columns.are_keys:
                break
            _find(columns, schema.slot_numbers, missing, texts)
            if not any(missing):
                return texts
    return texts


def _find(
    columns: Columns,
    slot_numbers: Sequence[int],
    missing: list[set[int]],
    texts: list[dict[int, str]],
) -> None:
    """Moves the keys of values in these rows from `missing` to `texts`."""
    for slot, array in enumerate(columns.slots):
        if not missing[slot]:
            continue
        values = distinct_values(array)
        keys = keys_of(values, slot_numbers[slot])
        for place in np.flatnonzero(np.isin(keys, np.array([*missing[slot]], np.uint64))):
            key = int(keys[place])
            if key in missing[slot]:  # else another value with the same key
                missing[slot].remove(key)
                texts[slot][key] = _shown(values[int(place)].as_py())


def _shown(value: bytes) -> str:
    text = value.decode(errors="backslashreplace")
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
