"""The HTML around the charts: cards in sections, tables of figures, with the style of page.css.

A page is one file: no script, no link to anything, so it opens offline and can be sent by mail.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from ctr_ps.protos.runtime.logs import printable_lines

Cell = object


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One chart with its words: its body is HTML, all others are texts and numbers.

    Headers and cells are the table of its figures; without headers there is none.
    """

    title: str
    body: str
    note: str = ""
    headers: Sequence[str] = ()
    cells: Sequence[Sequence[Cell]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page."""

    lead: str  # text below its title: what it shows
    cards: Sequence[Card] = ()
    missing: Sequence[str] = ()  # texts on what runs have not measured, and how they would


def page(title: str, sections: Mapping[str, Section]) -> str:
    """Returns the page of sections with titles."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{_anchor(each)}">{escape(each)}</a>' for each in sections)
    return printable_lines(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1><p>Training report</p>"
        f"<nav>{links}</nav></header>\n<main>\n"
        + "\n".join(_section(*each) for each in sections.items())
        + "\n</main>\n</body>\n</html>\n"
    )


def table(headers: Sequence[str], cells: Sequence[Sequence[Cell]]) -> str:
    """Returns a table as HTML; numbers stand in `data` elements, whose values have all digits."""
    head = "".join(f"<th>{escape(each)}</th>" for each in headers)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in cells)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def shown(value: object) -> str:
    """Returns a figure for people: five significant digits, thousands apart; a dash for a missing one."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "\N{EN DASH}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.5g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def _cell(value: Cell) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        exact = json.dumps(value)
        return f'<td class="number"><data value="{exact}">{shown(value)}</data></td>'
    return f"<td>{escape(shown(value))}</td>"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(title: str, section: Section) -> str:
    missing = "".join(f'<p class="missing">{escape(each)}</p>' for each in section.missing)
    return (
        f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>'
        f'<p class="lead">{escape(section.lead)}</p>{missing}'
        f'<div class="cards">{"".join(map(_card, section.cards))}</div></section>'
    )


def _card(card: Card) -> str:
    note = f'<p class="note">{escape(card.note)}</p>' if card.note else ""
    figures = ""
    if card.headers:
        figures = f"<details><summary>Figures</summary>{table(card.headers, card.cells)}</details>"
    return f"<article><h3>{escape(card.title)}</h3>{card.body}{note}{figures}</article>"
