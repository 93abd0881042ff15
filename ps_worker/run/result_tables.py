"""The result of a command as tables for people: figures, then a table for each list of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ctr_ps.protos.runtime.logs import printable

_FILE_WIDTH = 200  # characters a line of output to a file or a pipe


def print_result(result: Mapping[str, Any]) -> None:
    """Prints a result to stdout: with colours in a terminal, as plain text elsewhere."""
    console = output_console()
    console.print(result_tables(result))
    console.file.flush()


def output_console(*, highlight: bool = False) -> Console:
    """Returns stdout, whose lines are as wide as a terminal, or as tables need in a file or a pipe."""
    console = Console(highlight=highlight)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def result_tables(result: Mapping[str, Any]) -> Group:
    """Returns a result for a terminal or a file, without what is empty or None.

    It has figures, texts, and tables of them: a mapping of mappings by the name of a row, a sequence of
    mappings, each a row, or a mapping of such sequences by the name of their rows.
    """
    given = {name: value for name, value in result.items() if not _is_empty(value)}
    tables = {name: rows for name, value in given.items() if (rows := _rows_of(value))}
    figures = Table(box=None, pad_edge=False, show_header=False)
    figures.add_column(style="bold", no_wrap=True)
    figures.add_column(overflow="fold")
    for name, value in given.items():
        if name not in tables:
            figures.add_row(_words(name), _cell(value))
    return Group(figures, *(_table(name, rows) for name, rows in tables.items()))


def _rows_of(value: object) -> list[Mapping[str, Any]]:
    if isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value):
        return list(value)
    if not isinstance(value, Mapping):
        return []
    if all(isinstance(each, Mapping) for each in value.values()):
        return [{"": name, **each} for name, each in value.items()]
    named = [
        (name, _rows_of(each)) for name, each in value.items() if isinstance(each, list | tuple)
    ]
    if len(named) < len(value) or not all(rows for _, rows in named):
        return []
    return [{"": name, **row} for name, rows in named for row in rows]


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> Group:
    columns = [
        column
        for column in dict.fromkeys(key for row in rows for key in row)
        if any(not _is_empty(row.get(column)) for row in rows)
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in rows)
        table.add_column(_words(column), justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return Group(Text(f"\n{printable(name.replace('_', ' '))}", "bold"), table)


def _cell(value: object) -> Text:
    return Text(printable(_shown(value)))  # values of data, too


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        given = {name: each for name, each in value.items() if not _is_empty(each)}
        return ", ".join(f"{name} {_shown(each)}" for name, each in given.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _words(name: str) -> Text:
    return Text(printable(name.replace("_per_s", "/s").replace("_", " ")))


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Sequence | Mapping) and not value)
