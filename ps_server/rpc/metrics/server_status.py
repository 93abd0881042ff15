"""What a server's status page shows."""

from collections.abc import Mapping

from ctr_ps.protos.metrics.metrics_port import Series, Status, Table, Value
from ctr_ps.protos.placement import server_name
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import StoreStatus
from ctr_ps.ps_server.engine.engine import Engine
from ctr_ps.ps_server.rpc.metrics.call_metrics import CallCounts

MIB = 2**20

_TABLE_COLUMNS = (
    "table", "rows", "MiB", "shards", "rows of a shard", "imbalance", "load", "candidates", "evicted",
    "expired",
)  # fmt: skip


def server_status(engine: Engine, calls: Mapping[str, CallCounts]) -> Status:
    """Returns the status of a server as of now; `calls` are by name of the RPC."""
    status, owner = engine.status(), engine.owner
    num_calls = {
        name: sum(sum(each.counts) for each in list(counts.durations.values()))
        for name, counts in calls.items()
    }
    return Status(
        title=f"ctr-ps {server_name(owner.server_index, owner.num_servers)}",
        figures={
            "version": status.version,
            "batches": status.batches,
            "examples": status.num_examples,
            "rows": status.num_rows,
            "tables, MiB": status.size_bytes / MIB,
            "staleness, mean": status.staleness.mean,
            "pushes received twice": status.duplicates,
            **_save_figures(status),
        },
        series=[
            Series(name="batches a second", value=status.batches, kind="rate"),
            Series(name="examples a second", value=status.num_examples, kind="rate"),
            Series(name="calls a second", value=sum(num_calls.values()), kind="rate"),
            Series(
                name="MiB a second, in and out",
                value=sum(each.received_bytes + each.sent_bytes for each in calls.values()) / MIB,
                kind="rate",
            ),
            Series(name="rows", value=status.num_rows, kind="value"),
            Series(name="staleness, total a second", value=status.staleness.total, kind="rate"),
        ],
        tables=[
            _workers(engine.members, status),
            _tables(status),
            Table(
                title="Calls",
                columns=("call", "number", "ms, mean", "of it waiting", "MiB in", "MiB out"),
                rows=[
                    _call_row(name, calls[name], num_calls[name])
                    for name in sorted(calls, key=num_calls.__getitem__, reverse=True)
                    if num_calls[name]
                ],
            ),
        ],
        fault=engine.job.failure,
    )


def _save_figures(status: StoreStatus) -> dict[str, Value]:
    save = status.last_save
    if save is None:
        return {"saves": 0}
    return {
        "saves": save.number,
        "last save": f"{save.duration_s:.1f} s" if save.is_over else "being written",
        "pause of the last save, ms": 1e3 * save.pause_s,
    }


def _workers(members: Members, status: StoreStatus) -> Table:
    rows: list[list[Value]] = []
    behind = status.steps_behind()
    for worker in range(members.total):
        progress = status.progress.get(worker)
        rows.append(
            [
                members.name(worker),
                str(status.state_of(worker)),
                None if progress is None else progress.step,
                behind.get(worker),
                status.examples.get(worker, 0),
                status.silent_s.get(worker),
                status.lease_s,
            ]
        )
    return Table(
        title="Workers",
        columns=("", "state", "step", "behind", "examples", "silent, s", "lease, s"),
        rows=rows,
    )


def _tables(status: StoreStatus) -> Table:
    return Table(
        title="Tables: the shards of this server",
        columns=_TABLE_COLUMNS,
        rows=[
            [
                name,
                table.rows,
                table.size_bytes / MIB,
                table.shards,
                f"{table.smallest_shard:,} to {table.largest_shard:,}",
                table.imbalance,
                table.load_factor,
                table.candidates,
                table.evicted,
                table.expired,
            ]
            for name, table in status.tables.items()
        ],
    )


def _call_row(name: str, counts: CallCounts, number: int) -> list[Value]:
    total_s = sum(each.total_s for each in list(counts.durations.values()))
    return [
        name,
        number,
        1e3 * total_s / number,
        counts.waits.total_s / total_s if total_s else 0.0,
        counts.received_bytes / MIB,
        counts.sent_bytes / MIB,
    ]
