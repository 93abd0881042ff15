"""Serialization of rows for messages between workers.

    header | keys uint64[L] | dense float32[n, num_dense] | labels float32[n] | counts uint16[n, S]

Little-endian. The header says whether there are labels and counts: counts are omitted if each slot has one
key. Wider columns come first, so that all are aligned.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch
from protos.errors import ProtocolError
from ps_worker.data.blocks.batching import offsets_of
from ps_worker.data.memory.rows import has_one_key_a_slot

# Number of rows and keys, width of dense, number of slots, has labels, has counts.
_HEADER = struct.Struct("<QQIIII")


def pack_rows(rows: Batch) -> bytes:
    """Serializes rows, of up to 65,535 keys a slot."""
    is_single = has_one_key_a_slot(rows)
    header = _HEADER.pack(
        rows.size,
        rows.keys.size,
        rows.dense.shape[1],
        rows.num_slots,
        rows.labels is not None,
        not is_single,
    )
    columns: list[NDArray[Any]] = [rows.keys.astype("<u8", copy=False)]
    columns.append(rows.dense.astype("<f4", copy=False))
    if rows.labels is not None:
        columns.append(rows.labels.astype("<f4", copy=False))
    if not is_single:
        columns.append(np.diff(rows.offsets).astype("<u2"))
    return b"".join([header, *(np.ascontiguousarray(column).data for column in columns)])


def unpack_rows(data: bytes, *, num_dense: int, num_slots: int) -> Batch:
    """Returns the rows in `data` as read-only views.

    Raises:
        ProtocolError: If `data` is truncated, or has other numbers of dense inputs or slots.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(
            f"a message of {len(data)} bytes is shorter than its header of {_HEADER.size}"
        )
    size, num_keys, width, slots, has_labels, has_counts = _HEADER.unpack_from(data)
    if (width, slots) != (num_dense, num_slots):
        raise ProtocolError(
            f"received rows of {width} numbers and {slots} slots, expected {num_dense} and {num_slots}: all "
            f"workers need the same schema"
        )
    sizes = [num_keys * 8, size * width * 4, size * 4 * has_labels, size * slots * 2 * has_counts]
    ends = _HEADER.size + np.cumsum(sizes)
    if ends[-1] != len(data):
        raise ProtocolError(f"received {len(data)} bytes of rows, their header says {ends[-1]}")
    view = memoryview(data)
    counts = np.frombuffer(view[ends[2] :], "<u2") if has_counts else np.ones(size * slots, "<u2")
    if (num_counted := int(counts.sum(dtype=np.int64))) != num_keys:
        raise ProtocolError(f"received {num_keys} keys, but the counts add up to {num_counted}")
    return Batch(
        labels=np.frombuffer(view[ends[1] : ends[2]], "<f4") if has_labels else None,
        dense=np.frombuffer(view[ends[0] : ends[1]], "<f4").reshape(size, width),
        keys=np.frombuffer(view[_HEADER.size : ends[0]], "<u8"),
        offsets=offsets_of(counts.reshape(size, slots)),
        num_slots=slots,
    )
