"""Models of other packages run unchanged: what docs/models_of_others.md says of each holds."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from tests.models_of_others import PAGE, Row, measure
from tests.support import models_of_others
from tests.support.needs import lacking

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of code of others
    pytest.mark.timeout(300),
]

LINES = [
    tuple(cell.strip() for cell in line.split("|")[1:-1])
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and "---" not in line
][1:]
FAST = {("torch-rechub", "YoutubeDNN"), ("deepctr-torch", "PNN")}


def cases(package: str) -> dict[str, models_of_others.Case]:
    if package in models_of_others.missing():
        lacking(f"needs {package}: pip install --no-deps as .ci/run does")
    return models_of_others.cases(package)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            line, id=".".join(line[:2]), marks=[] if line[:2] in FAST else [pytest.mark.slow]
        )
        for line in LINES
    ],
)
def test_model_is_as_the_page_says(line: tuple[str, ...], tmp_path: Path) -> None:
    package, name, _, servers, resumed, exported = line

    found = measure(cases(package)[name], tmp_path)

    assert found == Row(
        difference=pytest.approx(0.0, abs=1e-6),
        moved=pytest.approx(1.0, abs=1.0 - 1e-3),  # the embeddings are trained
        weights=pytest.approx(0.0, abs=1e-5),
        is_same_on_servers=True,
        is_resumed=True,
        exported=exported,
    )
    assert (servers, resumed) == ("yes", "yes")


@pytest.mark.slow
@pytest.mark.parametrize("package", models_of_others.PACKAGES)
def test_page_has_the_models(package: str) -> None:
    assert list(cases(package)) == [line[1] for line in LINES if line[0] == package]


def test_page_has_at_least_40_models() -> None:
    assert len(LINES) >= 40
