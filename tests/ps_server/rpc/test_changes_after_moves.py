"""Changed rows that a worker takes while shards move: none is lost, and none comes late."""

from dataclasses import replace

import numpy as np

from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import Changed, Missing
from ctr_ps.protos.store.moves import Cut, Phase
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.store import ParameterStore
from tests.support.stores import WIDE, joined, member, push_id

BEFORE = ShardMap.of(2, ("a:1", "b:1"))
LEAVES = 3  # of the shards of server 1
AFTER = replace(
    BEFORE,
    epoch=2,
    owners=tuple(0 if place == LEAVES else owner for place, owner in enumerate(BEFORE.owners)),
)
TABLE = replace(WIDE, num_shards=8, records_changes=True)


def server_1() -> tuple[Handlers, np.ndarray]:
    """Returns a server with rows that worker 1 has pushed, and their keys."""
    store = joined(ParameterStore(num_workers=2, server_index=1, num_servers=2))
    store.create_table(TABLE)
    keys = np.arange(1000, dtype=np.uint64)
    keys = keys[BEFORE.route(keys, TABLE.num_shards)[1]]
    grad = SparseGrad(keys, np.ones((keys.size, 1), np.float32), 1)
    store.push_grad(Gradients({TABLE.name: grad}), push_id(worker=1)).result()
    return Handlers(store.engine), keys


def request(epoch: int) -> requests.PullChanged:
    return requests.PullChanged(
        tables=[TABLE.name], member=member(0), max_rows=10_000, shard_map_epoch=epoch, number=1
    )


def close(handlers: Handlers):
    handlers.start(calls.BEGIN_MOVE, requests.BeginMove(token="m", shard_map=AFTER))
    return handlers.start(
        calls.HOLD_MOVE, requests.HoldMove(token="m", number=1, phase=Phase.CLOSE, cut=Cut())
    )


def end(handlers: Handlers) -> None:
    prepare = requests.PrepareMove(token="m", server=1, progress={}, records=[])
    handlers.start(calls.PREPARE_MOVE, prepare).result()
    handlers.start(calls.END_MOVE, requests.EndMove(token="m", is_committed=True)).result()


def test_call_that_comes_again_by_a_newer_map_gets_the_rows_that_are_still_here() -> None:
    """Another server has refused its map. Rows that have moved come from there, with later pushes."""
    handlers, keys = server_1()
    first = handlers.start(calls.PULL_CHANGED, request(1)).result()
    np.testing.assert_array_equal(np.sort(first.rows[TABLE.name][0]), keys)
    close(handlers).result()
    end(handlers)

    again: Changed = handlers.start(calls.PULL_CHANGED, request(2)).result()
    found, values = again.rows[TABLE.name]
    stays = keys[AFTER.route(keys, TABLE.num_shards)[1]]
    assert 0 < stays.size < keys.size
    np.testing.assert_array_equal(np.sort(found), stays)
    table = handlers.engine.parameters.table(TABLE.name)
    np.testing.assert_array_equal(values, table.pull(found, Missing.INITIAL))


def test_move_does_not_end_while_rows_are_taken() -> None:
    """Else rows of shards that are not there any more would count as known, and never come again."""
    handlers, _ = server_1()
    moves = handlers.moves
    assert moves.enter(calls.PULL_CHANGED, request(1)) is None
    closed = close(handlers)
    assert isinstance(closed, WaitingFuture)
    assert not closed.done()
    waits = moves.enter(calls.PULL_CHANGED, request(1))
    moves.left(calls.PULL_CHANGED)
    assert closed.done()
    assert waits is not None
    assert not waits.done()
    end(handlers)
    assert waits.done()
