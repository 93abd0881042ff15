"""Helpers for scripts: sums over workers, files by worker, printing on one worker."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from ctr_ps.protos.store import Numbers, ReduceOp
from ctr_ps.ps_worker.fleet.running import FLEET


def all_reduce(input: ArrayLike, mode: Literal["sum", "max", "min"] = "sum") -> Numbers:
    """Returns what all workers' `input` come to, float64 of its shape; all workers call it."""
    array = np.asarray(input, np.float64)
    return FLEET.all_reduce(array.reshape(-1), ReduceOp(mode)).reshape(array.shape)


def get_file_shard(files: Sequence[str | Path]) -> list[str]:
    """Returns those of `files` that this worker reads; see `fleet.split_files`."""
    return FLEET.split_files(files)


def print_on_rank(message: object, rank_id: int) -> None:
    """Prints on one worker."""
    if FLEET.is_worker() and FLEET.worker_index() == rank_id:
        # In one piece: `print` lets others log before the line ends.
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()
