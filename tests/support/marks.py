"""The marks of a table's rows, read straight from memory."""

import numpy as np
from numpy.typing import NDArray

from ps_server.table.changes.copy_on_write import SnapshotRegions
from ps_server.table.memory.hash_index import MARKS_A_WORD


def changed_rows(snapshot: SnapshotRegions, shard: int, num_rows: int) -> NDArray[np.bool_]:
    """Returns which of the first rows of a shard changed since the last cut, bool[num_rows]."""
    rows = np.arange(num_rows)
    words = snapshot.arrays.marks[shard * snapshot.arrays.mark_words + rows // MARKS_A_WORD]
    return (words >> (rows % MARKS_A_WORD).astype(np.uint64)) & np.uint64(1) != 0
