"""What `ps-cluster` refuses before anything moves, and how fast it copies."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ctr_ps.protos.errors import ProtocolError, UsageError
from ctr_ps.protos.placement import NUM_PLACES, ShardMap
from ctr_ps.protos.store.moves import Cut, MapState, SeenPushes
from ctr_ps.ps_worker.extras.moves import cli
from ctr_ps.ps_worker.extras.moves.cli import require_spare
from ctr_ps.ps_worker.extras.moves.move import (
    FEW_ROWS,
    MIB,
    Move,
    accesses_between,
    merged,
    weights_of,
)
from ctr_ps.ps_worker.extras.moves.plan import balanced, without_server
from tests.support.local_transport import Answer
from tests.support.stores import DEEP, WIDE

SPARE, FIRST = "ps-2:1", "ps-0:1"


def state(endpoint: str, **own: Any) -> MapState:
    of = {"members": "2 workers and 1 heter trainer", "has_update_log": True, **own}
    return MapState(
        shard_map=ShardMap.of(1, (endpoint,)),
        server=None,
        move="",
        last_move="",
        tables=[],
        blocks=[],
        rows=[],
        **of,
    )


def test_a_spare_of_the_same_job_is_taken_with_a_log_or_without() -> None:
    require_spare(SPARE, state(SPARE), state(FIRST))
    require_spare(SPARE, state(SPARE), state(FIRST, has_update_log=False))


@pytest.mark.parametrize(
    ("spare", "why"),
    [
        (state("localhost:1"), f"{SPARE} is localhost:1 in its own environment"),
        (replace(state(SPARE), server=1), f"{SPARE} is server 1 of a cluster already"),
        (
            state(SPARE, members="3 workers"),
            "for 3 workers, but the job has 2 workers and 1 heter trainer",
        ),
        (state(SPARE, has_update_log=False), f"{SPARE} keeps no update log, but the servers"),
    ],
    ids=["name", "server", "members", "log"],
)
def test_a_server_of_another_kind_is_refused_by_name(spare: MapState, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        require_spare(SPARE, spare, state(FIRST))


def test_a_command_plans_by_the_map_to_which_the_move_before_has_led(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "PAUSE_S", 0.0)
    before = replace(state(FIRST), server=0)
    after = replace(before, shard_map=replace(before.shard_map, epoch=2))
    answers = [replace(before, move="other"), after]

    class Servers:
        shard_map = before.shard_map

        def call(self, *_: Any, **_options: Any) -> Answer[MapState]:
            found = answers.pop(0) if len(answers) > 1 else after
            return Answer(lambda: found)

        def use(self, shard_map: ShardMap) -> None:
            self.shard_map = shard_map

    servers = Servers()
    cli._wait_for_another(servers)
    assert servers.shard_map.epoch == 2


def test_no_rows_move_between_servers_that_stay_where_balance_needs_none() -> None:
    """The heaviest places of the server that leaves are given away first."""
    shard_map = ShardMap.of(3, ("a:1", "b:1", "c:1"))
    rows = [0] * NUM_PLACES
    # Places 0, 3, ... are of server 0.
    rows[:9] = [5, 5, 9, 5, 5, 3, 0, 0, 3]  # 9, 3 and 3 leave server 2

    after = without_server(shard_map, 2, rows)

    assert [after.owners[each] for each in (0, 3, 1, 4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("others", "is_worth_it"),
    [((0, 0), False), ((2, 3), False), ((1, 0), False), ((15, 0), True)],
    ids=["idle", "more elsewhere", "hardly more here", "more here"],
)
def test_a_hot_place_stays_and_what_has_hardly_any_load_beside_it(
    others: tuple[int, int], is_worth_it: bool
) -> None:
    shard_map = ShardMap.of(2, ("a:1", "b:1"))
    load = [*others] * (NUM_PLACES // 2)  # of the two servers, in turns
    load[0] = 10**6

    after = balanced(shard_map, load).owners

    assert after[0] == 0
    assert (after != shard_map.owners) == is_worth_it


def test_load_is_that_between_two_moments_of_servers_that_count_on() -> None:
    def states(*accesses: int) -> dict[int, MapState]:
        return {server: state(FIRST, accesses=[of, 1]) for server, of in enumerate(accesses)}

    assert accesses_between(states(5, 7), states(8, 9)) == [5, 0]
    for after, why in (((4, 9), "was restarted"), ((5, 7), "nothing was pulled or pushed")):
        with pytest.raises(UsageError, match=why):
            accesses_between(states(5, 7), states(*after))
    for by in ("rows", "row_bytes"):
        with pytest.raises(UsageError, match=f"of an older version, which does not tell {by}"):
            weights_of({0: state(FIRST)}, by)


def test_the_cut_has_all_that_has_come_to_any_server() -> None:
    def cut(step: int, *pushes: int) -> Cut:
        seen = {worker: SeenPushes(incarnation=7, pushes=of) for worker, of in enumerate(pushes)}
        return Cut(step=step, seen=seen)

    assert merged([cut(4, 2, 9), cut(5, 3), cut(3, 1, 8)]) == cut(5, 3, 9)


def test_of_two_processes_of_a_worker_the_one_that_pushes_is_in_the_cut() -> None:
    def cut(incarnation: int, pushes: int) -> Cut:
        seen = {0: SeenPushes(incarnation=incarnation, pushes=pushes)}
        return Cut(step=0, seen=seen)

    assert merged([cut(7, 3), cut(8, 0)]) == merged([cut(8, 0), cut(7, 3)]) == cut(7, 3)
    with pytest.raises(ProtocolError, match="worker 0 is being replaced"):
        merged([cut(7, 3), cut(8, 1)])


def test_a_table_that_only_some_servers_have_yet_is_not_known() -> None:
    states = {
        server: replace(state(FIRST), rows=[1] * NUM_PLACES, tables=tables)
        for server, tables in enumerate(([WIDE, DEEP], [DEEP]))
    }
    shard_map = ShardMap.of(2, (FIRST, "ps-1:1"))
    servers = SimpleNamespace(
        shard_map=shard_map, call=lambda server, *_: Answer(lambda: states[server])
    )
    move = Move(servers, states, shard_map)

    move._look_at_specs()

    assert [*move._tables] == [DEEP.name]


@pytest.mark.parametrize(
    ("rounds", "rates"),
    [
        ([100, 50, 25, 12, 1], [10, 10, 10, 10, 10]),
        ([100, 100, 60, 60, 30, 1], [10, 10, 20, 20, 40, 40]),
        ([100] * 9, [10, 10, 20, 40, 80]),
    ],
    ids=["slower changes", "fast changes", "faster than copies"],
)
def test_copies_get_faster_while_rows_change_as_fast(rounds: list[int], rates: list[int]) -> None:
    used = []

    class Rounds(Move):
        def _copy_round(self, *, with_counts: bool = False) -> int:
            used.append(self._rate / MIB)
            return FEW_ROWS * rounds[len(used) - 1]

    shard_map = ShardMap.of(1, (FIRST,))
    states = {0: replace(state(FIRST), rows=[1] * NUM_PLACES)}
    Rounds(SimpleNamespace(shard_map=shard_map), states, shard_map, mib_per_s=10)._copy()

    assert used == rates
