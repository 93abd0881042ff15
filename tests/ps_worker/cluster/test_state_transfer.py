"""Answers to a pull of state become one state, unless they are not what was asked for."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import BlockState, ModelState, RowStates, StateChunk
from ctr_ps.ps_worker.cluster.routing import Routing
from ctr_ps.ps_worker.cluster.state_transfer import PartOfPull, joined, parts_of_pull
from tests.support.stores import DEEP, KEYS, TOWER, WIDE, in_process, train

ALL = {"deep": KEYS, "wide": KEYS}
Answers = list[tuple[PartOfPull, StateChunk]]


def routing(limit_bytes: int = 2000) -> Routing:
    return Routing(
        ShardMap.of(1), limit_bytes, tables={"deep": DEEP, "wide": WIDE}, blocks={"tower": TOWER}
    )


def answers(limit_bytes: int = 2000) -> Answers:
    """Returns those of a server that holds everything, to a pull of which each answer is small."""
    store = in_process()
    train(store, 0, 1)
    return [
        (
            part,
            store.engine.pulls.state_chunk(
                store.engine.job, part.request.keys, part.request.stretches
            ).result(),
        )
        for part in parts_of_pull(routing(limit_bytes), ALL, ["tower"])
    ]


def state_of(found: Answers) -> ModelState:
    return joined(routing(), ALL, found)


def test_small_answers_give_the_state_of_one_large_one() -> None:
    small, large = state_of(answers(100)), state_of(answers(2**20))

    for table in ALL:
        np.testing.assert_array_equal(small.rows[table].weights, large.rows[table].weights)
        np.testing.assert_array_equal(small.rows[table].state, large.rows[table].state)
    for what in ("weights", "element_state", "scalars"):
        found, expected = (getattr(each.blocks["tower"], what) for each in (small, large))
        np.testing.assert_array_equal(found, expected)


def in_rows(change: Callable[[RowStates], RowStates]) -> Callable[[StateChunk], StateChunk]:
    return lambda chunk: replace(
        chunk,
        rows=[
            (name, change(rows) if i == 0 else rows) for i, (name, rows) in enumerate(chunk.rows)
        ],
    )


def in_block(change: Callable[[BlockState], BlockState]) -> Callable[[StateChunk], StateChunk]:
    return lambda chunk: replace(
        chunk, blocks=[(name, start, change(block)) for name, start, block in chunk.blocks]
    )


FAULTS: dict[str, tuple[str, Callable[[StateChunk], StateChunk]]] = {
    "block-of-another-name": (
        r"parts of dense blocks \[.*'tower'.*\], but answered with \[.*'attic'",
        lambda chunk: replace(chunk, blocks=[("attic", *each[1:]) for each in chunk.blocks]),
    ),
    "block-missing": (
        r"\[.*\('tower', 0, 23\)\], but answered with \['deep', 'wide'\]",
        lambda chunk: replace(chunk, blocks=[]),
    ),
    "stretch-elsewhere": (
        r"with \[.*\('tower', 1, 24\)",
        lambda chunk: replace(chunk, blocks=[(name, 1, each) for name, _, each in chunk.blocks]),
    ),
    "stretch-too-short": (
        r"with \[.*\('tower', 0, 22\)",
        in_block(
            lambda each: replace(
                each, weights=each.weights[:-1], element_state=each.element_state[:, :-1]
            )
        ),
    ),
    "states-missing": (
        r"dense block 'tower' of shapes \(\(23,\), \(1, 23\), \(2,\)\)",
        in_block(lambda each: replace(each, element_state=each.element_state[:1])),
    ),
    "scalars-missing": (
        r"dense block 'tower' of shapes \(\(23,\), \(2, 23\), \(1,\)\)",
        in_block(lambda each: replace(each, scalars=each.scalars[:1])),
    ),
    "block-of-another-type": (
        r"dense block 'tower' of .* \['float32', 'float64'\], expected .* and float32",
        in_block(lambda each: replace(each, weights=each.weights.astype(np.float64))),
    ),
    "block-of-another-optimizer": (
        "dense block 'tower' of optimizer 'momentum', expected 'adam'",
        in_block(lambda each: replace(each, optimizer="momentum")),
    ),
    "table-of-another-name": (
        r"tables .*'deep'.* with \['cellar'",
        lambda chunk: replace(chunk, rows=[("cellar", chunk.rows[0][1]), *chunk.rows[1:]]),
    ),
    "table-missing": (r"with \['wide'", lambda chunk: replace(chunk, rows=chunk.rows[1:])),
    "keys-in-another-order": (
        "other keys of table 'deep'",
        in_rows(lambda rows: replace(rows, keys=rows.keys[::-1])),
    ),
    "rows-of-another-dim": (
        "table 'deep' of shapes",
        in_rows(lambda rows: replace(rows, weights=rows.weights[:, :4])),
    ),
    "rows-of-another-type": (
        r"table 'deep' of .* \['float32', 'float64'\]",
        in_rows(lambda rows: replace(rows, state=rows.state.astype(np.float64))),
    ),
    "rows-of-another-optimizer": (
        "table 'deep' of optimizer 'sgd', expected 'adagrad'",
        in_rows(lambda rows: replace(rows, optimizer="sgd")),
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_answer_that_was_not_asked_for_is_refused_by_name(fault: str) -> None:
    message, change = FAULTS[fault]
    ((part, chunk),) = answers(2**20)

    begins = "server 0 (was asked for|answered with) (the|a) state of "
    with pytest.raises(ProtocolError, match=f"{begins}.*{message}"):
        state_of([(part, change(chunk))])
