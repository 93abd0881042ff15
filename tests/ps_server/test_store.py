"""A store in process: what it refuses, what it takes over from a checkpoint, whom it serves."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import (
    CheckpointError,
    CtrPsError,
    GradientError,
    ProtocolError,
    SpecConflictError,
    UnknownTableError,
    WrongServerError,
)
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing, PushId, SaveRequest, Staleness, StoreStatus
from ctr_ps.ps_server.checkpoint.files.digest import model_digest
from ctr_ps.ps_server.store import ParameterStore
from tests.reference.partition import unmix64
from tests.support.stores import push_id as new_push_id

ADAGRAD = OptimizerSpec(name="adagrad", params={"learning_rate": 0.5})
UNIFORM = InitializerSpec(kind="uniform", scale=0.1)
WIDE = TableSpec(name="wide", dim=1, initializer=UNIFORM, optimizer=ADAGRAD, num_shards=4)
DEEP = TableSpec(name="deep", dim=3, initializer=UNIFORM, optimizer=ADAGRAD, num_shards=4)
TOWER = DenseSpec(
    name="tower",
    segments=(
        DenseSegment(length=4, initializer=UNIFORM, name="first", shape=(2, 2)),
        DenseSegment(length=2, initializer=InitializerSpec(), name="second", shape=(2,)),
    ),
    optimizer=OptimizerSpec(name="adam"),
)


def new_store(num_workers: int = 2, **settings: int) -> ParameterStore:
    store = ParameterStore(num_workers=num_workers, **settings)
    store.create_table(WIDE)
    store.create_table(DEEP)
    store.create_dense(TOWER)
    return store


def keys_of(*keys: int) -> Keys:
    return np.array(keys, np.uint64)


def push_id(worker: int = 0, examples: int = 8) -> PushId:
    return new_push_id(worker, examples=examples)


def rows(dim: int, keys: Keys | None = None, examples: int = 8, seed: int = 0) -> SparseGrad:
    keys = keys_of(1, 2, 3) if keys is None else keys
    values = np.random.default_rng(seed).normal(size=(keys.size, dim)).astype(np.float32)
    return SparseGrad(keys, values, examples)


def piece(length: int = 6, examples: int = 8) -> DenseGrad:
    return DenseGrad(np.ones(length, np.float32), examples)


def push_of(**changes: SparseGrad | DenseGrad) -> Gradients:
    """Returns a good push, with some of its gradients replaced or added."""
    sparse: dict[str, SparseGrad] = {"wide": rows(1), "deep": rows(3)}
    dense: dict[str, DenseGrad] = {"tower": piece()}
    for name, grad in changes.items():
        if isinstance(grad, SparseGrad):
            sparse[name] = grad
        else:
            dense[name] = grad
    return Gradients(sparse, dense)


def seen(store: ParameterStore) -> tuple[str, StoreStatus]:
    return store.digest(), store.status()


def with_value(grad: SparseGrad, value: float) -> SparseGrad:
    grad.values[-1, -1] = value
    return grad


# What is refused changes nothing

NARROW = SparseGrad(keys_of(1, 2, 3), np.ones((3, 2), np.float32), 8)
SIGNED = SparseGrad(np.array([1, 2, 3]), np.ones((3, 3), np.float32), 8)  # type: ignore[arg-type]
DOUBLE = SparseGrad(keys_of(1, 2, 3), np.ones((3, 3)), 8)  # type: ignore[arg-type]

BAD_PUSHES = {
    "rows-too-narrow": (push_of(deep=NARROW), GradientError, r"'deep'.*\(3, 2\)"),
    "rows-too-few": (
        push_of(deep=SparseGrad(keys_of(1, 2), np.ones((3, 3), np.float32), 8)),
        GradientError,
        r"'deep'.*\(3, 3\), expected \(2, 3\)",
    ),
    "rows-not-finite": (
        push_of(deep=with_value(rows(3), np.nan)),
        GradientError,
        "'deep' is not finite: key 3",
    ),
    "rows-of-no-examples": (push_of(deep=rows(3, examples=0)), GradientError, "over 0 examples"),
    "rows-of-float64": (push_of(deep=DOUBLE), GradientError, "float64"),
    "signed-keys": (push_of(deep=SIGNED), ProtocolError, "int64"),
    "block-too-long": (push_of(tower=piece(7)), GradientError, "'tower' has 7 values"),
    "block-not-finite": (
        push_of(tower=DenseGrad(np.full(6, -np.inf, np.float32), 8)),
        GradientError,
        "'tower' is not finite: element 0 is -inf",
    ),
    "block-of-no-examples": (push_of(tower=piece(examples=0)), GradientError, "over 0 examples"),
    "unknown-table": (push_of(depe=rows(3)), UnknownTableError, "no table 'depe'"),
    "unknown-block": (push_of(towre=piece()), UnknownTableError, "no dense block 'towre'"),
    "table-as-block": (push_of(wide=piece()), UnknownTableError, "no dense block 'wide'"),
}


@pytest.mark.parametrize("at", [None, 0], ids=["async", "sync"])
@pytest.mark.parametrize("fault", BAD_PUSHES)
def test_bad_push_changes_nothing(fault: str, at: int | None) -> None:
    """Although what comes before the fault is good; and a good push is taken after it."""
    gradients, error, message = BAD_PUSHES[fault]
    store = new_store(num_workers=1)
    before = seen(store)

    with pytest.raises(error, match=message):
        store.push_grad(gradients, push_id(), at=at)

    assert seen(store) == before
    store.push_grad(push_of(), push_id(), at=at)
    assert store.digest() == trained_once()


@pytest.mark.parametrize("at", [None, 0], ids=["async", "sync"])
@pytest.mark.parametrize("again", [0, 1], ids=["first-chunk", "last-chunk"])
def test_bad_push_in_chunks_is_refused_again(again: int, at: int | None) -> None:
    """Else a worker that did not hear of the refusal is told that its push is on its way."""
    store = new_store(num_workers=1)
    push = push_id()
    good, bad = rows(3, keys_of(4, 5, 6)), with_value(rows(3), np.nan)
    chunks = [
        PushChunk(sparse=[("deep", grad)], dense=[], chunk=number, num_chunks=2)
        for number, grad in enumerate((good, bad))
    ]
    store.engine.push_chunk(chunks[0], push, at=at).result()
    with pytest.raises(GradientError, match="not finite"):
        store.engine.push_chunk(chunks[1], push, at=at)

    with pytest.raises(GradientError, match="not finite"):
        store.engine.push_chunk(chunks[again], push, at=at)

    assert store.engine.job.waiting() == []
    store.push_grad(push_of(), push_id(), at=at)
    assert store.digest() == trained_once()


def trained_once() -> str:
    store = new_store(num_workers=1)
    store.push_grad(push_of(), push_id())
    return store.digest()


@pytest.mark.parametrize(
    ("examples", "problem"),
    [(0, "step 0 with 0 examples in its push id"), (-8, "examples = -8, expected 0 to")],
)
def test_part_of_a_step_without_examples_changes_nothing(examples: int, problem: str) -> None:
    """The step divides by the examples of the push ids: its gradients would be left out."""
    store = new_store(num_workers=1)
    before = seen(store)

    with pytest.raises(ProtocolError, match=problem):
        store.push_grad(push_of(), push_id(examples=examples), at=0)

    assert seen(store) == before


@pytest.mark.parametrize(("worker", "at"), [(2, None), (2, 0), (-1, 0), (0, 1), (0, -1), (1, 7)])
def test_push_of_a_stranger_or_at_another_step_changes_nothing(worker: int, at: int | None) -> None:
    store = new_store()
    before = seen(store)

    with pytest.raises(ProtocolError, match=f"worker {worker} "):
        store.push_grad(push_of(), push_id(worker), at=at)

    assert seen(store) == before


def test_key_of_another_server_changes_nothing() -> None:
    store = ParameterStore(num_workers=1, server_index=0, num_servers=2)
    store.create_table(WIDE)
    store.create_table(DEEP)
    own, foreign = unmix64(0), unmix64(1 << 62)  # shards 0 and 1 of 4

    with pytest.raises(WrongServerError, match="shard 1, which is on server 1"):
        store.push_grad(
            Gradients({"wide": rows(1, keys_of(own)), "deep": rows(3, keys_of(own, foreign))}),
            push_id(),
        )

    assert store.status().tables["wide"].rows == 0
    with pytest.raises(WrongServerError):
        store.pull_sparse({"deep": keys_of(foreign)}, missing=Missing.ZEROS)


# Names and specs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 4}, "dim is 3, not 4"),
        ({"seed": 9}, "seed is 0, not 9"),
        ({"num_shards": 8}, "num_shards is 4, not 8"),
        ({"initializer": InitializerSpec()}, "initializer is .*uniform"),
        ({"optimizer": OptimizerSpec(name="adagrad")}, "optimizer is .*learning_rate"),
        ({"dim": 4, "seed": 9}, "dim is 3, not 4, seed is 0, not 9"),
    ],
)
def test_other_spec_of_a_table_is_refused_by_its_fields(
    change: dict[str, object], message: str
) -> None:
    store = new_store()
    before = seen(store)

    with pytest.raises(SpecConflictError, match=f"'deep' exists with another spec: {message}"):
        store.create_table(replace(DEEP, **change))  # type: ignore[arg-type]

    assert seen(store) == before


def test_one_name_is_one_thing() -> None:
    store = new_store()

    with pytest.raises(SpecConflictError, match="'tower' is both"):
        store.create_table(replace(DEEP, name="tower"))
    with pytest.raises(SpecConflictError, match="'deep' is both"):
        store.create_dense(replace(TOWER, name="deep"))


# Loading


def saved(folder: Path, **changes: object) -> str:
    """Saves a trained store with one of its specs changed; returns the folder."""
    store = ParameterStore()
    for spec in ({"wide": WIDE, "deep": DEEP, "tower": TOWER} | changes).values():
        if isinstance(spec, TableSpec):
            store.create_table(spec)
            store.push_grad(Gradients({spec.name: rows(spec.dim)}), push_id())
        elif isinstance(spec, DenseSpec):
            store.create_dense(spec)
    store.save(SaveRequest(url=str(folder)))
    return str(folder)


@pytest.mark.parametrize("is_declared_first", [True, False], ids=["declare-load", "load-declare"])
def test_loaded_parameters_go_on_with_the_hyper_parameters_of_the_job(
    is_declared_first: bool, tmp_path: Path
) -> None:
    """Ten times the rate moves a row ten times as far, from the accumulators that were saved."""
    folder = saved(tmp_path / "model")
    fast = replace(DEEP, optimizer=OptimizerSpec(name="adagrad", params={"learning_rate": 5.0}))
    moved = []
    for spec in (DEEP, fast):
        store = ParameterStore()
        if is_declared_first:
            store.create_table(spec)
        store.load(folder)
        store.create_table(spec)
        before = pulled(store)
        store.push_grad(Gradients({"deep": rows(3, seed=1)}), push_id())
        moved.append(pulled(store) - before)

    np.testing.assert_allclose(moved[1], 10 * moved[0], rtol=1e-4)


def pulled(store: ParameterStore) -> np.ndarray:
    keys = {"deep": keys_of(1, 2, 3)}
    return store.pull_sparse(keys, missing=Missing.ZEROS).result().rows["deep"].astype(np.float64)


BY_SGD = OptimizerSpec(name="sgd", params={"learning_rate": 0.1})
MISFITS: dict[str, tuple[dict[str, object], str]] = {
    "dim": (
        {"deep": replace(DEEP, dim=4)},
        "does not fit: 'deep' was saved with dim 4, but the job declares dim 3; .* checkpoint.only",
    ),
    "shards": (
        {"deep": replace(DEEP, num_shards=8)},
        f"'deep' was saved with num_shards 8, but the job declares num_shards {DEEP.num_shards};",
    ),
    "dim-and-optimizer": (
        {"deep": replace(DEEP, dim=4, optimizer=BY_SGD)},
        "'deep' was saved with dim 4, optimizer 'sgd', but the job declares dim 3, optimizer 'adagrad';",
    ),
    "length": (
        {"tower": replace(TOWER, segments=TOWER.segments[:1])},
        f"'tower' was saved with length .*, but the job declares length {TOWER.length};",
    ),
    "layout": (
        {"tower": replace(TOWER, segments=tuple(reversed(TOWER.segments)))},
        r"'tower' was saved with second \[2\], not first \[2, 2\]; .* and their order",
    ),
    "dense-optimizer": (
        {"tower": replace(TOWER, optimizer=BY_SGD)},
        "'tower' was saved with optimizer 'sgd', but the job declares optimizer 'adam'; .*only",
    ),
    "geo": (
        {"tower": replace(TOWER, optimizer=OptimizerSpec(name="sum"))},
        "optimizer 'sum', but .* 'adam'; 'sum' is the optimizer of mode \"geo\": train in that mode both",
    ),
    "missing": ({"deep": None}, "has no deep"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_checkpoint_that_does_not_fit_replaces_nothing(misfit: str, tmp_path: Path) -> None:
    """Not even the tables of it that do fit."""
    changed, message = MISFITS[misfit]
    folder = saved(tmp_path / "model", **changed)
    store = new_store()
    store.push_grad(push_of(wide=rows(1, seed=5)), push_id())
    before = seen(store)

    with pytest.raises(CheckpointError, match=f"checkpoint {folder} .*{message}"):
        store.load(folder)

    assert seen(store) == before


def test_job_that_declares_a_loaded_table_otherwise_is_refused(tmp_path: Path) -> None:
    store = ParameterStore()
    store.load(saved(tmp_path / "model"))

    with pytest.raises(SpecConflictError, match=f"{tmp_path}/model .*dim 3, but .* dim 4;"):
        store.create_table(replace(DEEP, dim=4))

    store.create_table(DEEP)


def test_job_claims_a_loaded_table_once(tmp_path: Path) -> None:
    """The first worker's spec counts; the second may not have another."""
    store = ParameterStore()
    store.load(saved(tmp_path / "model"))

    store.create_table(replace(DEEP, seed=1))

    with pytest.raises(SpecConflictError, match="seed is 1, not 2"):
        store.create_table(replace(DEEP, seed=2))


