"""The page in headless Chromium: it shows charts in light and dark, and logs no error."""

from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ps_worker.extras.report.report import report
from tests.support.browser import opened, screenshot

WIDTH, HEIGHT = 1200, 2400
COLOURS = {"light": (0x24, 0x69, 0xB3), "dark": (0x6D, 0xB3, 0xF2)}
"""Of the first run."""


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("page") / "report.html"
    report(runs, output, importance_rows=200)
    return output


@pytest.mark.parametrize(("scheme", "brightness"), [("light", (200, 255)), ("dark", (0, 60))])
def test_charts_are_drawn_in_both_colour_schemes(
    page: Path, tmp_path: Path, scheme: str, brightness: tuple[int, int]
) -> None:
    pixels = screenshot(page, tmp_path / "profile", size=(WIDTH, HEIGHT), scheme=scheme)

    assert pixels.shape == (HEIGHT, WIDTH, 3)
    assert len(np.unique(pixels.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32))) > 50
    assert brightness[0] <= np.median(pixels) <= brightness[1]
    of_run = (pixels == np.array(COLOURS[scheme], np.uint8)).all(axis=2)
    assert of_run.sum() > 500
    # In charts all over the page, left and right.
    rows, columns = np.nonzero(of_run)
    assert np.ptp(rows) > HEIGHT / 2
    assert np.ptp(columns) > WIDTH / 2


def test_document_has_its_sections_and_logs_nothing(page: Path, tmp_path: Path) -> None:
    document, console = opened(page, tmp_path / "profile", "--dump-dom")

    assert console == ""
    assert document.count("<section id=") == 10
    assert document.count("<svg ") >= 15
    assert "<i>noise</i>" not in document
    assert "&lt;i&gt;noise&lt;/i&gt;" in document
