"""`ps-cluster`: servers come and go while a job trains.

    ps-cluster 10.0.0.1:7164 status
    ps-cluster 10.0.0.1:7164 add 10.0.0.3:7164       # started with ps-server --spare
    ps-cluster 10.0.0.1:7164 drain 1
    ps-cluster 10.0.0.1:7164 replace 2 10.0.0.4:7164
    ps-cluster 10.0.0.1:7164 rebalance

The endpoint is that of server 0, which knows the others. A command that is interrupted, or fails, leaves
the shards where they were, or where they were to go, and may be given again.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from ctr_ps.protos.errors import (
    AccessError,
    CtrPsError,
    RecoveringError,
    TransportError,
    UsageError,
)
from ctr_ps.protos.format import require_format
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.role import require_endpoints, split_endpoints
from ctr_ps.protos.runtime.logs import configure_logs, errors_as_exit_codes
from ctr_ps.protos.runtime.options import LogFormatOption, LogLevelOption, command_app, run_command
from ctr_ps.protos.store.moves import MapState
from ctr_ps.protos.wire.calls import END_MOVE, GET_MAP, GET_STATUS, Call
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from ctr_ps.ps_worker.cluster.placement import end_of
from ctr_ps.ps_worker.cluster.transport import call_all
from ctr_ps.ps_worker.extras.moves.move import (
    MIB,
    MIB_PER_S,
    PAUSE_S,
    Move,
    Progress,
    accesses_between,
    connected,
    require_same_map,
    rows_of,
    states_of,
    weights_of,
)
from ctr_ps.ps_worker.extras.moves.plan import (
    balanced,
    index_of,
    num_moved,
    with_another,
    with_server,
    without_server,
)

T = TypeVar("T")

app = command_app("Show, add, drain, replace and rebalance the servers of a cluster that trains.")

FIRST_S = 5.0
"""For a server that is called first."""
OTHER_S = 40.0
"""A move whose driver is gone ends before."""
RETRY_S = 30.0
"""For a server that starts, or is started again; one that takes part in a move ends the move."""
TELL_S = 2.0
LOAD_S = 10.0
"""For which pulls and pushes are counted."""
LOAD_SHARE = 100
"""All load weighs so many times as much as all rows."""

NewServer = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="A server that was started with --spare.")
]
Server = Annotated[str, typer.Argument(help="The server: its index, or host:port.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, and move nothing.")]


class By(StrEnum):
    """What servers are to have alike."""

    ROWS = "rows"
    BYTES = "bytes"
    LOAD = "load"


Balance = Annotated[
    By,
    typer.Option(
        "--by",
        help=f"What servers are to have alike; load: keys of pulls and pushes within {LOAD_S:g} s.",
    ),
]
Rate = Annotated[
    float,
    typer.Option("--mib-per-s", min=1.0, help="Copy so much a second, to leave room for training."),
]


@app.callback()
def cluster(
    context: typer.Context,
    endpoints: Annotated[
        str,
        typer.Argument(
            help="Server 0 of the cluster, host:port, then others, if any do not know of a move."
        ),
    ],
    log_format: LogFormatOption = None,
    log_level: LogLevelOption = None,
) -> None:
    """Show, add, drain, replace and rebalance the servers of a cluster that trains."""
    configure_logs(log_format, log_level)
    context.obj = endpoints


@app.command()
def status(context: typer.Context) -> None:
    """Show the servers, their shards and rows, and whether a move is under way."""
    with _connected(context) as transport:
        states = _states(transport, limit_s=0.0)
        typer.echo(_table(transport.shard_map, transport.shard_map, states))
        if moves := sorted({each.move for each in states.values() if each.move}):
            typer.echo(f"move under way: {', '.join(moves)}")


@app.command()
def add(
    context: typer.Context,
    endpoint: NewServer,
    by: Balance = By.ROWS,
    dry_run: DryRun = False,
    mib_per_s: Rate = MIB_PER_S,
) -> None:
    """Add a server, which takes its share of the shards; one of the cluster stays as it is."""

    def plan(shard_map: ShardMap, weights: list[int]) -> ShardMap:
        if endpoint in shard_map.endpoints:
            typer.echo(f"{endpoint} is in the cluster already")
            return shard_map
        return with_server(shard_map, endpoint, weights)

    _move(context, plan, by=by, dry_run=dry_run, mib_per_s=mib_per_s, added=endpoint)


@app.command()
def drain(
    context: typer.Context,
    server: Server,
    by: Balance = By.ROWS,
    dry_run: DryRun = False,
    mib_per_s: Rate = MIB_PER_S,
) -> None:
    """Move all shards of a server to the others; it ends by itself."""
    _move(
        context,
        lambda shard_map, weights: without_server(shard_map, index_of(shard_map, server), weights),
        by=by,
        dry_run=dry_run,
        mib_per_s=mib_per_s,
    )


@app.command()
def replace(
    context: typer.Context,
    server: Server,
    endpoint: NewServer,
    dry_run: DryRun = False,
    mib_per_s: Rate = MIB_PER_S,
) -> None:
    """Move all shards of a server to a new one; it ends by itself."""
    _move(
        context,
        lambda shard_map, _: with_another(shard_map, index_of(shard_map, server), endpoint),
        dry_run=dry_run,
        mib_per_s=mib_per_s,
        added=endpoint,
    )


@app.command()
def rebalance(
    context: typer.Context,
    by: Balance = By.ROWS,
    dry_run: DryRun = False,
    mib_per_s: Rate = MIB_PER_S,
) -> None:
    """Move shards until all servers have about as many rows, bytes, or as much to do."""
    _move(context, balanced, by=by, dry_run=dry_run, mib_per_s=mib_per_s)


@contextmanager
def _connected(context: typer.Context) -> Iterator[GrpcTransport]:
    with errors_as_exit_codes():
        first, *others = require_endpoints(split_endpoints(context.obj), "the command")
        with closing(GrpcTransport([first], retry_s=RETRY_S)) as transport:
            if _first_answer(transport, GET_MAP, "is the job over?").server != 0:
                raise UsageError(f"{first} is not server 0 of its cluster: name that server first")
            connected(transport)
            for endpoint in set(others).difference(transport.shard_map.endpoints):
                _tell(endpoint, transport.call(0, GET_MAP, None).result())
            yield transport


def _first_answer(transport: GrpcTransport, call: Call[None, T], hint: str) -> T:
    until = time.monotonic() + RETRY_S
    while True:
        try:
            return transport.call(0, call, None, ready_s=FIRST_S).result()
        except RecoveringError:
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE_S)
        except TransportError as error:
            endpoint = transport.shard_map.endpoint_of(0)
            raise TransportError(f"nothing answers at {endpoint}: {hint} ({error})") from error


def _states(transport: GrpcTransport, *, limit_s: float) -> dict[int, MapState]:
    """Returns `states_of` all servers, once they answer; TransportError, after a table, if they do not."""
    until, is_told = time.monotonic() + limit_s, False
    while True:
        states, shard_map = {}, transport.shard_map
        asked = call_all(transport, GET_MAP, None, ready_s=FIRST_S)
        for server, answer in zip(shard_map.servers, asked, strict=True):
            with suppress(TransportError):
                states[server] = answer.result()
        away = [
            f"server {each} ({shard_map.endpoint_of(each)})"
            for each in shard_map.servers
            if each not in states
        ]
        if not away:
            require_same_map(shard_map, states)
            return states
        if time.monotonic() > until:
            typer.echo(_table(shard_map, shard_map, states))
            raise TransportError(
                f"no answer from {', '.join(away)}: start it again, with its update log and, if it was "
                "added, --spare"
            )
        if not is_told:
            typer.echo(f"waits for {', '.join(away)}", err=True)
        is_told = True


def _tell(endpoint: str, first: MapState) -> None:
    """Tells a server that is in the map no more, or not yet, how the move ended that it has prepared."""
    with closing(GrpcTransport([endpoint], retry_s=0.0)) as transport:
        try:
            state = transport.call(0, GET_MAP, None, ready_s=0.0).result()
            is_spare = state.server is None
            is_of_cluster = state.shard_map.endpoints[:1] == first.shard_map.endpoints[:1]
            end = end_of(state, first) if is_spare or is_of_cluster else None
            if end is None:
                typer.echo(f"{endpoint} has no move of this cluster to end", err=True)
                return
            transport.call(0, END_MOVE, end).result()
            how = "its shards have moved" if end.is_committed else "nothing has moved"
            typer.echo(f"{endpoint} was told that {how}", err=True)
        except CtrPsError as error:
            typer.echo(str(error), err=True)


_HOW_IT_ENDED = {
    False: "nothing has moved: the job goes on as before",
    True: "the shards have moved; servers that were not told yet are told by the workers",
    None: "it is not known whether the shards have moved: look at the status",
}


def _move(
    context: typer.Context,
    plan: Callable[[ShardMap, list[int]], ShardMap],
    *,
    by: By = By.ROWS,
    dry_run: bool,
    mib_per_s: float,
    added: str = "",
) -> None:
    with _connected(context) as transport:
        if added:
            require_endpoints([added], "the command")
        _wait_for_another(transport)
        before, states = transport.shard_map, _states(transport, limit_s=RETRY_S)
        weights = _weights(transport, states, by)
        after = plan(before, weights)
        _require_spare(after, before, states[0])
        typer.echo(_table(before, after, states))
        if by is not By.ROWS:
            typer.echo(f"{by}: {_shares(before, weights)}  ->  {_shares(after, weights)}")
        rows = num_moved(before, after, rows_of(states))
        typer.echo(f"{rows:,} rows move")
        if idle := {*after.servers} - {*before.servers, *after.owners}:
            raise UsageError(
                f"{after.endpoint_of(idle.pop())} would get no shards, so it is not added"
            )
        if dry_run or after.owners == before.owners:
            return
        move = Move(transport, states, after, mib_per_s=mib_per_s, tell=_Teller())
        try:
            move.run()
        except (CtrPsError, KeyboardInterrupt) as error:
            if not isinstance(error, UsageError):  # which says that it is not known
                typer.echo(_HOW_IT_ENDED[move.is_committed], err=True)
            raise
        done = move.progress
        typer.echo(
            f"done: {done.copied_rows:,} rows, {done.copied_bytes / MIB:,.1f} MiB in {done.seconds:.1f} s; "
            f"calls waited {1000 * done.pause_s:.0f} ms"
        )


def _weights(transport: GrpcTransport, states: Mapping[int, MapState], by: By) -> list[int]:
    """Returns the weights of places; raises UsageError as `accesses_between`."""
    if by is not By.LOAD:
        return weights_of(states, "rows" if by is By.ROWS else "row_bytes")
    typer.echo(f"counts pulls and pushes for {LOAD_S:g} s", err=True)
    time.sleep(LOAD_S)
    accesses, rows = accesses_between(states, states_of(transport)), weights_of(states)
    # Rows count a little: places without load have them, too.
    of_load, of_rows = LOAD_SHARE * sum(rows), sum(accesses)
    return [of_load * load + of_rows * own for load, own in zip(accesses, rows, strict=True)]


def _shares(shard_map: ShardMap, weights: Sequence[int]) -> str:
    """Returns which share of the weights each server has."""
    of = dict.fromkeys(shard_map.servers, 0)
    for owner, weight in zip(shard_map.owners, weights, strict=True):
        of[owner] += weight
    total = max(1, sum(weights))
    return ", ".join(f"server {server} {each / total:.1%}" for server, each in of.items())


def _wait_for_another(transport: GrpcTransport) -> None:
    """Waits until no other move is under way; one whose driver is gone ends by itself."""
    until, told = time.monotonic() + OTHER_S, ""
    while other := transport.call(0, GET_MAP, None).result().move:
        if time.monotonic() > until:
            raise UsageError(f"move {other} is under way: give the command again when it has ended")
        if other != told:
            typer.echo(f"waits up to {OTHER_S:.0f} s for the end of move {other}", err=True)
            told = other
        time.sleep(PAUSE_S)
    connected(transport)


def _require_spare(after: ShardMap, before: ShardMap, first: MapState) -> None:
    """Raises UsageError unless the server that is added waits for that, and for this job.

    ProtocolError, if it has another format.
    """
    for server in after.servers:
        endpoint = after.endpoint_of(server)
        if endpoint in before.endpoints:
            continue
        with closing(GrpcTransport([endpoint], retry_s=RETRY_S)) as transport:
            hint = "start a server there with ps-server --spare"
            format = _first_answer(transport, GET_STATUS, hint).format
            state = transport.call(0, GET_MAP, None).result()
        require_format(format, f"server {endpoint}")
        require_spare(endpoint, state, first)
        if _is_open(endpoint) and not _is_open(before.endpoint_of(0)):
            raise UsageError(
                f"{endpoint} answers callers without a token, which server 0 does not: give it the "
                "environment of the other servers"
            )


def _is_open(endpoint: str) -> bool:
    """Whether a server answers callers without a token."""
    nobody = dataclasses.replace(Credentials.from_environment(), token="", token_file="")
    with closing(GrpcTransport([endpoint], retry_s=0.0, credentials=nobody)) as transport:
        try:
            transport.call(0, GET_MAP, None, ready_s=FIRST_S).result()
        except AccessError:
            return False
        return True


def require_spare(endpoint: str, spare: MapState, first: MapState) -> None:
    """Raises UsageError unless a server can be added to the job of the first one."""
    if spare.server is not None:
        raise UsageError(
            f"{endpoint} is server {spare.server} of a cluster already: start one with ps-server --spare, "
            "and a list of servers without it"
        )
    if endpoint not in spare.shard_map.endpoints:
        raise UsageError(
            f"{endpoint} is {', '.join(spare.shard_map.endpoints)} in its own environment, by which workers "
            "would look for it: name it so"
        )
    if spare.members != first.members:
        raise UsageError(
            f"{endpoint} was started for {spare.members}, but the job has {first.members}: give it the "
            "environment of the other servers"
        )
    if first.has_update_log and not spare.has_update_log:
        raise UsageError(
            f"{endpoint} keeps no update log, but the servers of the job do: start it with --update-log"
        )


class _Teller:
    """Tells now and then how far a move is."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if (now := time.monotonic()) - self._told < TELL_S or not progress.copied_rows:
            return
        self._told = now
        rate = progress.copied_rows / progress.seconds
        left = progress.rows - progress.copied_rows
        print(
            f"{progress.copied_rows:,} of {progress.rows:,} rows, "
            f"{progress.copied_bytes / MIB / progress.seconds:,.1f} MiB/s, "
            + (
                f"about {left / rate:.0f} s left"
                if left > 0
                else "again those that change meanwhile"
            ),
            file=sys.stderr,
        )


def _table(before: ShardMap, after: ShardMap, states: Mapping[int, MapState]) -> str:
    """Returns a line for each server: its endpoint, places and rows, before and after a move."""
    rows = rows_of(states)

    def of(shard_map: ShardMap, server: int) -> tuple[int, int]:
        places = [place for place, owner in enumerate(shard_map.owners) if owner == server]
        return len(places), sum(rows[place] for place in places)

    lines = [f"shard map {before.epoch}, {before.num_servers} servers, {sum(rows):,} rows"]
    for server in sorted({*before.servers, *after.servers}):
        known = after if server in after.servers else before
        (places, count), (next_places, next_count) = of(before, server), of(after, server)
        is_away = server in before.servers and server not in states
        line = f"server {server}  {known.endpoint_of(server)}  {places} places  "
        line += "no answer" if is_away else f"{count:,} rows"
        if (places, count) != (next_places, next_count):
            line += f"  ->  {next_places} places  {next_count:,} rows"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Runs the command."""
    run_command(app)


if __name__ == "__main__":
    main()