# Servers and jobs


def test_digests_of_servers_are_those_of_the_whole_store() -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 300, np.uint64)
    whole = new_store()
    whole.push_grad(Gradients({"deep": rows(3, keys)}), push_id())
    servers = [new_store(server_index=i, num_servers=3) for i in range(3)]
    grad = rows(3, keys)
    for server, own in zip(servers, ShardMap.of(3).route(keys, DEEP.num_shards), strict=True):
        server.push_grad(Gradients({"deep": SparseGrad(keys[own], grad.values[own], 8)}), push_id())

    tower = np.empty(6, np.float32)
    whole.pull_dense({"tower": tower})
    digests = {
        shard: digest
        for server in servers
        for shard, digest in server.engine.parameters.shard_digests().items()
    }
    assert model_digest({"tower": tower}, digests) == whole.digest()
    with pytest.raises(ProtocolError, match="has only its own shards"):
        servers[0].digest()


def test_next_job_finds_the_parameters_and_no_workers() -> None:
    store = new_store()
    store.push_grad(push_of(), push_id(), at=0)
    store.push_grad(push_of(), push_id(1), at=0)
    store.leave(0, step=1)
    store.leave(1, step=1)
    assert store.engine.job.all_left()
    before = store.digest()

    store.engine.begin_job()

    assert store.digest() == before
    assert not store.engine.job.all_left()
    status = store.status()
    assert (status.version, status.examples, status.left) == (0, {}, frozenset())
    assert status.staleness == Staleness()
    store.push_grad(push_of(), push_id(), at=0)


def test_failed_answer_reaches_the_one_who_waits_for_it() -> None:
    """Not the worker whose push brought the version."""
    store = new_store(num_workers=1, server_index=0, num_servers=2)
    foreign = keys_of(unmix64(1 << 62))
    waiting = store.pull_sparse({"wide": foreign}, missing=Missing.ZEROS, at=1)
    other = store.pull_sparse({"wide": keys_of()}, missing=Missing.ZEROS, at=1)

    assert store.push_grad(Gradients(), push_id(examples=0), at=0).result() == 1

    assert other.result().rows["wide"].shape == (0, 1)
    with pytest.raises(CtrPsError, match="is on server 1"):
        waiting.result()


def test_push_that_could_not_be_applied_leaves_steps_as_they_were(monkeypatch) -> None:
    store = new_store(num_workers=1)

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(store.engine.parameters.table("deep"), "push", no_memory)
    with pytest.raises(MemoryError):
        store.push_grad(Gradients({"deep": rows(3)}), push_id())

    assert store.push_grad(Gradients(), push_id(), at=0).result() == 1
