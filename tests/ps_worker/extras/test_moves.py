"""What `ps-cluster` refuses before anything moves."""

from dataclasses import replace
from typing import Any

import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store.moves import MapState
from ctr_ps.ps_worker.extras.moves.cli import require_spare

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
