"""`ps-top`: shows the status of a cluster in a terminal, refreshed every few seconds.

    ps-top 10.0.0.1:7164,10.0.0.2:7164
    ps-top --once                      # servers of PADDLE_PSERVERS_IP_PORT_LIST, once

Shows the reason for a server that does not answer. Exit codes: 0 after Ctrl-C; with --once 4 if no server
answers, 15 if all refuse the caller.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import grpc
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ctr_ps.protos.errors import AccessError, CtrPsError, TransportError, UsageError
from ctr_ps.protos.placement import NO_SERVER
from ctr_ps.protos.role import require_endpoints, split_endpoints
from ctr_ps.protos.runtime.environment import arguments
from ctr_ps.protos.runtime.logs import errors_as_exit_codes, printable
from ctr_ps.protos.runtime.options import command_app
from ctr_ps.protos.store import ServerStatus, StoreStatus, WorkerState, merge_status
from ctr_ps.protos.wire.calls import GET_STATUS, SERVICE
from ctr_ps.protos.wire.grpc_status import error_of
from ctr_ps.protos.wire.security.credentials import Credentials, open_channel
from ctr_ps.ps_worker.data.streams.stream_data import newest_ms

ANSWER_S = 1.0
MIB = 2**20
BARS = "▁▂▃▄▅▆▇█"
MOST_LOOKS = 61
WIDE = 1000
"""Columns where no terminal bounds them: a line of a file is not wrapped."""

SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"

app = command_app()


class Servers(AbstractContextManager["Servers"]):
    """Servers to look at, until the end of a `with`; it joins no job. For one thread."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        """Opens a channel to each server, whether it answers or not; raises UsageError for credentials."""
        self.endpoints = tuple(endpoints)
        credentials = Credentials.from_environment()
        credentials.metadata()  # raises where there is no token
        self._credentials = credentials
        self._channels = [open_channel(endpoint, credentials) for endpoint in endpoints]
        self._methods = [
            channel.unary_unary(f"/{SERVICE}/{GET_STATUS.name}") for channel in self._channels
        ]

    def look(self, answer_s: float = ANSWER_S) -> list[ServerStatus | CtrPsError]:
        """Returns the status of each server, or why it has none to show within `answer_s` seconds."""
        request = GET_STATUS.request.encode(None)
        metadata = self._credentials.metadata()  # its file may have another token by now
        calls = [
            method.future(request, timeout=answer_s, metadata=metadata) for method in self._methods
        ]
        found: list[ServerStatus | CtrPsError] = []
        for endpoint, call in zip(self.endpoints, calls, strict=True):
            try:
                found.append(GET_STATUS.answer.decode(call.result()))
            except grpc.RpcError as failure:
                found.append(error_of(failure, endpoint, GET_STATUS.name))
            except CtrPsError as error:  # of decoding
                found.append(error)
        return found

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one moment, in seconds: of each server its status, or why there is none."""

    at_s: float
    servers: Sequence[ServerStatus | CtrPsError]

    @property
    def statuses(self) -> list[StoreStatus]:
        """Those of the servers that answer."""
        return [each.store for each in self.servers if isinstance(each, ServerStatus)]

    def examples(self) -> int:
        """Returns the examples that were pushed, of all workers; 0 if no server answers."""
        return merge_status(self.statuses).num_examples if self.statuses else 0


def drawn(endpoints: Sequence[str], looks: Sequence[Look]) -> Group:
    """Returns the screen: what the last look saw of the endpoints, and rates between all looks."""
    statuses = looks[-1].statuses
    parts: list[Text | Table] = [_headline(looks[-1])]
    if rates := _rates(looks):
        parts.append(Text(f"examples/s {_curve(rates)} {rates[-1]:,.0f}"))
    parts += [
        Text(printable(f"{endpoint}  {server}"), style="red")
        for endpoint, server in zip(endpoints, looks[-1].servers, strict=True)
        if isinstance(server, CtrPsError)
    ]
    parts.append(_servers(endpoints, looks[-1]))
    if statuses:
        merged = merge_status(statuses)
        parts += [_workers(merged), _tables(merged)]
    return Group(*parts)


def _headline(look: Look) -> Text:
    statuses = look.statuses
    line = Text(f"{len(statuses)} of {len(look.servers)} servers answer", style="bold")
    if not statuses:
        return line
    in_job = max(each.num_servers for each in look.servers if isinstance(each, ServerStatus))
    if in_job > len(look.servers):
        line.append(f" (the job has {in_job} servers, {len(look.servers)} are named)", style="red")
    now = merge_status(statuses)
    return line.append(
        f"  version {now.version:,}  batches {now.batches:,}  examples {look.examples():,}  staleness mean "
        f"{now.staleness.mean:.1f}, p99 {now.staleness.quantile(0.99)}, largest {now.staleness.largest}"
    )


def _rates(looks: Sequence[Look]) -> list[float]:
    """Returns the examples a second between looks; those in which a server was away do not count."""
    whole = [look for look in looks if len(look.statuses) == len(look.servers)]
    return [
        max(0, now.examples() - then.examples()) / (now.at_s - then.at_s)
        for then, now in pairwise(whole)
    ]


def _curve(values: Sequence[float]) -> str:
    """Returns a bar for each value, from 0 to the largest."""
    most = max(values) or 1.0
    return "".join(BARS[round(value / most * (len(BARS) - 1))] for value in values)


