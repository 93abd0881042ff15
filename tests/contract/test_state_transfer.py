"""One suite for every store: rows and blocks that leave with their optimizer state, and come back."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.errors import CtrPsError, GradientError, ProtocolError, UnknownTableError
from ctr_ps.protos.spec import StatisticsSpec
from ctr_ps.protos.store import BlockState, ModelState, SaveRequest, Store
from ctr_ps.protos.store.state_transfer import join_state, rows_at, split_state
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from tests.support.call_faults import faults_of_calls
from tests.support.cluster import cluster
from tests.support.stores import (
    DEEP,
    KEYS,
    TOWER,
    OpenJob,
    assert_same_parameters,
    declare,
    in_process,
    joined,
    pull,
    push_id,
    random_gradients,
    train,
)

ALL = {"deep": KEYS, "wide": KEYS}


def state_of(store: Store) -> ModelState:
    return store.pull_state(ALL, ["tower"]).result()


def test_state_is_what_a_checkpoint_has(store: Store) -> None:
    """Of rows that exist, and for others that of new rows; nothing is created."""
    reference = in_process()
    for each in (store, reference):
        train(each, 0, 1)
    before = store.digest()

    state = state_of(store)

    exported = [
        reference.engine.parameters.table("deep").export_shard(shard) for shard in range(64)
    ]
    saved = {
        int(key): (weights, rows.state[i])
        for rows in exported
        for i, (key, weights) in enumerate(zip(rows.keys, rows.weights, strict=True))
    }
    rows = state.rows["deep"]
    new = in_process().pull_state({"deep": KEYS}, []).result().rows["deep"]
    assert 0 < len(saved) < KEYS.size
    for i, key in enumerate(KEYS.tolist()):
        weights, own = saved.get(key, (new.weights[i], new.state[i]))
        np.testing.assert_array_equal(rows.weights[i], weights)
        np.testing.assert_array_equal(rows.state[i], own)
    piece = reference.engine.parameters.block("tower").export()
    np.testing.assert_array_equal(state.blocks["tower"].weights, piece.weights)
    np.testing.assert_array_equal(state.blocks["tower"].element_state, piece.element_state)
    np.testing.assert_array_equal(state.blocks["tower"].scalars, piece.scalars)
    assert store.digest() == before


@pytest.mark.parametrize("chunk_bytes", [150, 2**20])
def test_model_that_moved_trains_on_as_if_it_had_stayed(
    open_job: OpenJob, chunk_bytes: int
) -> None:
    (store,) = open_job(chunk_bytes=chunk_bytes)
    source = in_process()
    train(source, 0, 1, 2)
    state = state_of(source)

    rows = {name: rows_at(state.rows[name], are_trained(name)) for name in ALL}
    store.push_state(ModelState(rows, state.blocks), push_id(sequence=0)).result()
    for each in (source, store):
        current = push_id(sequence=3, pulled=each.status().version)
        each.push_grad(random_gradients(7), current).result()

    assert_same_parameters(source, store)


def are_trained(table: str) -> np.ndarray:
    return np.isin(KEYS, [random_gradients(i).sparse[table].keys for i in range(3)])


def test_push_of_state_counts_as_any_push(store: Store) -> None:
    """It moves the version and the worker's progress on, and comes again without an effect."""
    state = state_of(store)
    first = replace(push_id(sequence=0, examples=30, batches=3), step=3, position="here")
    changed = replace(state.rows["deep"], weights=state.rows["deep"].weights + 1)

    version = store.push_state(ModelState({"deep": changed}, state.blocks), first).result()
    again = store.push_state(ModelState(state.rows, state.blocks), first).result()

    assert (version, again) == (3, 3)
    status = store.status()
    assert status.examples == {0: 30}
    assert (status.progress[0].step, status.progress[0].position) == (3, "here")
    np.testing.assert_array_equal(pull(store)["deep"], changed.weights)


def test_empty_state_changes_nothing(store: Store) -> None:
    before = store.digest()
    nobody = rows_at(state_of(store).rows["deep"], slice(0))

    store.push_state(ModelState(), push_id()).result()
    store.push_state(ModelState({"deep": nobody}), push_id()).result()

    assert store.pull_state({}, []).result() == ModelState({}, {})
    assert store.digest() == before


