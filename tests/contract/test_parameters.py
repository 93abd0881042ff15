"""One suite for every store: parameters that are declared, pulled and pushed."""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.errors import (
    GradientError,
    ProtocolError,
    SpecConflictError,
    SpecError,
    UnknownTableError,
    WrongServerError,
)
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad
from ctr_ps.protos.limits import CHUNK_BYTES
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing, Pulled
from tests.support.cluster import cluster
from tests.support.stores import (
    DEEP,
    KEYS,
    TOWER,
    assert_same_parameters,
    declare,
    in_process,
    pull,
    push_id,
    random_gradients,
)

SEVEN = DenseSegment(length=7, initializer=InitializerSpec())


def test_initial_values_are_those_of_the_seed_anywhere(store):
    assert_same_parameters(in_process(), store)
    assert np.count_nonzero(pull(store)["deep"]) == KEYS.size * 5


def test_pull_never_creates_a_row(store):
    before = store.digest()

    pull(store, Missing.INITIAL)
    pull(store, Missing.ZEROS)

    assert store.status().tables["deep"].rows == 0
    assert store.digest() == before


def test_missing_rows_read_zeros_where_asked(store):
    known = KEYS[:10]
    grad = SparseGrad(known, np.ones((10, 5), np.float32), 1)
    store.push_grad(Gradients({"deep": grad}), push_id()).result()

    rows = pull(store, Missing.ZEROS)["deep"]

    assert np.count_nonzero(rows[10:]) == 0
    np.testing.assert_array_equal(rows[:10], pull(store)["deep"][:10])
    assert np.count_nonzero(rows[:10]) == 50


def test_pull_of_no_keys_is_empty(store):
    keys = np.empty(0, np.uint64)

    pulled = store.pull_sparse({"deep": keys, "wide": KEYS[:2]}, missing=Missing.INITIAL).result()

    assert pulled.rows["deep"].shape == (0, 5)
    assert pulled.rows["wide"].shape == (2, 1)
    assert store.pull_sparse({}, missing=Missing.INITIAL).result() == Pulled({}, 0)


def test_pushes_move_rows_as_a_dict_would(store):
    """Table "wide" has SGD: w -= 0.5 * (sum of gradients / examples)."""
    oracle = dict.fromkeys(KEYS.tolist(), np.float32(0.0))

    for sequence in range(5):
        gradients = random_gradients(sequence)
        store.push_grad(gradients, push_id(sequence=sequence)).result()
        grad = gradients.sparse["wide"]
        for key, value in zip(grad.keys.tolist(), grad.values[:, 0], strict=True):
            oracle[key] -= np.float32(0.5) * (value * np.float32(1 / 8))

    np.testing.assert_allclose(
        pull(store)["wide"][:, 0], [oracle[key] for key in KEYS.tolist()], rtol=1e-5, atol=1e-7
    )
    touched = {key for key, value in oracle.items() if value}
    assert store.status().tables["wide"].rows == len(touched)


def test_parts_of_large_pushes_and_pulls_make_the_same_model(open_job):
    (store,) = open_job(chunk_bytes=100)
    reference = in_process()

    for sequence in range(3):
        for each in (reference, store):
            each.push_grad(random_gradients(sequence), push_id(sequence=sequence)).result()

    assert_same_parameters(reference, store)
    assert store.status().examples == {0: 3}


def test_gradient_is_divided_by_the_weight_of_its_examples(store):
    """Whole or not: what is applied is the weighted mean."""
    keys = KEYS[:3]
    before = pull(store)["wide"][:3].copy()
    grad = SparseGrad(keys, np.ones((3, 1), np.float32), 2.5)

    store.push_grad(Gradients({"wide": grad}), push_id()).result()

    np.testing.assert_allclose(pull(store)["wide"][:3], before - 0.5 / 2.5, rtol=1e-6)


def test_step_is_divided_by_the_weights_of_all_workers(open_job):
    """A worker's push id says it, as its gradients may be of other tables than another's."""
    first, second = open_job(num_workers=2)
    before = pull(first)["wide"][:3].copy()
    pushes = []
    for worker, store, total, weight in ((0, first, 1.0, 0.25), (1, second, 2.0, 2.75)):
        grad = SparseGrad(KEYS[:3], np.full((3, 1), total, np.float32), weight)
        identity = replace(push_id(worker=worker, examples=9), weight=weight)
        pushes.append(store.push_grad(Gradients({"wide": grad}), identity, at=0))

    for push in pushes:
        push.result()
    first.wait_version(1).result()

    np.testing.assert_allclose(pull(first)["wide"][:3], before - 0.5 * 3.0 / 3.0, rtol=1e-6)
    assert first.status().examples == {0: 9, 1: 9}


