"""Serialization of rows for messages between workers.

    header | keys uint64[L] | dense float32[n, num_dense] | labels float32[n] | ... | counts uint16[n, S]

Little-endian. The header says which of `STORED_COLUMNS` there are, in their order, and whether there are
counts: they are omitted if each slot has one key. Other labels are float32[n, T - 1]. Wider columns come
first, so that all are aligned.
"""

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.ps_worker.data.blocks.batching import offsets_of
from ctr_ps.ps_worker.data.memory.rows import STORED_COLUMNS, has_one_key_a_slot, stored_columns

# Number of rows and keys, width of dense, number of slots, a bit for each of STORED_COLUMNS, number of other
# labels, has counts.
_HEADER = struct.Struct("<QQIIHHI")


def pack_rows(rows: Batch) -> bytes:
    """Serializes rows, of up to 65,535 keys a slot."""
    is_single = has_one_key_a_slot(rows)
    stored = stored_columns(rows)
    header = _HEADER.pack(
        rows.size,
        rows.keys.size,
        rows.dense.shape[1],
        rows.num_slots,
        sum(1 << bit for bit, name in enumerate(STORED_COLUMNS) if name in stored),
        0 if rows.other_labels is None else rows.other_labels.shape[1],
        not is_single,
    )
    columns: list[NDArray[Any]] = [rows.keys.astype("<u8", copy=False)]
    columns.append(rows.dense.astype("<f4", copy=False))
    columns += (column.astype("<f4", copy=False) for column in stored.values())
    if not is_single:
        columns.append(np.diff(rows.offsets).astype("<u2"))
    return b"".join([header, *(np.ascontiguousarray(column).data for column in columns)])


def unpack_rows(data: bytes, *, num_dense: int, num_slots: int) -> Batch:
    """Returns the rows in `data` as read-only views.

    Raises ProtocolError if `data` is truncated, or has other numbers of dense inputs or slots.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(
            f"a message of {len(data)} bytes is shorter than its header of {_HEADER.size}"
        )
    size, num_keys, width, slots, bits, num_others, has_counts = _HEADER.unpack_from(data)
    if (width, slots) != (num_dense, num_slots):
        raise ProtocolError(
            f"received rows of {width} numbers and {slots} slots, expected {num_dense} and {num_slots}: all "
            f"workers need the same schema"
        )
    names = [name for bit, name in enumerate(STORED_COLUMNS) if bits >> bit & 1]
    shapes = [(size, num_others) if name == "other_labels" else (size,) for name in names]
    sizes = [
        num_keys * 8,
        size * width * 4,
        *(4 * math.prod(shape) for shape in shapes),
        size * slots * 2 * has_counts,
    ]
    ends = _HEADER.size + np.cumsum(sizes)
    if ends[-1] != len(data):
        raise ProtocolError(f"received {len(data)} bytes of rows, their header says {ends[-1]}")
    view = memoryview(data)
    if not has_counts and size * slots != num_keys:  # before memory is allocated for them
        raise ProtocolError(f"received {num_keys} keys, expected one for each of {size} x {slots}")
    counts = np.frombuffer(view[ends[-2] :], "<u2") if has_counts else np.ones(size * slots, "<u2")
    if (num_counted := int(counts.sum(dtype=np.int64))) != num_keys:
        raise ProtocolError(f"received {num_keys} keys, but the counts add up to {num_counted}")
    return Batch(
        **{
            name: np.frombuffer(view[start:stop], "<f4").reshape(shape)
            for name, shape, start, stop in zip(names, shapes, ends[1:], ends[2:], strict=False)
        },
        dense=np.frombuffer(view[ends[0] : ends[1]], "<f4").reshape(size, width),
        keys=np.frombuffer(view[_HEADER.size : ends[0]], "<u8"),
        offsets=offsets_of(counts.reshape(size, slots)),
        num_slots=slots,
    )
