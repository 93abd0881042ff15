"""After the warm-up no kernel is compiled for a worker."""

import json
import math
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.gradients import DenseGrad, SparseGrad
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
from ctr_ps.protos.store import Missing, SaveRequest
from ctr_ps.protos.wire.calls import CREATE_TABLE, PULL_SPARSE, PUSH_GRAD
from ctr_ps.protos.wire.requests import CreateTable, PullSparse, PushGrad
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.precompile import Kernels, kind_of
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_server.table.feature_life.admission import counter_dtype, filter_settings
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.commands import printed_by
from tests.support.local_transport import through
from tests.support.optimizers import plain_optimizer
from tests.support.stores import push_id


def compiled_kernels() -> Counter[str]:
    """Returns how many variants of each kernel there are."""
    counts: Counter[str] = Counter()
    for name, module in list(sys.modules.items()):
        if name.startswith(("ctr_ps.protos.", "ctr_ps.ps_server.")):
            for attribute, value in vars(module).items():
                if getattr(value, "__module__", None) == name:
                    counts[f"{name}.{attribute}"] = len(getattr(value, "signatures", ()))
    return +counts


def table_of(optimizer: str) -> TableSpec:
    return TableSpec(
        name="t",
        dim=10,
        initializer=InitializerSpec(kind="uniform", scale=0.1),
        optimizer=plain_optimizer(optimizer),
    )


def serve_a_job(optimizer: str, folder: str) -> None:
    """Does what two workers ask of a server, with arrays as they come off the wire."""
    spec = plain_optimizer(optimizer)
    store = ParameterStore(num_workers=2)
    table_spec = table_of(optimizer)
    counting_spec = replace(
        table_spec, name="c", statistics=StatisticsSpec(), expiry=ExpirySpec(max_rows=10_000)
    )
    store.create_table(table_spec)
    store.create_table(counting_spec)
    dense = []
    if OPTIMIZERS[optimizer].is_elementwise:
        segment = DenseSegment(length=100, initializer=table_spec.initializer)
        store.create_dense(DenseSpec(name="d", segments=(segment,), optimizer=spec))
        dense.append(("d", 0, DenseGrad(np.ones(100, np.float32), 4)))
    keys = np.arange(20_000, dtype=np.uint64)
    grad = SparseGrad(keys, np.ones((keys.size, 10), np.float32), 4)
    counted = replace(grad, counts=np.ones((keys.size, 2), np.uint32))
    for worker in range(2):
        own_id = push_id(worker, 0, examples=4)
        chunk = PushChunk([("t", grad), ("c", counted)], dense)
        push = through(
            PUSH_GRAD.request, PushGrad(chunk=chunk, push_id=own_id, at=0, shard_map_epoch=1)
        )
        store.engine.push_chunk(push.chunk, own_id, at=0).result()
    pull = through(
        PULL_SPARSE.request,
        PullSparse(keys={"t": keys}, missing=Missing.ZEROS, at=1, shard_map_epoch=1),
    )
    store.pull_sparse(pull.keys, missing=pull.missing, at=pull.at).result()
    store.save(SaveRequest(url=folder))
    store.load(folder)
    watched = SparseTable(table_spec, num_subscribers=2)
    watched.push(grad)
    watched.take_changed(1, 100)
    watched.shrink(max_norm=100.0)
    by_score = ExpirySpec(max_rows=10_000, evict="score")
    SparseTable(replace(counting_spec, expiry=by_score)).push(counted)
    store.shrink()


def admit_keys(admission: AdmissionSpec) -> None:
    """Trains a table whose keys are admitted, and one that is admitted by its score."""
    store = ParameterStore()
    spec = TableSpec(
        name="first",
        dim=10,
        initializer=InitializerSpec(),
        optimizer=plain_optimizer("adam"),
        statistics=StatisticsSpec(),
        admission=admission,
    )
    hot = AdmissionSpec(policy="score", threshold=1.0, table="first")
    store.create_table(spec)
    store.create_table(replace(spec, name="second", admission=hot))
    keys = np.arange(20_000, dtype=np.uint64)
    counts = np.ones((keys.size, 2), np.uint32)
    for sequence in range(2):
        own_id = push_id(0, sequence, examples=4)
        grad = SparseGrad(keys, np.ones((keys.size, 10), np.float32), 4, counts)
        sparse = [(name, grad) for name in ("first", "second")]
        request = PushGrad(chunk=PushChunk(sparse, []), push_id=own_id, shard_map_epoch=1)
        store.engine.push_chunk(through(PUSH_GRAD.request, request).chunk, own_id).result()
    assert store.status().tables["second"].rows == keys.size


def round_numbers() -> None:
    """Sends a push as bfloat16."""
    keys = np.arange(10, dtype=np.uint64)
    grad = SparseGrad(keys, np.ones((keys.size, 10), np.float32), 4)
    chunk = PushChunk([("t", grad)], [], bfloat16=True)
    through(PUSH_GRAD.request, PushGrad(chunk=chunk, push_id=push_id(), shard_map_epoch=1))


