"""Compilation of every kernel of a server before it serves, so that no worker waits for it.

    python -m ps_server.precompile    # fills numba's cache, as when an image is built

A tiny store runs every operation of a server, with read-only arrays as they are decoded from messages: numba
compiles another function for writable ones.
"""

import logging
import sys
import time
from dataclasses import replace

import numpy as np

from protos.gradients import NUM_COUNTS, DenseGrad, Gradients, SparseGrad
from protos.keys import Keys
from protos.runtime.compile_lock import compile_lock
from protos.runtime.jit import read_only
from protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from protos.store import Missing, PushId
from ps_server.optimizers.registry import OPTIMIZERS
from ps_server.store import ParameterStore
from ps_server.table.contents import Rows
from ps_server.table.sparse_table import SparseTable

logger = logging.getLogger(__name__)

_DIM = 2
_NUM_KEYS = 100  # more than the first index of the only shard has slots, so that it grows
_ADMISSIONS = (
    AdmissionSpec(threshold=2),
    AdmissionSpec(threshold=2, counter="bloom", expected_keys=_NUM_KEYS),
    AdmissionSpec(threshold=300, counter="bloom", expected_keys=_NUM_KEYS),  # of wider counters
)


def precompile_kernels() -> float:
    """Compiles all kernels, or loads them from numba's cache; returns the seconds."""
    start = time.perf_counter()
    with compile_lock():
        for name in OPTIMIZERS:
            _exercise(name)
        for admission in _ADMISSIONS:
            _admit(admission)
    return time.perf_counter() - start


def _exercise(optimizer: str) -> None:
    """Runs every operation of a server with one optimizer."""
    table = _table_spec(optimizer)
    store = ParameterStore(num_workers=2)
    counting = replace(
        table,
        name="counting",
        statistics=StatisticsSpec(),
        expiry=ExpirySpec(max_rows=_NUM_KEYS // 2),
    )
    store.create_table(table)
    store.create_table(counting)
    dense: dict[str, DenseGrad] = {}
    if OPTIMIZERS[optimizer].is_elementwise:
        store.create_dense(_dense_spec(optimizer))
        dense["block"] = DenseGrad(read_only(np.ones(_DIM, np.float32)), 1)
    keys = read_only(np.arange(_NUM_KEYS, dtype=np.uint64))
    grad = SparseGrad(keys, read_only(np.ones((_NUM_KEYS, _DIM), np.float32)), 1)
    counted = replace(grad, counts=read_only(np.ones((_NUM_KEYS, 2), np.uint32)))
    sparse = {"table": grad, "counting": counted}
    for worker in range(2):  # two parts of a step, so that they are added
        push_id = PushId(
            worker=worker, incarnation=0, sequence=0, step=0, examples=1, batches=1, pulled=0
        )
        store.push_grad(Gradients(sparse, dense), push_id, at=0).result()
    store.pull_sparse({"table": keys}, missing=Missing.INITIAL).result()
    _transfer(optimizer, keys)
    by_score = ExpirySpec(max_rows=_NUM_KEYS // 2, evict="score")
    loaded = SparseTable(replace(counting, expiry=by_score), num_subscribers=1)
    loaded.push(counted)
    snapshot = loaded.begin_snapshot()
    loaded.push(counted)
    loaded.write(snapshot.export_shard(0))
    loaded.end_snapshot(saved=True)
    loaded.take_changed(0, _NUM_KEYS)
    loaded.key_of_new_row(keys)
    loaded.shrink(max_norm=0.0)


def _transfer(optimizer: str, keys: Keys) -> None:
    """Reads rows of a table with one optimizer with their state, and writes them."""
    spec = _table_spec(optimizer)
    source, target = SparseTable(spec), SparseTable(spec)
    weights, state = source.pull_states(keys)
    no_statistics = np.empty((keys.size, 0), np.float32)
    target.write(Rows(keys=keys, weights=weights, state=state, statistics=no_statistics))


def _admit(admission: AdmissionSpec) -> None:
    """Counts and admits keys by one admission rule."""
    optimizer = next(iter(OPTIMIZERS))  # any: it does not matter
    spec = replace(_table_spec(optimizer), statistics=StatisticsSpec(), admission=admission)
    table = SparseTable(spec)
    keys = read_only(np.arange(_NUM_KEYS, dtype=np.uint64))
    values = read_only(np.ones((_NUM_KEYS, _DIM), np.float32))
    counts = read_only(np.ones((_NUM_KEYS, NUM_COUNTS), np.uint32))
    for _ in range(2):
        table.push(SparseGrad(keys, values, 1, counts), scores=table.scores(keys))


def _table_spec(optimizer: str) -> TableSpec:
    return TableSpec(
        name="table",
        dim=_DIM,
        initializer=InitializerSpec(kind="normal", scale=1.0),
        optimizer=_optimizer_spec(optimizer),
        num_shards=1,
    )


def _dense_spec(optimizer: str) -> DenseSpec:
    segment = DenseSegment(length=_DIM, initializer=InitializerSpec(kind="normal", scale=1.0))
    return DenseSpec(name="block", segments=(segment,), optimizer=_optimizer_spec(optimizer))


def _optimizer_spec(optimizer: str) -> OptimizerSpec:
    return OptimizerSpec(name=optimizer, params=dict.fromkeys(OPTIMIZERS[optimizer].required, 0.1))


def main() -> int:
    """Compiles the kernels and logs the seconds."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logger.info("kernels ready seconds=%.1f", precompile_kernels())
    return 0


if __name__ == "__main__":
    sys.exit(main())
