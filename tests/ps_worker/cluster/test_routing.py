"""Each key and element reaches the server that its placement names, and comes back in its place."""

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError, UnknownTableError
from ctr_ps.protos.gradients import DenseGrad, Gradients, SparseGrad, Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import BlockState, Changed, ModelState, RowStates
from ctr_ps.ps_worker.cluster import state_transfer
from ctr_ps.ps_worker.cluster.routing import Routing
from tests.reference.partition import server_of, server_of_element

SGD = OptimizerSpec(name="sgd", params={"learning_rate": 0.1})
SHARDS = {"wide": 16, "deep": 64}
DIMS = {"wide": 1, "deep": 3}
LENGTHS = {"tower": 101, "bias": 2}
KEYS = {
    "wide": np.array([0, 2**64 - 1, 7, 2**63, 5], np.uint64),
    "deep": np.random.default_rng(7).integers(0, 2**64, 300, np.uint64, endpoint=False),
}
SERVERS = [1, 2, 3, 8]
"""With eight servers, some have no key of the smaller table and no element of the smaller block."""

CHUNK_BYTES = 200


def routing(num_servers: int, chunk_bytes: int = CHUNK_BYTES) -> Routing:
    tables = [
        TableSpec(
            name=name,
            dim=DIMS[name],
            num_shards=SHARDS[name],
            initializer=InitializerSpec(),
            optimizer=SGD,
        )
        for name in SHARDS
    ]
    blocks = [
        DenseSpec(
            name=name,
            segments=(DenseSegment(length=length, initializer=InitializerSpec()),),
            optimizer=SGD,
        )
        for name, length in LENGTHS.items()
    ]
    return Routing(
        ShardMap.of(num_servers),
        chunk_bytes,
        tables={spec.name: spec for spec in tables},
        blocks={spec.name: spec for spec in blocks},
    )


def row_of(table: str, key: int) -> list[float]:
    """Returns a row that no other key of a table has, and no other table."""
    return [key % 1_000_003 + 0.25 * column + len(table) for column in range(DIMS[table])]


def rows_of(table: str, keys: Keys) -> Values:
    rows = [row_of(table, int(key)) for key in keys]
    return np.array(rows, np.float32).reshape(-1, DIMS[table])


@pytest.mark.parametrize("num_servers", SERVERS)
def test_each_key_is_asked_of_its_server_once(num_servers: int) -> None:
    asked: dict[tuple[str, int], int] = {}
    for server, parts in routing(num_servers).split_pull(KEYS).items():
        for table, positions in [each for part in parts for each in part.items()]:
            for position in positions.tolist():
                assert (table, position) not in asked
                asked[table, position] = server

    assert asked == {
        (table, position): server_of(int(key), SHARDS[table], num_servers)
        for table, keys in KEYS.items()
        for position, key in enumerate(keys)
    }


@pytest.mark.parametrize("num_servers", SERVERS)
def test_answers_become_rows_in_the_order_of_keys(num_servers: int) -> None:
    routes = routing(num_servers)
    rows = routes.empty_rows(KEYS)
    for out in rows.values():
        out.fill(np.nan)

    for part in [part for parts in routes.split_pull(KEYS).values() for part in parts]:
        answer = {table: rows_of(table, KEYS[table][where]) for table, where in part.items()}
        routes.write_rows(answer, part, rows)

    for table, keys in KEYS.items():
        np.testing.assert_array_equal(rows[table], rows_of(table, keys))


@pytest.mark.parametrize("num_servers", SERVERS)
def test_answers_to_the_parts_of_a_pull_fill_messages(num_servers: int) -> None:
    """None is over the limit, and none has room for the first row of the next."""
    for parts in routing(num_servers).split_pull(KEYS).values():
        rows = [[table for table, where in part.items() for _ in where] for part in parts]
        for own, after in zip(rows, [*rows[1:], []], strict=True):
            assert message_bytes(own) <= CHUNK_BYTES
            assert not after or message_bytes([*own, after[0]]) > CHUNK_BYTES


def message_bytes(rows: list[str]) -> int:
    return sum(8 + 4 * DIMS[table] for table in rows)


