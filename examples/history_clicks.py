"""Writes planted clicks with histories: a user clicks on an item more often that is like those before.

    python examples/history_clicks.py data/histories
    ps-worker train examples/din.toml

Rows have the item that is shown and the user's last items, the oldest first. Half of the items that are shown
are in the history; they are clicked with probability 0.8, the others with 0.2. A model that knows it has an
AUC of about 0.8, and a model that only knows what items are in a history has much less: no item matters in
itself.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_ITEMS, MAX_LENGTH = 100, 6


def write_clicks(path: Path, rows: int, seed: int) -> None:
    """Writes a file of rows."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, MAX_LENGTH + 1, rows)
    histories = [rng.choice(NUM_ITEMS, length, replace=False) for length in lengths]
    items = [
        rng.choice(history) if rng.random() < 0.5 else rng.integers(NUM_ITEMS)
        for history in histories
    ]
    is_in = [item in history for item, history in zip(items, histories, strict=True)]
    columns = {
        "label": (rng.random(rows) < np.where(is_in, 0.8, 0.2)).astype(np.int8),
        "item": [f"item-{item}" for item in items],
        "history": [[f"item-{item}" for item in history] for history in histories],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--test-rows", type=int, default=4_000)
    options = parser.parse_args()
    write_clicks(options.folder / "train/part-0.parquet", options.rows, seed=1)
    write_clicks(options.folder / "test/part-0.parquet", options.test_rows, seed=2)
