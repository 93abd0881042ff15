"""Formatting of a profile as tables for a terminal or a file."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ctr_ps.protos.errors import counted
from ctr_ps.protos.runtime.logs import printable
from ctr_ps.ps_worker.extras.data_tools.profiling.profile import NumberProfile, Profile, SlotProfile


def profile_table(profile: Profile) -> Group:
    """Returns the output of `ps-data profile`."""
    slots = _table("slot", ("missing", "distinct"), "most frequent values")
    for slot in profile.slots:
        slots.add_row(*map(_cell, _slot_cells(slot, profile.rows)))
    clicks = "no labels" if profile.click_rate is None else f"click rate {profile.click_rate:.4f}"
    head = f"{counted(profile.rows, 'row', ',')}, {clicks}, {counted(profile.bad_rows, 'malformed row', ',')}"
    return Group(head, number_table(profile.numbers), slots, *_notes(profile))


def number_table(numbers: Sequence[NumberProfile]) -> Table:
    """Returns the statistics of dense columns, a line each."""
    table = _table("column", ("missing", "min", "max", "mean", "deviation", "95th"))
    for number in numbers:
        table.add_row(*map(_cell, _number_cells(number)))
    return table


def _cell(text: str) -> Text:
    return Text(printable(text))  # no markup: a name may contain brackets


def _table(name: str, figures: tuple[str, ...], *texts: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    for text in texts:
        table.add_column(text, overflow="fold")
    return table


def _number_cells(number: NumberProfile) -> tuple[str, ...]:
    missing = f"{number.missing_rate:.2%}"
    if number.missing_rate == 1:
        return (number.name, missing, *["-"] * 5)
    figures = (number.min, number.max, number.mean, number.deviation, number.percentile_95)
    return (number.name, missing, *(f"{figure:,.6g}" for figure in figures))


def _slot_cells(slot: SlotProfile, rows: int) -> tuple[str, ...]:
    distinct = f"{'' if slot.is_exact else '~'}{slot.num_distinct:,}"
    top = "  ".join(f"{text} {count / rows:.2%}" for text, count in slot.top)
    return slot.name, f"{slot.missing_rate:.2%}", distinct, top


def _notes(profile: Profile) -> list[str]:
    """Returns the errors of figures that are not exact."""
    notes = []
    if not profile.has_exact_percentiles:
        notes.append(
            "95th: of a sample of 131,072 rows; the share below it is 95 % with a standard error of 0.06 % "
            "(0.06 % / sqrt(1 - missing) where numbers are missing)"
        )
    if not all(slot.is_exact for slot in profile.slots):
        worst = max(slot.undercount for slot in profile.slots) / profile.rows
        notes.append(
            f"~: estimated, standard error 0.81 %; in such slots a share may be up to {worst:.2%} too small"
        )
    return notes