def test_server_without_keys_has_a_part_of_no_rows() -> None:
    none = {"deep": np.empty(0, np.uint64)}

    parts = routing(2).split_pull(none)

    assert {server: [part["deep"].tolist() for part in each] for server, each in parts.items()} == {
        0: [[]],
        1: [[]],
    }


def test_answer_of_another_width_is_refused() -> None:
    routes = routing(1)
    (part,) = routes.split_pull({"wide": KEYS["wide"]})[0]
    narrow = {"wide": np.zeros((5, 2), np.float32)}

    with pytest.raises(ProtocolError, match=r"'wide' with shape \(5, 2\), expected \(5, 1\)"):
        routes.write_rows(narrow, part, routes.empty_rows({"wide": KEYS["wide"]}))
    changed = Changed({"deep": (KEYS["deep"][:1], np.zeros((1, 2), np.float32))}, 0, False)
    with pytest.raises(ProtocolError, match=r"'deep' with shape \(1, 2\), expected \(1, 3\)"):
        routes.join_changed(["deep"], [changed])


@pytest.mark.parametrize("num_servers", SERVERS)
def test_pieces_become_whole_blocks(num_servers: int) -> None:
    """Each server answers with the elements that it has: their numbers, and those of no other."""
    routes = routing(num_servers)
    into = {block: np.full(length, np.nan, np.float32) for block, length in LENGTHS.items()}

    for server, parts in routes.split_pieces(LENGTHS).items():
        assert sorted(block for part in parts for block in part) == ["bias", "tower"]
        for part in parts:
            pieces = {block: elements_of(block, server, num_servers) for block in part}
            routes.write_pieces(pieces, server, into)

    for block, length in LENGTHS.items():
        assert into[block].tolist() == list(range(length))


def elements_of(block: str, server: int, num_servers: int) -> Values:
    length = LENGTHS[block]
    own = [e for e in range(length) if server_of_element(e, length, num_servers) == server]
    return np.array(own, np.float32)


def test_pieces_share_a_message_only_where_they_fit() -> None:
    """Of two servers, each has 4 bytes of the bias and 200 or 204 of the tower."""
    assert routing(2, chunk_bytes=203).split_pieces(LENGTHS) == {
        0: [["tower"], ["bias"]],
        1: [["tower"], ["bias"]],
    }
    assert routing(2, chunk_bytes=204).split_pieces(LENGTHS) == {
        0: [["tower", "bias"]],
        1: [["tower"], ["bias"]],
    }


@pytest.mark.parametrize("num_servers", SERVERS)
def test_each_gradient_reaches_its_server_once(num_servers: int) -> None:
    gradients = Gradients(
        {table: SparseGrad(keys, rows_of(table, keys), 9) for table, keys in KEYS.items()},
        {block: DenseGrad(np.arange(n, dtype=np.float32), 4) for block, n in LENGTHS.items()},
    )
    rows: dict[tuple[str, int], tuple[int, list[float]]] = {}
    elements: dict[tuple[str, int], tuple[int, float]] = {}

    for server, chunks in routing(num_servers).split_push(gradients, bfloat16=True).items():
        assert [chunk.chunk for chunk in chunks] == list(range(len(chunks)))
        for chunk in chunks:
            assert (chunk.num_chunks, chunk.bfloat16) == (len(chunks), True)
            for table, grad in chunk.sparse:
                assert grad.examples == 9
                for key, values in zip(grad.keys.tolist(), grad.values.tolist(), strict=True):
                    assert (table, key) not in rows
                    rows[table, key] = server, values
            for block, start, grad in chunk.dense:
                assert grad.examples == 4
                first = elements_of(block, server, num_servers)[:1].sum()
                for element, value in enumerate(grad.values.tolist(), int(first) + start):
                    assert (block, element) not in elements
                    elements[block, element] = server, value

    assert rows == {
        (table, int(key)): (
            server_of(int(key), SHARDS[table], num_servers),
            rows_of(table, np.array([key])).tolist()[0],
        )
        for table, keys in KEYS.items()
        for key in keys
    }
    assert elements == {
        (block, element): (server_of_element(element, length, num_servers), element)
        for block, length in LENGTHS.items()
        for element in range(length)
    }


