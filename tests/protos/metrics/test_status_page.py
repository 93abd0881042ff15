"""The status page: its values, and what a browser makes of it."""

import json
import math
import re
import shutil
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.protos.metrics.http_port import HttpPort
from ctr_ps.protos.metrics.metrics_port import Series, Status, Table, status_routes
from tests.support.browser import opened, screenshot

STEPS = count(1)
PICTURES = Path(__file__).parents[4] / ".cache/pictures"
"""Kept to be looked at."""


def status() -> Status:
    step = next(STEPS)
    return Status(
        title="server <0>",
        figures={"version": 12_345, "auc": 0.75123, "unknown": None, "lost": math.nan},
        series=[
            Series(name="steps a second", value=1000.0 * step, kind="rate"),
            Series(name="loss", value=1.0 / step, kind="value"),
            Series(name="nothing yet", value=math.nan, kind="value"),
        ],
        tables=[
            Table(title="Workers", columns=("", "step"), rows=[("worker 0", step), ("<b>", None)]),
            Table(title="Empty", columns=("a",), rows=[]),
        ],
        fault="worker 3 has failed" if step > 1_000_000 else "",
    )


@pytest.fixture(scope="module")
def port() -> Iterator[HttpPort]:
    with HttpPort("127.0.0.1", 0, status_routes(status)) as running:
        yield running


def test_status_is_json_with_null_for_what_is_no_number(port: HttpPort) -> None:
    with urllib.request.urlopen(f"{port.url}/status.json", timeout=10) as response:
        found = json.load(response)

    assert found["title"] == "server <0>"
    assert found["figures"] == {"version": 12345, "auc": 0.75123, "unknown": None, "lost": None}
    assert found["series"][2] == {"name": "nothing yet", "value": None, "kind": "value"}
    assert found["tables"][0]["rows"][1] == ["<b>", None]


def test_page_asks_for_nothing_but_the_process(port: HttpPort) -> None:
    with urllib.request.urlopen(f"{port.url}/", timeout=10) as response:
        page = response.read().decode()
        policy = response.headers["Content-Security-Policy"]

    assert re.findall(r"https?://[^\"]*", page) == ["http://www.w3.org/2000/svg"]  # a name
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_curves_move_while_the_page_is_open(port: HttpPort, tmp_path: Path) -> None:
    """Also where the token stands in the URL, from which a browser fetches nothing."""
    url = port.url.replace("http://", "http://any:token@")
    document, console = opened(
        f"{url}/", tmp_path / "profile", "--dump-dom", "--virtual-time-budget=15000"
    )

    assert console == ""
    assert '<h1 id="title">server &lt;0&gt;</h1>' in document
    assert "12,345" in document
    assert "0.7512" in document
    assert "<td>&lt;b&gt;</td>" in document
    rate, value, nothing = map(int, re.findall(r'data-points="(\d+)"', document))
    assert value >= 3
    assert rate == value - 1
    assert nothing == 0
    points = re.findall(r'polyline points="([^"]*)"', document)
    assert len(points[1].split()) == value
    assert len(set(points[1].split())) == value, "the loss falls"
    assert "as of" in document


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable_in_both_schemes(port: HttpPort, tmp_path: Path, scheme: str) -> None:
    pixels = screenshot(
        f"{port.url}/",
        tmp_path / "profile",
        "--virtual-time-budget=9000",
        size=(1200, 800),
        scheme=scheme,
    )

    PICTURES.mkdir(parents=True, exist_ok=True)
    shutil.copy(
        (tmp_path / "profile").with_suffix(f".{scheme}.png"), PICTURES / f"status_page.{scheme}.png"
    )
    ground = pixels[5, 5].mean()
    assert ground > 200 if scheme == "light" else ground < 60
    ink = np.abs(pixels.astype(int) - pixels[5, 5]).sum(axis=2) > 200
    assert 0.005 < ink.mean() < 0.3, "text and curves"


def test_page_says_when_the_process_is_gone(tmp_path: Path) -> None:
    """The first answer is refused, as by a process that has ended since the page was loaded."""
    routes = status_routes(status)
    del routes["/status.json"]
    with HttpPort("127.0.0.1", 0, routes) as port:
        document, _ = opened(
            f"{port.url}/", tmp_path / "profile", "--dump-dom", "--virtual-time-budget=7000"
        )

    assert ">no answer: status 404<" in document, "as well after several tries"
