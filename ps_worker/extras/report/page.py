"""The HTML around the charts: cards in sections, tables of figures, and the style for light and dark screens.

A page is one file: no script, no link to anything, so it opens offline and can be sent by mail.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

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
    links = "".join(f'<a href="#{_anchor(each)}">{escape(each)}</a>' for each in sections)
    return printable_lines(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
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


_STYLE = """
:root {
  --page: #f6f7f9; --card: #ffffff; --text: #1c2430; --muted: #5a6675; --grid: #e3e7ec;
  --border: #dfe3e8; --level: #7a8594;
  --c0: #2469b3; --c1: #c2570c; --c2: #17803d; --c3: #8a3fc0; --c4: #b8246b; --c5: #7a6a10;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1b2129; --text: #e6eaf0; --muted: #9aa7b6; --grid: #2c3540;
    --border: #2c3540; --level: #8a97a6;
    --c0: #6db3f2; --c1: #f2994a; --c2: #5fd08a; --c3: #c79bf2; --c4: #f285b5; --c5: #d8c65a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
header, main { max-width: 1280px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 19px; margin: 36px 0 0; }
h3 { font-size: 15px; margin: 0 0 8px; }
header p, .lead, .note { color: var(--muted); margin: 2px 0 12px; max-width: 90ch; }
.note { font-size: 13px; margin: 6px 0 0; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 14px; }
nav a { color: var(--c0); text-decoration: none; }
nav a:hover { text-decoration: underline; }
.key { display: inline-flex; align-items: center; margin: 0 18px 4px 0; font-size: 14px; }
.swatch {
  display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  background: var(--c);
}
.striped { background: repeating-linear-gradient(90deg, var(--c) 0 4px, transparent 4px 6px); }
.cards {
  display: grid; gap: 16px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr));
}
article:only-child { grid-column: 1 / -1; }
article {
  background: var(--card); border: 1px solid var(--border); border-radius: 10px; padding: 16px;
  min-width: 0;
}
.missing {
  border-left: 3px solid var(--level); color: var(--muted); margin: 8px 0; padding: 2px 12px;
  max-width: 100ch;
}
svg { display: block; width: 100%; max-width: 760px; height: auto; }
svg text { font-family: inherit !important; }
.level { --c: var(--level); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
details { margin-top: 10px; font-size: 13px; }
summary { color: var(--muted); cursor: pointer; }
.scroll { overflow: auto; max-height: 420px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px 3px 0; text-align: left; white-space: nowrap; }
th { color: var(--muted); font-weight: 600; border-bottom: 1px solid var(--border); }
td { border-bottom: 1px solid var(--grid); }
td.number { text-align: right; }
@media print { article { break-inside: avoid; } }
"""