@pytest.mark.parametrize("staleness", [0, 1, 3, 15, 10**6])
def test_stale_gradient_counts_in_adagrad_for_those_that_it_did_not_know(open_job, staleness):
    """From 0, steps of g = 1: the second has n = 1 + (1 + 2 s); more than 15 are as 15."""
    (store,) = open_job(num_workers=1)
    adagrad = OptimizerSpec(
        name="adagrad", params={"learning_rate": 0.5, "initial_accumulator": 0.0}
    )
    zeros = InitializerSpec(kind="uniform", scale=0.0)
    store.create_table(TableSpec(name="t", dim=2, initializer=zeros, optimizer=adagrad))
    store.create_dense(
        DenseSpec(
            name="d", segments=(DenseSegment(length=3, initializer=zeros),), optimizer=adagrad
        )
    )
    gradients = Gradients(
        {"t": SparseGrad(KEYS, np.full((KEYS.size, 2), 4.0, np.float32), 4)},
        {"d": DenseGrad(np.full(3, 4.0, np.float32), 4)},
    )
    begun = max(1, staleness)  # batches of the first push

    store.push_grad(gradients, push_id(0, 0, batches=begun)).result()
    store.push_grad(gradients, push_id(0, 1, pulled=begun - staleness)).result()

    expected = -0.5 - 0.5 / np.sqrt(2 + 2 * min(staleness, 15))
    rows = store.pull_sparse({"t": KEYS}, missing=Missing.ZEROS).result().rows["t"]
    block = np.empty(3, np.float32)
    store.pull_dense({"d": block}).result()
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    np.testing.assert_allclose(block, expected, rtol=1e-6)


def test_empty_gradients_change_nothing(store):
    before = store.digest()
    empty = SparseGrad(np.empty(0, np.uint64), np.empty((0, 5), np.float32), 0)

    store.push_grad(Gradients(), push_id()).result()
    store.push_grad(Gradients({"deep": empty}), push_id(sequence=1)).result()

    assert store.digest() == before
    assert store.status().tables["deep"].rows == 0


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec(name="deep", dim=6, initializer=DEEP.initializer, optimizer=DEEP.optimizer),
        TableSpec(name="tower", dim=1, initializer=DEEP.initializer, optimizer=DEEP.optimizer),
        TableSpec(name="new", dim=0, initializer=DEEP.initializer, optimizer=DEEP.optimizer),
        TableSpec(
            name="new", dim=1, initializer=DEEP.initializer, optimizer=OptimizerSpec(name="x")
        ),
    ],
    ids=["other-dim", "name-of-a-block", "no-dim", "unknown-optimizer"],
)
def test_table_that_cannot_be_is_refused(store, spec):
    with pytest.raises(SpecError):
        store.create_table(spec)

    assert set(store.status().tables) == {"deep", "wide"}


def test_dense_block_of_another_length_is_refused(store):
    with pytest.raises(SpecConflictError, match="tower"):
        store.create_dense(
            DenseSpec(name="tower", segments=TOWER.segments[:1], optimizer=TOWER.optimizer)
        )


def test_dense_block_begins_with_the_values_that_are_given(store):
    values = np.arange(7, dtype=np.float32)
    spec = replace(TOWER, name="given", segments=(SEVEN,), values_digest=5)

    store.create_dense(spec, values)
    store.create_dense(spec, values + 1)  # by another worker, or again: no error, no change

    out = np.empty(7, np.float32)
    store.pull_dense({"given": out}).result()
    np.testing.assert_array_equal(out, values)
    with pytest.raises(SpecConflictError, match="exists with other initial values"):
        store.create_dense(replace(spec, values_digest=6), values)


def test_values_of_a_segment_replace_those_given_for_the_block(store):
    """As a bias starts at the click rate of the data, in a model that gives initial values."""
    bias = DenseSegment(length=2, initializer=InitializerSpec(), values=(0.5, -3.0))
    spec = replace(TOWER, name="given", segments=(SEVEN, bias, SEVEN), values_digest=5)

    store.create_dense(spec, np.arange(16, dtype=np.float32))

    out = np.empty(16, np.float32)
    store.pull_dense({"given": out}).result()
    assert out.tolist() == [*range(7), 0.5, -3.0, *range(9, 16)]


def test_dense_block_of_one_element_is_pulled_and_pushed(store):
    """Of several servers, all but one have no element of it."""
    one = DenseSegment(length=1, initializer=InitializerSpec())
    sgd = OptimizerSpec(name="sgd", params={"learning_rate": 0.5})
    store.create_dense(replace(TOWER, name="tiny", segments=(one,), optimizer=sgd))

    gradient = DenseGrad(np.array([4.0], np.float32), 1)
    store.push_grad(Gradients({}, {"tiny": gradient}), push_id(sequence=0)).result()

    out = np.full(1, np.nan, np.float32)
    store.pull_dense({"tiny": out}).result()
    assert out.tolist() == [-2.0]


