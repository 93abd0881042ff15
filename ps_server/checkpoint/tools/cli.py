"""Commands of `ps-ckpt` that read only checkpoints: inspect, verify, diff, compact.

ps-ckpt inspect output/demo/model
ps-ckpt verify s3://models/clicks/epoch-3
ps-ckpt diff output/demo/model/epoch-1 output/demo/model/epoch-2
ps-ckpt compact output/demo/model/step-900 compacted

`ps_worker.predict.checkpoint_cli` adds `export` and `import`, which may read data files.
A folder of checkpoints stands for its latest one. Exit codes are those of protos/errors.py.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.runtime.environment import arguments
from ctr_ps.protos.runtime.logs import errors_as_exit_codes, printable
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.tools.inspection import (
    QUANTILES,
    TableReport,
    compare,
    inspect_block,
    inspect_table,
    verify_all,
)
from ctr_ps.ps_server.checkpoint.tools.rewrite import compact as compact_checkpoint

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Inspect, verify, compare, export, import and compact checkpoints.",
)

_FILE_WIDTH = 200  # characters per line of output to a file or a pipe

Url = Annotated[
    str,
    typer.Argument(
        help="Path or URL of a checkpoint, or of a folder of checkpoints: its latest one."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def inspect(
    url: Url,
    top: Annotated[
        int, typer.Option(min=0, help="Number of keys with the most shows to list.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Show rows, bytes, norms, shows and clicks of each table."""
    checkpoint = Checkpoint.open(url)
    tables = [inspect_table(checkpoint, name, top) for name in sorted(checkpoint.tables)]
    blocks = [inspect_block(checkpoint, name) for name in sorted(checkpoint.blocks)]
    if as_json:
        reports = {
            "tables": [asdict(table) for table in tables],
            "blocks": [asdict(block) for block in blocks],
        }
        typer.echo(json.dumps({**_summary(checkpoint), **reports}))
        return
    _show_summary(checkpoint)
    _show_tables(tables, is_delta=checkpoint.base is not None)
    rows = [[each.block, each.length, each.size_bytes, f"{each.norm:.6g}"] for each in blocks]
    _print_table(("dense block", "elements", "bytes", "norm"), rows)


@app.command()
def verify(
    url: Url,
    is_all: Annotated[
        bool,
        typer.Option("--all", help="Verify every checkpoint in the folder, with one line each."),
    ] = False,
) -> None:
    """Verify all checksums of a checkpoint; exit code 5 if a file is damaged."""
    if is_all:
        _verify_all(url)
        return
    checkpoint = Checkpoint.open(url)
    checkpoint.verify()
    summary = _summary(checkpoint)
    typer.echo(
        f"whole: {checkpoint.url} files={summary['chain_files']} bytes={summary['chain_bytes']} "
        f"digest={checkpoint.digest_of_files()}"
    )


def _verify_all(url: str) -> None:
    damaged = []
    for verdict in verify_all(url):
        typer.echo(printable(f"{verdict.name} {verdict.kind or '-'} {verdict.problem or 'whole'}"))
        if verdict.problem:
            damaged.append(verdict.name)
    if damaged:
        raise CheckpointError(f"{url} has checkpoints that are not whole: {', '.join(damaged)}")


@app.command()
def diff(first: Url, second: Url, as_json: AsJson = False) -> None:
    """Show how many rows differ between two checkpoints, and by how much."""
    one, other = Checkpoint.open(first), Checkpoint.open(second)
    differences = compare(one, other)
    if as_json:
        equal = one.digest_of_files() == other.digest_of_files()
        rows = [asdict(difference) for difference in differences]
        typer.echo(json.dumps({"equal": equal, "differences": rows}))
        return
    columns = ("name", "only first", "only second", "changed", "same", "largest difference")
    _print_table(
        columns,
        [
            (
                each.name,
                each.only_first,
                each.only_second,
                each.changed,
                each.same,
                f"{each.largest:.6g}",
            )
            for each in differences
        ],
    )


@app.command()
def compact(
    url: Url,
    to: Annotated[str, typer.Argument(help="Path or URL of the new checkpoint.")],
) -> None:
    """Rewrite a delta and its chain as one full checkpoint."""
    compact_checkpoint(Checkpoint.open(url), to)
    compacted = Checkpoint.open(to)
    rows = sum(map(compacted.manifest.num_rows, compacted.tables))
    typer.echo(f"{compacted.url} rows={rows}")


def _summary(checkpoint: Checkpoint) -> dict[str, object]:
    """Returns figures of a checkpoint: `files` and `bytes` are its own, `chain_*` those of its chain."""
    manifest = checkpoint.manifest
    chain_sizes = [size for link in checkpoint.chain for size in link.manifest.sizes]
    return {
        "checkpoint": checkpoint.url,
        "kind": manifest.kind,
        "chain": [link.name for link in checkpoint.chain],
        "created": datetime.fromtimestamp(manifest.created, UTC).isoformat(timespec="seconds"),
        "version": manifest.version,
        "digest": manifest.model_digest,
        "files": len(manifest.sizes),
        "bytes": sum(manifest.sizes),
        "chain_files": len(chain_sizes),
        "chain_bytes": sum(chain_sizes),
        "attachments": list(manifest.attachments),
        "workers": {worker: progress.step for worker, progress in manifest.workers.items()},
    }


def _show_summary(checkpoint: Checkpoint) -> None:
    summary = _summary(checkpoint)
    chain_files, chain_bytes = summary.pop("chain_files"), summary.pop("chain_bytes")
    if checkpoint.base is None:
        del summary["chain"]
    else:
        del summary["digest"]  # empty; `verify` computes it
        summary["chain"] = " <- ".join(link.name for link in checkpoint.chain)
        summary["files"] = f"{summary['files']} of the delta, {chain_files} of the chain"
        summary["bytes"] = f"{summary['bytes']} of the delta, {chain_bytes} of the chain"
    for name, value in summary.items():
        typer.echo(printable(f"{name:<12} {value}"))


def _show_tables(tables: Sequence[TableReport], *, is_delta: bool) -> None:
    """Prints figures of tables; of a delta, the rows of the model and those of the delta."""
    names = [f"{quantile:.0%}" for quantile in QUANTILES]
    sizes = ("rows", "rows of delta", "bytes of delta") if is_delta else ("rows", "bytes")
    columns = ("table", "dim", *sizes, "candidates")
    quantities = [f"{what} {' '.join(names)}" for what in ("norm", "show", "click")]
    _print_table(
        [*columns, *quantities],
        [
            [each.table, each.dim, each.rows, *([each.own_rows] if is_delta else [])]
            + [each.size_bytes, each.candidates]
            + [_numbers(values) for values in (each.norms, each.show, each.click)]
            for each in tables
        ],
    )
    for each in tables:
        if each.top:
            rows = [
                [top.key, f"{top.show:g}", f"{top.click:g}", f"{top.score:g}"] for top in each.top
            ]
            _print_table((f"key of {each.table}", "show", "click", "score"), rows)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values) or "-"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        header = Text(printable(name))
        table.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(each))) for each in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print()
    console.print(table)


def main() -> None:
    """Entry point of `ps-ckpt`."""
    with errors_as_exit_codes():
        app(arguments())


if __name__ == "__main__":
    main()
