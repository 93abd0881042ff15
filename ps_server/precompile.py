"""Compilation of the kernels of a server before it needs them, those of the job's tables alone.

    a table is declared --> kernels of its optimizer and admission --> it is created --> pulls, pushes
    python -m ctr_ps.ps_server.precompile    # all kernels, into numba's cache, as when an image is built

A tiny store runs every operation of a server, with read-only arrays as they are decoded from messages: numba
compiles another function for writable ones.
"""

import logging
import sys
import threading
import time
from dataclasses import replace

import numpy as np

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.gradients import NUM_COUNTS, DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.runtime.jit import compile_lock, read_only
from ctr_ps.protos.runtime.logs import configure_logs
from ctr_ps.protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import Missing, PushId
from ctr_ps.protos.wire.encoding.arrays import from_bfloat16, to_bfloat16
from ctr_ps.ps_server.checkpoint.files.saved_rows import first_misplaced
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.feature_life.admission import counter_dtype, filter_settings
from ctr_ps.ps_server.table.sparse_table import SparseTable
from ctr_ps.ps_server.table.spec_checks import check_table_spec

logger = logging.getLogger(__name__)

_DIM = 2
_NUM_KEYS = 100  # more than the first index of the only shard has slots, so that it grows
_ADMISSIONS = (
    AdmissionSpec(threshold=2),
    AdmissionSpec(threshold=2, counter="bloom", expected_keys=_NUM_KEYS),
    AdmissionSpec(threshold=300, counter="bloom", expected_keys=_NUM_KEYS),  # of wider counters
)
"""One of each kind of kernels."""


class Kernels:
    """Compiled kernels, or loaded ones, of tables and dense blocks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: set[str | AdmissionSpec] = set()

    def are_ready(self, spec: TableSpec | DenseSpec) -> bool:
        """Whether a table or dense block needs no others."""
        return not self._missing(spec)

    def prepare(self, spec: TableSpec | DenseSpec) -> None:
        """Compiles what a table or dense block needs, seconds for the first of a kind."""
        if self.are_ready(spec):
            return
        with self._lock, compile_lock():
            for kind in self._missing(spec):
                if isinstance(kind, str):
                    _exercise(kind)
                else:
                    _admit(kind)
                self._ready.add(kind)

    def prepare_loading(self) -> None:
        """Compiles what it takes to load tables whose specs are not known yet."""
        any_optimizer = next(iter(OPTIMIZERS))
        self.prepare(_dense_spec(any_optimizer))

    def prepare_all(self) -> None:
        """Compiles what any job may need."""
        for name in OPTIMIZERS:
            self.prepare(_dense_spec(name))
        for admission in _ADMISSIONS:
            self.prepare(_admitting(name, admission))
        from_bfloat16(to_bfloat16(np.ones(1, np.float32)))  # async: wire_dtype

    def _missing(self, spec: TableSpec | DenseSpec) -> list[str | AdmissionSpec]:
        """Returns the optimizer and admission left to compile; nothing for a spec that will be refused."""
        if isinstance(spec, TableSpec):
            try:
                check_table_spec(spec)
            except SpecError:
                return []  # the store says what is wrong with it
        name = spec.optimizer.name
        kinds: list[str | AdmissionSpec] = [name] if name in OPTIMIZERS else []
        if isinstance(spec, TableSpec) and spec.admission is not None:
            kinds.append(kind_of(spec.admission))
        return [kind for kind in kinds if kind not in self._ready]


KERNELS = Kernels()
"""Those of this process."""


def kind_of(admission: AdmissionSpec) -> AdmissionSpec:
    """Returns the admission of `_ADMISSIONS` whose kernels an admission needs."""
    exact, narrow, wide = _ADMISSIONS
    if admission.counter != "bloom":
        return exact
    is_wide = counter_dtype(filter_settings(admission).max_count) is np.uint16
    return wide if is_wide else narrow


def _exercise(optimizer: str) -> None:
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
    source, target = SparseTable(table), SparseTable(table)
    weights, state = source.pull_states(keys)
    no_statistics = np.empty((keys.size, 0), np.float32)
    target.write(Rows(keys=keys, weights=weights, state=state, statistics=no_statistics))
    by_score = ExpirySpec(max_rows=_NUM_KEYS // 2, evict="score")
    loaded = SparseTable(replace(counting, expiry=by_score), num_subscribers=1)
    loaded.push(counted)
    snapshot = loaded.begin_snapshot()
    loaded.push(counted)
    saved = snapshot.export_shard(0)
    first_misplaced(read_only(saved.keys), 0, 1)
    loaded.write(saved)
    SparseTable(counting, server_index=1).put_moved(saved, keys)
    loaded.end_snapshot(saved=True)
    loaded.take_changed(0, _NUM_KEYS)
    loaded.key_of_new_row(keys)
    loaded.shrink(max_norm=0.0)


def _admit(admission: AdmissionSpec) -> None:
    optimizer = next(iter(OPTIMIZERS))  # any: it does not matter
    table = SparseTable(_admitting(optimizer, admission))
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


def _admitting(optimizer: str, admission: AdmissionSpec) -> TableSpec:
    return replace(_table_spec(optimizer), statistics=StatisticsSpec(), admission=admission)


def _dense_spec(optimizer: str) -> DenseSpec:
    segment = DenseSegment(length=_DIM, initializer=InitializerSpec(kind="normal", scale=1.0))
    return DenseSpec(name="block", segments=(segment,), optimizer=_optimizer_spec(optimizer))


def _optimizer_spec(optimizer: str) -> OptimizerSpec:
    return OptimizerSpec(name=optimizer, params=dict.fromkeys(OPTIMIZERS[optimizer].required, 0.1))


def main() -> int:
    """Compiles all kernels and logs the seconds."""
    configure_logs()
    start = time.perf_counter()
    KERNELS.prepare_all()
    logger.info("kernels ready seconds=%.1f", time.perf_counter() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
