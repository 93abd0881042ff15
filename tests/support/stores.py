"""Tables and a dense block for the contract suite, and helpers for its tests."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Member, Missing, PushId, SaveRequest, Store
from ctr_ps.ps_server.store import ParameterStore

DEEP = TableSpec(
    name="deep",
    dim=5,
    initializer=InitializerSpec(kind="normal", scale=0.1),
    optimizer=OptimizerSpec(name="adagrad", params={"learning_rate": 0.05}),
    seed=3,
)
WIDE = TableSpec(
    name="wide",
    dim=1,
    initializer=InitializerSpec(),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 0.5}),
    num_shards=4,
)
TOWER = DenseSpec(
    name="tower",
    segments=(
        DenseSegment(length=20, initializer=InitializerSpec(kind="uniform", scale=0.3)),
        DenseSegment(length=3, initializer=InitializerSpec()),
    ),
    optimizer=OptimizerSpec(name="adam"),
    seed=5,
)
KEYS = np.random.default_rng(0).integers(0, 2**64, 200, dtype=np.uint64)
OpenJob = Callable[..., list[Store]]

INCARNATION = 7

_SEQUENCES = itertools.cycle(range(1000, 2**15))
"""Beyond those that tests give themselves, and not beyond what a ledger takes: no push comes twice."""


def declare(store: Store) -> None:
    store.create_table(DEEP)
    store.create_table(WIDE)
    store.create_dense(TOWER)


def in_process(**settings) -> ParameterStore:
    store = ParameterStore(**settings)
    declare(store)
    return store


def joined(store: ParameterStore) -> ParameterStore:
    """Returns a store whose workers have joined."""
    for worker in range(store.engine.members.total):
        store.join(worker, INCARNATION, terms={}).result()
    return store


def member(worker: int = 0) -> Member:
    return Member(worker, INCARNATION)


NEWEST = 2**40
"""Of a push: its gradients are of no older parameters than those that it changes."""


def push_id(worker=0, sequence=None, examples=1, batches=1, pulled=0) -> PushId:
    """Returns a push id, by default of the next push."""
    sequence = next(_SEQUENCES) if sequence is None else sequence
    return PushId(
        worker=worker,
        incarnation=INCARNATION,
        sequence=sequence,
        step=sequence,
        examples=examples,
        batches=batches,
        pulled=pulled,
    )


def random_gradients(seed: int, examples: int = 8) -> Gradients:
    random = np.random.default_rng(seed)

    def rows(dim: int) -> SparseGrad:
        keys = random.choice(KEYS, 60, replace=False)
        return SparseGrad(keys, random.normal(size=(60, dim)).astype(np.float32), examples)

    values = random.normal(size=TOWER.length).astype(np.float32)
    return Gradients(
        sparse={"deep": rows(5), "wide": rows(1)}, dense={"tower": DenseGrad(values, examples)}
    )


def train(store: Store, *sequences: int) -> None:
    for sequence in sequences:
        store.push_grad(random_gradients(sequence), push_id(sequence=sequence)).result()


def trained_chain(folder: Path | str, length: int) -> ParameterStore:
    """Returns a store with a full checkpoint 0 and deltas 1 to `length`."""
    store = in_process()
    train(store, 0)
    store.save(SaveRequest(url=f"{folder}/0", attachments={"note": b"0"}))
    for i in range(1, length + 1):
        train(store, i)
        note = {"note": str(i).encode()}
        store.save(SaveRequest(url=f"{folder}/{i}", attachments=note, base=f"{folder}/{i - 1}"))
    return store


def pull(store: Store, missing: Missing = Missing.INITIAL, at=None):
    rows = store.pull_sparse({"deep": KEYS, "wide": KEYS}, missing=missing, at=at).result().rows
    tower = np.empty(TOWER.length, np.float32)
    store.pull_dense({"tower": tower}, at=at).result()
    return {**rows, "tower": tower}


def assert_same_parameters(expected: Store, actual: Store) -> None:
    wanted, found = pull(expected), pull(actual)
    for name, values in wanted.items():
        np.testing.assert_array_equal(values, found[name])
    assert expected.digest() == actual.digest()
