"""Rows <-> the bytes in which they travel from worker to worker.

    header | keys uint64[L] | dense float32[n, num_dense] | labels float32[n] | counts uint16[n, S]

Little-endian. Labels and counts are left out as the header says: where rows have none, and where each slot
has one key. The wide columns come first, so that all are aligned.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_model.batch import Batch
from protos.errors import ProtocolError
from ps_worker.data.blocks.batching import offsets_of
from ps_worker.data.memory.rows import has_one_key_a_slot

# Rows, keys, width of dense, slots, 1 if there are labels, 1 if there are counts.
_HEADER = struct.Struct("<QQIIII")


def pack_rows(rows: Batch) -> bytes:
    """Returns rows as bytes; of no slot more than 65,535 keys."""
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
    """Returns the rows in `data`, read-only views of it.

    Raises:
        ProtocolError: If they are not rows of this many numbers and slots, or cut off.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(
            f"{len(data)} bytes are not rows: their header alone has {_HEADER.size}"
        )
    size, num_keys, width, slots, has_labels, has_counts = _HEADER.unpack_from(data)
    if (width, slots) != (num_dense, num_slots):
        raise ProtocolError(
            f"rows of {width} numbers and {slots} slots came, and here they have {num_dense} and "
            f"{num_slots}: all workers need the same schema"
        )
    sizes = [num_keys * 8, size * width * 4, size * 4 * has_labels, size * slots * 2 * has_counts]
    ends = _HEADER.size + np.cumsum(sizes)
    if ends[-1] != len(data):
        raise ProtocolError(f"rows of {ends[-1]} bytes came as {len(data)}")
    view = memoryview(data)
    counts = np.frombuffer(view[ends[2] :], "<u2") if has_counts else np.ones(size * slots, "<u2")
    if (num_counted := int(counts.sum(dtype=np.int64))) != num_keys:
        raise ProtocolError(f"rows came whose slots have {num_counted} keys, with {num_keys} keys")
    return Batch(
        labels=np.frombuffer(view[ends[1] : ends[2]], "<f4") if has_labels else None,
        dense=np.frombuffer(view[ends[0] : ends[1]], "<f4").reshape(size, width),
        keys=np.frombuffer(view[_HEADER.size : ends[0]], "<u8"),
        offsets=offsets_of(counts.reshape(size, slots)),
        num_slots=slots,
    )
