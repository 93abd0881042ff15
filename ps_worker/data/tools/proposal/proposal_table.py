"""Formatting of a proposal as a table for a terminal or a file."""

from rich.table import Table
from rich.text import Text

from protos.runtime.logs import printable
from ps_worker.data.tools.proposal.roles import Proposal


def proposal_table(proposal: Proposal) -> Table:
    """Returns the column, its role, and the reason for it, a line each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("column", no_wrap=True)
    table.add_column("taken as", no_wrap=True)
    table.add_column("because", overflow="fold")
    lines: list[tuple[str, str, str]] = []
    if proposal.label is not None:
        lines.append(
            (proposal.label.name, "label", f"0 and 1, {proposal.label.click_rate:.2%} are 1")
        )
    lines += [(each.name, "number", each.why) for each in proposal.numbers]
    lines += [(each.name, "slot", each.why) for each in proposal.slots]
    lines += [(each.name, "ignored", each.why) for each in proposal.ignored]
    for line in lines:
        table.add_row(
            *(Text(printable(each)) for each in line)
        )  # no markup: a name may contain brackets
    return table