def _servers(endpoints: Sequence[str], look: Look) -> Table:
    table = _table("server", "version", "rows", "MiB", "imbalance", "duplicates", "last save")
    for endpoint, server in zip(endpoints, look.servers, strict=True):
        if isinstance(server, CtrPsError):
            continue  # its fault has a line of its own
        store = server.store
        table.add_row(
            endpoint if server.server_index != NO_SERVER else f"{endpoint} (spare)",
            f"{store.version:,}",
            f"{store.num_rows:,}",
            f"{store.size_bytes / MIB:,.1f}",
            f"{max((each.imbalance for each in store.tables.values()), default=0.0):.2f}",
            f"{store.duplicates:,}",
            _save(store),
        )
    return table


def _save(store: StoreStatus) -> str:
    save = store.last_save
    if save is None:
        return "none"
    if not save.is_over:
        return f"{save.number} is being written"
    return f"{save.number}: {save.duration_s:.1f} s, pause {1e3 * save.pause_s:.0f} ms"


def _workers(status: StoreStatus) -> Table:
    newest = {worker: newest_ms({worker: each}) for worker, each in status.progress.items()}
    of_stream = ["newest row, s ago"] if any(newest.values()) else []
    table = _table("worker", "state", "step", "behind", "examples", "silent, s", *of_stream)
    behind = status.steps_behind()
    for worker in sorted({*status.silent_s, *status.left, *status.progress}):
        progress, silent_s = status.progress.get(worker), status.silent_s.get(worker)
        state = status.state_of(worker)
        table.add_row(
            str(worker),
            Text(str(state), style="red" if state is WorkerState.LOST else ""),
            "" if progress is None else f"{progress.step:,}",
            "" if progress is None else f"{behind[worker]:,}",
            f"{status.examples.get(worker, 0):,}",
            "" if silent_s is None else f"{silent_s:.1f}",
            *(_ago(newest.get(worker, 0)) for _ in of_stream),
        )
    return table


def _ago(time_ms: int) -> str:
    """Returns how long ago the newest row of a stream was written that a worker trained on."""
    return f"{time.time() - time_ms / 1000:,.0f}" if time_ms else ""


def _tables(status: StoreStatus) -> Table:
    table = _table(
        "table", "rows", "MiB", "shards", "load", "imbalance", "candidates", "evicted", "expired"
    )
    for name, each in status.tables.items():
        table.add_row(
            Text(printable(name)),
            f"{each.rows:,}",
            f"{each.size_bytes / MIB:,.1f}",
            str(each.shards),
            f"{each.load_factor:.2f}",
            f"{each.imbalance:.2f}",
            f"{each.candidates:,}",
            f"{each.evicted:,}",
            f"{each.expired:,}",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    return table


@app.command()
def top(
    endpoints: Annotated[
        str,
        typer.Argument(help=f"host:port of all servers, separated by commas; default: {SERVERS}."),
    ] = "",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print the status once and exit.")] = False,
) -> None:
    """Show the status of servers, workers and tables of a cluster."""
    with errors_as_exit_codes():
        try:
            _top(endpoints or os.environ.get(SERVERS, ""), every, once=once)
        except KeyboardInterrupt:
            raise typer.Exit from None


def _top(listed: str, every_s: float, *, once: bool) -> None:
    endpoints = [each for each in split_endpoints(listed) if each]
    if not endpoints:
        raise UsageError(f"no servers: name them, such as ps-top 127.0.0.1:7164, or set {SERVERS}")
    require_endpoints(endpoints, "the list of servers")
    is_terminal = sys.stdout.isatty()
    if not (once or is_terminal):
        raise UsageError("the output is not a terminal: use --once")
    with Servers(endpoints) as servers:
        looks = deque([Look(time.monotonic(), servers.look())], maxlen=MOST_LOOKS)
        _require_different(endpoints, looks[-1])
        if once:
            console = Console() if is_terminal else Console(width=WIDE)
            console.print(drawn(endpoints, looks))
            _require_answer(endpoints, looks[-1])
            return
        with Live(drawn(endpoints, looks), auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every_s)
                looks.append(Look(time.monotonic(), servers.look()))
                live.update(drawn(endpoints, looks), refresh=True)


def _require_different(endpoints: Sequence[str], look: Look) -> None:
    """Refuses a server that has two names: it would count twice."""
    names: dict[int, str] = {}
    for endpoint, server in zip(endpoints, look.servers, strict=True):
        if not isinstance(server, ServerStatus):
            continue
        if server.server_index == NO_SERVER:
            continue
        if other := names.get(server.server_index):
            raise UsageError(
                f"{other} and {endpoint} are both server {server.server_index}: name the servers of one "
                "job, each once"
            )
        names[server.server_index] = endpoint


def _require_answer(endpoints: Sequence[str], look: Look) -> None:
    if look.statuses:
        return
    if all(isinstance(each, AccessError) for each in look.servers):
        raise AccessError(
            f"all of {', '.join(endpoints)} refuse this caller: compare its token or certificate with theirs"
        )
    raise TransportError(f"none of {', '.join(endpoints)} answers")


def main() -> None:
    """Runs the command."""
    app(arguments())


if __name__ == "__main__":
    main()