@pytest.mark.parametrize(
    ("digest", "values", "message"),
    [
        (5, None, "has a digest of initial values, but no values"),
        (0, np.ones(7, np.float32), "has initial values, but no digest of them"),
        (5, np.ones(8, np.float32), r"have shape \(8,\), expected \(7,\)"),
        (5, np.full(7, np.nan, np.float32), "infinite or NaN"),
    ],
)
def test_dense_block_with_other_values_than_it_says_is_refused(store, digest, values, message):
    spec = replace(TOWER, name="given", segments=(SEVEN,), values_digest=digest)

    with pytest.raises(SpecError, match=message):
        store.create_dense(spec, values)

    assert "given" not in str(store.status())


def bad_gradients() -> dict[str, Gradients]:
    good = random_gradients(0)
    deep, tower = good.sparse["deep"], good.dense["tower"]
    with_nan, with_infinity = deep.values.copy(), tower.values.copy()
    with_nan[-1, -1] = np.nan
    with_infinity[-1] = -np.inf

    def push(sparse: SparseGrad = deep, dense: DenseGrad = tower) -> Gradients:
        return Gradients({**good.sparse, "deep": sparse}, {"tower": dense})

    return {
        "nan-in-a-row": push(SparseGrad(deep.keys, with_nan, 8)),
        "infinity-in-a-block": push(dense=DenseGrad(with_infinity, 8)),
        "rows-too-narrow": push(SparseGrad(deep.keys, deep.values[:, :4].copy(), 8)),
        "row-missing": push(SparseGrad(deep.keys, deep.values[:-1], 8)),
        "block-too-short": push(dense=DenseGrad(tower.values[:-1], 8)),
        "rows-of-no-examples": push(SparseGrad(deep.keys, deep.values, 0)),
        "row-twice": push(SparseGrad(np.append(deep.keys[:-1], deep.keys[0]), deep.values, 8)),
        "block-of-no-examples": push(dense=DenseGrad(tower.values, 0)),
    }


@pytest.mark.parametrize("fault", list(bad_gradients()))
def test_bad_gradient_changes_nothing(store, fault):
    store.push_grad(random_gradients(1), push_id()).result()
    before = store.digest()

    with pytest.raises(GradientError, match="deep" if "row" in fault else "tower"):
        store.push_grad(bad_gradients()[fault], push_id(sequence=1)).result()

    assert store.digest() == before
    assert store.status().examples == {0: 1}


def test_pull_into_a_vector_of_another_length_is_refused(store):
    with pytest.raises(ProtocolError, match="tower"):
        store.pull_dense({"tower": np.empty(TOWER.length + 1, np.float32)}).result()


def test_unknown_names_are_refused(store):
    before = store.digest()
    grad = SparseGrad(KEYS[:1], np.ones((1, 5), np.float32), 1)
    block = DenseGrad(np.ones(2, np.float32), 1)

    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.pull_sparse({"nowhere": KEYS}, missing=Missing.INITIAL).result()
    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.pull_dense({"nowhere": np.empty(2, np.float32)}).result()
    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.push_grad(Gradients({"deep": grad, "nowhere": grad}), push_id()).result()
    with pytest.raises(UnknownTableError, match="'nowhere'"):
        store.push_grad(Gradients({"deep": grad}, {"nowhere": block}), push_id()).result()

    assert store.digest() == before


@pytest.mark.parametrize(("num_servers", "epoch"), [(1, 0), (3, 5)])
def test_request_placed_by_another_shard_map_is_refused_and_changes_nothing(num_servers, epoch):
    """The last server has another map, so that the others could have answered; the first has no newer one."""
    with cluster(num_servers=num_servers) as servers:
        client = servers.client()
        declare(client)
        client.create_table(replace(DEEP, name="recording", records_changes=True))
        client.push_grad(random_gradients(0), push_id()).result()
        last = servers.stores[-1]
        digests = last.engine.parameters.shard_digests()
        last.engine.shard_map = replace(last.engine.shard_map, epoch=epoch)

        its = f"server {num_servers - 1} of {num_servers} is of epoch {epoch}"
        refused = f"epoch 1, but the map of {its}: connect"
        for call in (
            lambda: client.push_grad(random_gradients(1), push_id(sequence=1)),
            lambda: client.pull_sparse({"deep": KEYS}, missing=Missing.ZEROS),
            lambda: client.pull_dense({"tower": np.empty(TOWER.length, np.float32)}),
            lambda: client.pull_changed(["recording"], 0, max_rows=1),
        ):
            with pytest.raises(WrongServerError, match=refused):
                call().result()
        assert last.engine.parameters.shard_digests() == digests
        assert last.status().examples == {0: 1}


