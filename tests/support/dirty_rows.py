"""Dirty bits of a table's rows, read straight from memory."""

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ps_server.table.changes import CopyOnWrite
from ctr_ps.ps_server.table.memory.hash_index import BITS_PER_WORD


def dirty_rows(snapshot: CopyOnWrite, shard: int, num_rows: int) -> NDArray[np.bool_]:
    rows = np.arange(num_rows)
    words = snapshot.arrays.dirty[shard * snapshot.arrays.dirty_words + rows // BITS_PER_WORD]
    return (words >> (rows % BITS_PER_WORD).astype(np.uint64)) & np.uint64(1) != 0
