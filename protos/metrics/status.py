"""What a status page shows, and the routes that answer with it.

    /               the page, which knows nothing of what it shows
    /status.json    `Status`, which the page asks for every two seconds

The page draws curves of what it has seen since it was opened: the process keeps no history for it.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from email.message import Message
from importlib.resources import files
from typing import Any, Literal

from ctr_ps.protos.metrics.http_port import Page, Route

Value = str | float | None
"""None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A number whose curve is drawn.

    Attributes:
        name: Of the curve.
        value: Now.
        kind: What is drawn: the number itself, or of one that grows, by how much a second.
    """

    name: str
    value: float
    kind: Literal["value", "rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of values under the names of columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What there is to see of a process at one moment.

    Attributes:
        title: Names the process.
        figures: Single values, by name.
        series: Those with a curve.
        tables: The rest.
        fault: Why the job has ended by an error; empty: it has not.
    """

    title: str
    figures: Mapping[str, Value]
    series: Sequence[Series]
    tables: Sequence[Table] = field(default=())
    fault: str = ""


def status_routes(status: Callable[[], Status]) -> dict[str, Route]:
    """Returns the routes of a page that shows what `status` returns."""
    page = Page("text/html; charset=utf-8", files(__package__).joinpath("page.html").read_bytes())

    def as_json(headers: Message) -> Page:
        text = json.dumps(_finite(asdict(status())), allow_nan=False)
        return Page("application/json", text.encode())

    return {"/": lambda headers: page, "/status.json": as_json}


def _finite(value: Any) -> Any:
    """Returns a value of JSON: numbers that are nan or infinite become null."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
