"""After the warm-up no kernel is compiled for a worker."""

import sys
from collections import Counter
from dataclasses import replace

import numpy as np

from protos.chunking import PushChunk
from protos.gradients import DenseGrad, SparseGrad
from protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    ExpirySpec,
    InitializerSpec,
    StatisticsSpec,
    TableSpec,
)
from protos.store import Missing, PushId, SaveRequest
from protos.wire.calls import PULL_SPARSE, PUSH_GRAD
from protos.wire.requests import PullSparse, PushGrad
from ps_server.optimizers.registry import OPTIMIZERS
from ps_server.precompile import precompile_kernels
from ps_server.store import ParameterStore
from ps_server.table.sparse_table import SparseTable
from tests.support.local_transport import through
from tests.support.optimizers import plain_optimizer


def compiled_kernels() -> Counter[str]:
    """Returns how many variants of each kernel there are."""
    counts: Counter[str] = Counter()
    for name, module in list(sys.modules.items()):
        if name.startswith(("protos.", "ps_server.")):
            for attribute, value in vars(module).items():
                if getattr(value, "__module__", None) == name:
                    counts[f"{name}.{attribute}"] = len(getattr(value, "signatures", ()))
    return +counts


def serve_a_job(optimizer: str, folder: str) -> None:
    """Does what two workers ask of a server, with arrays as they come off the wire."""
    spec = plain_optimizer(optimizer)
    store = ParameterStore(num_workers=2)
    initializer = InitializerSpec(kind="uniform", scale=0.1)
    table_spec = TableSpec(name="t", dim=10, initializer=initializer, optimizer=spec)
    counting_spec = replace(
        table_spec, name="c", statistics=StatisticsSpec(), expiry=ExpirySpec(max_rows=1000)
    )
    store.create_table(table_spec)
    store.create_table(counting_spec)
    dense = []
    if OPTIMIZERS[optimizer].is_elementwise:
        segment = DenseSegment(length=100, initializer=initializer)
        store.create_dense(DenseSpec(name="d", segments=(segment,), optimizer=spec))
        dense.append(("d", 0, DenseGrad(np.ones(100, np.float32), 4)))
    keys = np.arange(20_000, dtype=np.uint64)
    grad = SparseGrad(keys, np.ones((keys.size, 10), np.float32), 4)
    counted = replace(grad, counts=np.ones((keys.size, 2), np.uint32))
    for worker in range(2):
        push_id = PushId(
            worker=worker, incarnation=1, sequence=0, step=0, examples=4, batches=1, pulled=0
        )
        chunk = PushChunk([("t", grad), ("c", counted)], dense)
        push = through(
            PUSH_GRAD.request, PushGrad(chunk=chunk, push_id=push_id, at=0, shard_map_epoch=1)
        )
        store.push_chunk(push.chunk, push_id, at=0).result()
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
    by_score = ExpirySpec(max_rows=1000, evict="score")
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
        push_id = PushId(
            worker=0, incarnation=1, sequence=sequence, step=0, examples=4, batches=1, pulled=0
        )
        grad = SparseGrad(keys, np.ones((keys.size, 10), np.float32), 4, counts)
        sparse = [(name, grad) for name in ("first", "second")]
        request = PushGrad(chunk=PushChunk(sparse, []), push_id=push_id, shard_map_epoch=1)
        store.push_chunk(through(PUSH_GRAD.request, request).chunk, push_id).result()
    assert store.status().tables["second"].rows == keys.size


def test_job_after_the_warm_up_compiles_nothing(tmp_path):
    precompile_kernels()
    before = compiled_kernels()

    for optimizer in OPTIMIZERS:
        serve_a_job(optimizer, str(tmp_path / optimizer))
    for admission in (
        AdmissionSpec(threshold=2),
        AdmissionSpec(threshold=2, counter="bloom", expected_keys=30_000),
        AdmissionSpec(policy="probability", threshold=1.0, counter="bloom", expected_keys=30_000),
    ):
        admit_keys(admission)

    assert before["ps_server.table.rows.kernels.apply_rows"] >= len(OPTIMIZERS)
    assert compiled_kernels() == before