def test_version_counts_the_batches_pushed_on_arrival(open_job):
    """A pull for a version waits for them, too, and says which it has."""
    first, second = open_job(num_workers=2)
    waiting = first.pull_sparse({"wide": KEYS}, missing=Missing.INITIAL, at=5)

    versions = [
        first.push_grad(random_gradients(0), push_id(0, batches=3)).result(),
        second.push_grad(random_gradients(1), push_id(1, batches=0)).result(),
        second.push_grad(random_gradients(2), push_id(1, 1, batches=2)).result(),
    ]

    assert versions == [3, 3, 5]
    assert waiting.result().version == 5
    assert np.count_nonzero(waiting.result().rows["wide"]) > 0
    assert first.pull_dense({"tower": np.empty(TOWER.length, np.float32)}).result() == 5


def test_push_on_arrival_while_a_step_waits_for_parts_changes_nothing(open_job):
    first, second = open_job(num_workers=2)
    first.push_grad(random_gradients(0), push_id(0), at=0).result()
    before, status = first.digest(), first.status()

    with pytest.raises(ProtocolError, match="worker 1 pushed asynchronously"):
        second.push_grad(random_gradients(1), push_id(1)).result()

    assert first.digest() == before
    assert first.status() == status


BOTH = {"deep": KEYS, "wide": KEYS}


def pushed_and_pulled(store, sequence, at=None, worker=0):
    """Pushes random gradients, and returns futures of all parameters as of after that."""
    tower = np.empty(TOWER.length, np.float32)
    rows, dense = store.push_pull(
        random_gradients(10 * sequence + worker),
        push_id(worker, sequence),
        keys=BOTH,
        into={"tower": tower},
        at=at,
    )
    return rows, dense, tower


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 100])
def test_push_pull_reads_what_a_pull_after_the_push_reads(open_job, chunk_bytes):
    (store,) = open_job(chunk_bytes=chunk_bytes)
    reference = in_process()

    for sequence in range(3):
        reference.push_grad(random_gradients(10 * sequence), push_id(0, sequence)).result()
        rows, dense, tower = pushed_and_pulled(store, sequence)
        found = {**rows.result().rows, "tower": tower}
        assert rows.result().version == dense.result() == sequence + 1
        for name, values in pull(reference).items():
            np.testing.assert_array_equal(found[name], values)

    assert_same_parameters(reference, store)


def test_push_pull_of_a_step_waits_for_the_other_workers(open_job):
    first, second = open_job(num_workers=2)
    reference = in_process(num_workers=2)
    for step in range(3):
        for worker in range(2):
            reference.push_grad(
                random_gradients(10 * step + worker), push_id(worker, step), at=step
            ).result()
        mine = pushed_and_pulled(first, step, at=step)
        others = pushed_and_pulled(second, step, at=step, worker=1)
        for rows, dense, tower in (mine, others):
            assert dense.result() == rows.result().version == step + 1
            found = {**rows.result().rows, "tower": tower}
            for name, values in pull(reference, at=step + 1).items():
                np.testing.assert_array_equal(found[name], values)
    assert reference.digest() == first.digest()


def test_push_pull_without_dense_blocks_or_keys_is_a_push(store):
    reference = in_process()
    reference.push_grad(random_gradients(0), push_id()).result()

    rows, dense = store.push_pull(random_gradients(0), push_id(), keys={}, into={})

    assert rows.result() == Pulled({}, 1)
    assert dense.result() == 1
    assert_same_parameters(reference, store)


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 100])
def test_push_pull_that_is_refused_changes_nothing_and_says_why_to_both(open_job, chunk_bytes):
    first, _ = open_job(num_workers=2, chunk_bytes=chunk_bytes)
    before, status = first.digest(), first.status()
    tower = np.empty(TOWER.length, np.float32)

    def refused(gradients, at=None):
        return first.push_pull(gradients, push_id(), keys=BOTH, into={"tower": tower}, at=at)

    with pytest.raises(ProtocolError, match="it pushed step 1, expected 0"):
        refused(random_gradients(0), at=1)[0].result()
    with pytest.raises(ProtocolError, match="it pushed step 1, expected 0"):
        refused(random_gradients(0), at=1)[1].result()
    nan = SparseGrad(KEYS[:1], np.full((1, 5), np.nan, np.float32), 1)
    with pytest.raises(GradientError, match="not finite"):
        refused(Gradients({"deep": nan}))[0].result()

    assert (first.digest(), first.status()) == (before, status)