def test_bytes_of_an_answer_are_those_of_its_rows_and_pieces() -> None:
    """The second of two servers has 51 elements of the tower, and one of the bias."""
    part = {"wide": np.array([1, 3], np.int32), "deep": np.array([0], np.int32)}

    assert routing(2).answer_bytes(part, LENGTHS, server=1) == 4 * (2 * 1 + 1 * 3 + 51 + 1)


@pytest.mark.parametrize(
    ("chunk_bytes", "expected"), [(1, 1), (199, 9), (200, 10)], ids=["less", "below", "ten"]
)
def test_changed_rows_are_as_many_as_the_widest_table_fits(chunk_bytes: int, expected: int) -> None:
    """A key and a row of `deep` have 8 + 3 * 4 bytes."""
    assert routing(1, chunk_bytes).changed_rows_in_message(["wide", "deep"]) == expected


def test_changed_rows_of_all_servers_are_those_of_the_oldest() -> None:
    parts = [
        Changed({"deep": (keys, rows_of("deep", keys))}, version, has_more)
        for keys, version, has_more in [
            (KEYS["deep"][:2], 8, False),
            (KEYS["deep"][:0], 3, False),
            (KEYS["deep"][2:5], 5, True),
        ]
    ]

    changed = routing(3).join_changed(["deep"], parts)

    keys, rows = changed.rows["deep"]
    assert (changed.version, changed.has_more) == (3, True)
    np.testing.assert_array_equal(keys, KEYS["deep"][:5])
    np.testing.assert_array_equal(rows, rows_of("deep", KEYS["deep"][:5]))


@pytest.mark.parametrize("num_servers", SERVERS)
def test_each_state_reaches_its_server_once(num_servers: int) -> None:
    length = LENGTHS["tower"]
    state = ModelState(
        {
            "deep": RowStates(
                keys=KEYS["deep"],
                weights=rows_of("deep", KEYS["deep"]),
                state=np.empty((KEYS["deep"].size, 0), np.float32),
                optimizer="sgd",
            )
        },
        {
            "tower": BlockState(
                weights=np.arange(length, dtype=np.float32),
                element_state=np.empty((0, length), np.float32),
                scalars=np.empty(0, np.float32),
                optimizer="sgd",
            )
        },
    )

    for server, chunks in state_transfer.split_push(routing(num_servers), state).items():
        rows = [found for chunk in chunks for _, found in chunk.rows]
        keys = np.concatenate([found.keys for found in rows])
        own = [key for key in KEYS["deep"] if server_of(int(key), 64, num_servers) == server]
        assert keys.tolist() == [int(key) for key in own]
        weights = np.concatenate([found.weights for found in rows])
        np.testing.assert_array_equal(weights, rows_of("deep", keys))
        elements = [e for chunk in chunks for _, _, found in chunk.blocks for e in found.weights]
        assert elements == elements_of("tower", server, num_servers).tolist()


@pytest.mark.parametrize("num_servers", SERVERS)
def test_each_state_is_asked_of_its_server_once(num_servers: int) -> None:
    asked: list[tuple[int, int]] = []
    elements: list[tuple[int, int]] = []

    for part in state_transfer.parts_of_pull(routing(num_servers), KEYS, ["tower"]):
        for table, positions in part.positions.items():
            np.testing.assert_array_equal(part.request.keys[table], KEYS[table][positions])
            if table == "deep":
                asked += [(int(position), part.server) for position in positions]
        for stretch in part.request.stretches:
            piece = elements_of("tower", part.server, num_servers)
            own = piece[stretch.start : stretch.stop]
            elements += [(int(element), part.server) for element in own]

    assert sorted(asked) == [
        (position, server_of(int(key), 64, num_servers))
        for position, key in enumerate(KEYS["deep"])
    ]
    assert sorted(elements) == [
        (element, server_of_element(element, 101, num_servers)) for element in range(101)
    ]


def test_what_was_not_declared_has_no_server() -> None:
    with pytest.raises(UnknownTableError, match=r"no table 'x' .* only \['deep', 'wide'\]"):
        routing(2).split_pull({"x": KEYS["wide"]})
    with pytest.raises(UnknownTableError, match=r"no dense block 'x' .* \['bias', 'tower'\]"):
        routing(2).split_pieces(["x"])
