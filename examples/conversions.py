"""Writes planted clicks and conversions: what is bought after a click depends on other tastes than the click.

    python examples/conversions.py data/conversions
    ps-worker train examples/esmm.toml

Rows have a user, an item and a site. Each value has one effect on the logit of the click and another on that
of a conversion after it; a row that was not clicked has no conversion. On the test rows the best AUCs are
0.837 for clicks, 0.838 for conversions of clicked rows, and 0.856 for both.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SLOTS, VALUES = ("user", "item", "site"), 30
CLICK_BIAS, CONVERSION_BIAS = -1.5, -0.5


def write_rows(path: Path, rows: int, seed: int) -> None:
    """Writes a file of rows, by effects that are the same for every seed."""
    effects = np.random.default_rng(0).normal(size=(2, len(SLOTS), VALUES))
    rng = np.random.default_rng(seed)
    values = rng.integers(0, VALUES, (rows, len(SLOTS)))
    logits = effects[:, np.arange(len(SLOTS)), values].sum(axis=2)  # [2, rows]
    logits += np.array([[CLICK_BIAS], [CONVERSION_BIAS]])
    click, would_convert = rng.random((2, rows)) < 1.0 / (1.0 + np.exp(-logits))
    columns = {
        "click": click.astype(np.int8),
        "conversion": (click & would_convert).astype(np.int8),
        **{
            name: [f"{name}-{value}" for value in values[:, slot]]
            for slot, name in enumerate(SLOTS)
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--test-rows", type=int, default=10_000)
    options = parser.parse_args()
    write_rows(options.folder / "train/part-0.parquet", options.rows, seed=1)
    write_rows(options.folder / "test/part-0.parquet", options.test_rows, seed=2)