def bad_states() -> dict[str, tuple[type[CtrPsError], str, ModelState]]:
    good = in_process().pull_state(ALL, ["tower"]).result()
    deep, tower = good.rows["deep"], good.blocks["tower"]

    def rows(**changes: object) -> ModelState:
        return ModelState({**good.rows, "deep": replace(deep, **changes)}, good.blocks)

    def block(**changes: object) -> ModelState:
        return ModelState(good.rows, {"tower": replace(tower, **changes)})

    infinite, unknown = deep.weights.copy(), tower.element_state.copy()
    infinite[-1, -1], unknown[-1, -1] = np.inf, np.nan
    no_number = deep.state.copy()
    no_number[7, 0] = np.nan
    return {
        "narrow-rows": (ProtocolError, "deep", rows(weights=deep.weights[:, :4].copy())),
        "narrow-state": (ProtocolError, "deep", rows(state=deep.state[:, :4].copy())),
        "other-optimizer": (
            ProtocolError,
            "has the state of optimizer 'momentum', expected 'adagrad'",
            rows(optimizer="momentum"),
        ),
        "infinite-weight": (GradientError, f"row of key {KEYS[-1]}", rows(weights=infinite)),
        "nan-in-state": (GradientError, f"row of key {KEYS[7]}", rows(state=no_number)),
        "key-twice": (ProtocolError, "deep", rows(keys=np.append(KEYS[:-1], KEYS[0]))),
        "short-block": (ProtocolError, "tower", block(weights=tower.weights[:-1])),
        "block-without-state": (
            ProtocolError,
            "tower",
            block(element_state=tower.element_state[:1]),
        ),
        "block-without-scalars": (ProtocolError, "tower", block(scalars=tower.scalars[:1])),
        "block-of-another": (ProtocolError, "optimizer 'sgd'", block(optimizer="sgd")),
        "nan-in-block": (GradientError, "tower", block(element_state=unknown)),
    }


@pytest.mark.parametrize("fault", list(bad_states()))
def test_bad_state_changes_nothing(store: Store, fault: str) -> None:
    train(store, 0)
    before = store.digest()
    error, message, state = bad_states()[fault]

    with pytest.raises(error, match=message):
        store.push_state(state, push_id(sequence=1)).result()

    assert store.digest() == before
    assert store.status().examples == {0: 1}


def test_unknown_names_are_refused(store: Store) -> None:
    state = state_of(store)

    for call in (
        lambda: store.pull_state({"nowhere": KEYS}, []),
        lambda: store.pull_state({}, ["nowhere"]),
        lambda: store.push_state(ModelState({"nowhere": state.rows["deep"]}), push_id()),
        lambda: store.push_state(ModelState({}, {"nowhere": state.blocks["tower"]}), push_id()),
    ):
        with pytest.raises(UnknownTableError, match="'nowhere'"):
            call().result()


def test_table_that_keeps_statistics_stays_where_it_is(store: Store) -> None:
    store.create_table(replace(DEEP, name="counting", statistics=StatisticsSpec()))
    rows = state_of(store).rows["deep"]

    with pytest.raises(ProtocolError, match="'counting' keeps statistics"):
        store.pull_state({"counting": KEYS}, []).result()
    with pytest.raises(ProtocolError, match="'counting' keeps statistics"):
        store.push_state(ModelState({"counting": rows}), push_id()).result()


def test_process_without_its_place_changes_nothing(store: Store) -> None:
    state = state_of(store)
    stranger = replace(push_id(sequence=0), incarnation=99)

    with pytest.raises(ProtocolError, match="worker 0"):
        store.push_state(state, stranger).result()

    assert store.status().tables["deep"].rows == 0
    assert store.status().version == 0


def test_rows_beyond_the_memory_limit_are_not_created() -> None:
    store = joined(in_process(memory_limit=1))
    state = state_of(store)

    with pytest.raises(CtrPsError, match="refuses a new row"):
        store.push_state(state, push_id()).result()

    assert store.status().tables["deep"].rows == 0


def test_chunks_of_gradients_and_of_state_are_not_one_push() -> None:
    """A confused sender: neither is applied."""
    from ctr_ps.protos.chunking import PushChunk
    from ctr_ps.protos.store import StateChunk

    store = joined(in_process())
    push = push_id(sequence=0)
    store.engine.push_chunk(PushChunk([], [], 0, 2), push).result()

    with pytest.raises(ProtocolError, match="mixes chunks of gradients and chunks of state"):
        store.engine.push_chunk(StateChunk([], [], 1, 2), push).result()


def test_state_whose_calls_are_lost_or_come_twice_arrives_once(tmp_path: Path) -> None:
    """Requests and replies, of pulls and pushes in several chunks."""
    journal = tmp_path / "journal"
    source, reference = in_process(), in_process()
    train(source, 0, 1)
    with (
        cluster(num_servers=2) as servers,
        faults_of_calls(journal, calls=("Push", "Pull"), lost=0.3, twice=0.3),
    ):
        client = servers.client(chunk_bytes=800)
        declare(client)

        for sequence in range(2):
            state = state_of(source)
            for each in (client, reference):
                each.push_state(state, push_id(sequence=sequence, examples=8)).result()
            found = state_of(client)
            train(source, 2 + sequence)

        assert client.digest() == reference.digest()
        assert client.status().examples == {0: 16}
        assert client.status().version == 2
    np.testing.assert_array_equal(found.rows["deep"].weights, state.rows["deep"].weights)
    np.testing.assert_array_equal(found.rows["deep"].state, state.rows["deep"].state)
    happened = set(journal.read_text().splitlines())
    for call in ("PushState", "PullState"):
        assert {f"{fault} {call}" for fault in ("request_lost", "reply_lost", "twice")} <= happened