def test_job_after_the_warm_up_compiles_nothing(tmp_path):
    Kernels().prepare_all()
    before = compiled_kernels()

    for optimizer in OPTIMIZERS:
        serve_a_job(optimizer, str(tmp_path / optimizer))
    for admission in (
        AdmissionSpec(threshold=2),
        AdmissionSpec(threshold=2, counter="bloom", expected_keys=30_000),
        AdmissionSpec(policy="probability", threshold=1.0, counter="bloom", expected_keys=30_000),
    ):
        admit_keys(admission)
    round_numbers()

    assert before["ctr_ps.ps_server.table.rows.kernels.apply_rows"] >= len(OPTIMIZERS)
    assert compiled_kernels() == before


ONE_OPTIMIZER = """
import json, sys
from pathlib import Path
from ctr_ps.ps_server.precompile import Kernels
from tests.ps_server.test_precompile import compiled_kernels, serve_a_job, table_of

kernels = Kernels()
kernels.prepare(table_of("adagrad"))
before = compiled_kernels()
serve_a_job("adagrad", sys.argv[1])
print(json.dumps({
    "optimizers": before["ctr_ps.ps_server.table.rows.kernels.apply_rows"],
    "admissions": [name for name in before if "admit_" in name],
    "compiled later": dict(compiled_kernels() - before),
    "is another ready": kernels.are_ready(table_of("adam")),
}))
"""


def test_server_compiles_what_the_declared_tables_need_and_no_more(tmp_path):
    printed = printed_by(ONE_OPTIMIZER, tmp_path)

    assert json.loads(printed.splitlines()[-1]) == {
        "optimizers": 1,
        "admissions": [],
        "compiled later": {},
        "is another ready": False,
    }


class WatchedKernels(Kernels):
    """Notes what is prepared while the table is not there yet."""

    def __init__(self, store: ParameterStore) -> None:
        super().__init__()
        self.store = store
        self.prepared: list[tuple[str, bool]] = []

    def prepare(self, spec):
        self.prepared.append((spec.name, spec.name in self.store.status().tables))
        super().prepare(spec)


def test_kernels_of_a_table_are_compiled_before_it_is_there_in_a_thread():
    store = ParameterStore()
    kernels = WatchedKernels(store)
    handlers = Handlers(store.engine, kernels=kernels)
    spec = table_of("momentum")

    assert handlers.work(CREATE_TABLE, CreateTable(spec=spec)) == math.inf
    handlers.start(CREATE_TABLE, CreateTable(spec=spec)).result()

    assert kernels.prepared == [("t", False)]
    assert "t" in store.status().tables
    assert handlers.work(CREATE_TABLE, CreateTable(spec=spec)) == 0


def test_table_is_not_ready_while_its_kernels_are_compiled(monkeypatch):
    """Another thread that creates a table waits for them, and one whose compilation failed begins again."""
    kernels, admission = Kernels(), AdmissionSpec(threshold=2)
    spec = replace(table_of("adam"), statistics=StatisticsSpec(), admission=admission)
    seen = []
    for compile_part in ("_exercise", "_admit"):
        monkeypatch.setattr(
            f"ctr_ps.ps_server.precompile.{compile_part}",
            lambda _: seen.append(len(kernels._missing(spec))),
        )

    kernels.prepare(spec)

    assert seen == [2, 1]
    assert kernels.are_ready(spec)


def test_unknown_optimizer_is_refused_and_compiles_nothing():
    handlers = Handlers(ParameterStore().engine, kernels=Kernels())
    spec = replace(table_of("adam"), optimizer=OptimizerSpec(name="nadam", params={}))

    assert handlers.work(CREATE_TABLE, CreateTable(spec=spec)) == 0
    with pytest.raises(SpecError, match="nadam"):
        handlers.start(CREATE_TABLE, CreateTable(spec=spec))


@pytest.mark.parametrize("threshold", [math.nan, math.inf])
def test_impossible_admission_is_refused_and_compiles_nothing(threshold: float) -> None:
    handlers = Handlers(ParameterStore().engine, kernels=Kernels())
    admission = AdmissionSpec(threshold=threshold, counter="bloom", expected_keys=9)
    spec = replace(table_of("adam"), statistics=StatisticsSpec(), admission=admission)

    assert handlers.work(CREATE_TABLE, CreateTable(spec=spec)) == 0
    with pytest.raises(SpecError, match=f"threshold {threshold}"):
        handlers.start(CREATE_TABLE, CreateTable(spec=spec))


@pytest.mark.parametrize(
    ("admission", "counters"),
    [
        (AdmissionSpec(threshold=3), None),
        (AdmissionSpec(policy="score", threshold=3.0, table="other"), None),
        (AdmissionSpec(threshold=255, counter="bloom", expected_keys=9), np.uint8),
        (AdmissionSpec(threshold=256, counter="bloom", expected_keys=9), np.uint16),
        (
            AdmissionSpec(policy="probability", threshold=0.5, counter="bloom", expected_keys=9),
            np.uint16,
        ),
    ],
)
def test_kinds_of_admission_are_told_by_what_counts_the_keys(admission, counters):
    kind = kind_of(admission)

    assert kind.counter == admission.counter
    if counters is not None:
        assert counter_dtype(filter_settings(kind).max_count) is counters