def test_push_of_state_leaves_a_snapshot_as_it_was(store: Store, tmp_path: Path) -> None:
    """Rows and blocks that it overwrites while they are saved, and rows that it creates."""
    train(store, 0, 1)
    digest, state = store.digest(), changed(state_of(store))
    expected = in_process()
    train(expected, 0, 1)

    saved = store.save(
        SaveRequest(
            url=str(tmp_path / "c"),
            on_snapshot=lambda: store.push_state(state, push_id(sequence=2)).result(),
        )
    )

    loaded = in_process()
    loaded.load(str(tmp_path / "c"))
    assert saved == digest
    assert_same_parameters(expected, loaded)
    assert store.status().tables["deep"].rows == KEYS.size > loaded.status().tables["deep"].rows
    np.testing.assert_array_equal(pull(store)["deep"], state.rows["deep"].weights)
    np.testing.assert_array_equal(pull(store)["tower"], state.blocks["tower"].weights)


@pytest.mark.parametrize("is_while_saving", [True, False], ids=["while-saving", "after-a-save"])
def test_next_delta_has_what_a_push_of_state_wrote(
    store: Store, tmp_path: Path, is_while_saving: bool
) -> None:
    """Old and new rows, no others, and the block."""
    base, delta = (str(tmp_path / name) for name in ("base", "delta"))
    train(store, 0)
    before = state_of(store)
    wrote = changed(before)
    rows = {
        "deep": rows_at(wrote.rows["deep"], slice(0, 50)),
        "wide": rows_at(wrote.rows["wide"], slice(9)),
    }

    def push() -> None:
        store.push_state(ModelState(rows, wrote.blocks), push_id(sequence=1)).result()

    store.save(SaveRequest(url=base, on_snapshot=push if is_while_saving else None))
    if not is_while_saving:
        push()
    store.save(SaveRequest(url=delta, base=base))

    loaded = in_process()
    loaded.load(delta)
    assert loaded.digest() == store.digest()
    assert_same_parameters(store, loaded)
    manifest = Checkpoint.open(delta).manifest
    assert manifest.kind == "delta"
    for name, written in rows.items():
        files = manifest.files_of_table(name)
        assert sum(batch.rows for file in files for batch in file.batches) == written.keys.size


def changed(state: ModelState) -> ModelState:
    """Returns a state of the same rows and blocks in which every number is another."""
    return ModelState(
        {
            name: replace(rows, weights=rows.weights + 1, state=rows.state + 2)
            for name, rows in state.rows.items()
        },
        {
            name: replace(
                block,
                weights=block.weights + 1,
                element_state=block.element_state + 2,
                scalars=block.scalars * np.float32(0.5),
            )
            for name, block in state.blocks.items()
        },
    )


def test_stretch_beyond_a_piece_is_refused() -> None:
    from ctr_ps.protos.store import Stretch
    from ctr_ps.protos.wire import calls
    from ctr_ps.protos.wire.requests import PullState

    with cluster() as servers:
        client = servers.client()
        declare(client)
        request = PullState(
            keys={},
            stretches=[Stretch(block="tower", start=5, stop=TOWER.length + 1)],
            shard_map_epoch=1,
        )
        with pytest.raises(ProtocolError, match=f"but the block has {TOWER.length} on this server"):
            client._transport.call(0, calls.PULL_STATE, request).result()


def test_block_state_of_more_servers_than_elements_is_whole() -> None:
    spec = replace(TOWER, name="tiny", segments=(replace(TOWER.segments[0], length=2),))
    with cluster(num_servers=3) as servers:
        client = servers.client()
        client.create_dense(spec)
        state = client.pull_state({}, ["tiny"]).result().blocks["tiny"]

        moved = replace(state, weights=state.weights + 1, element_state=state.element_state + 2)
        client.push_state(ModelState({}, {"tiny": moved}), push_id(sequence=0)).result()

        found: BlockState = client.pull_state({}, ["tiny"]).result().blocks["tiny"]
        np.testing.assert_array_equal(found.weights, moved.weights)
        np.testing.assert_array_equal(found.element_state, moved.element_state)


def test_stretches_in_another_order_are_no_block() -> None:
    first, *others = split_state(ModelState({}, state_of(in_process()).blocks), limit_bytes=64)
    assert others

    with pytest.raises(ProtocolError, match="starts at element"):
        join_state([*others, first])


def test_servers_are_told_of_an_acknowledged_push_of_state() -> None:
    """Else one that has lost it would go on without it."""
    with cluster() as servers:
        client = servers.client()
        declare(client)
        client.push_state(state_of(client), push_id(sequence=0)).result()

        assert client._workers[0].acknowledgements.told().pushes == 1
