"""The page of a report: it says what the runs have measured, and it is whole, alone and safe to open."""

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.extras.report.page import page as whole_page
from ctr_ps.ps_worker.extras.report.report import report
from ctr_ps.ps_worker.extras.report.runs import read_runs

SECTIONS = [
    "runs",
    "training",
    "validation",
    "progressive-validation",
    "calibration",
    "auc-by-slot-value",
    "feature-importance",
    "table-growth",
    "staleness",
    "time-by-part-of-a-step",
]
SERVED = ("auc", "log_loss", "normalized_entropy", "calibration")
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page that was read: its tags are balanced, or reading fails.

    Attributes:
        sections: Ids, in their order.
        tags: All that there are.
        attributes: (name, value) of all tags.
        values: Numbers of `data` elements, by section.
        texts: Of each section, and of "" before the first.
    """

    def __init__(self, content: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.values: dict[str, list[float]] = {}
        self.texts: dict[str, str] = {"": ""}
        self._open: list[str] = []
        self.feed(content)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "section":
            self.sections.append(str(own["id"]))
            self.values[self.sections[-1]] = []
            self.texts[self.sections[-1]] = ""
        if tag == "data":
            self.values[self.sections[-1]].append(json.loads(str(own["value"])))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[self.sections[-1] if self.sections else ""] += data


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == kind]


def write_metrics(folder: Path, *records: dict[str, Any]) -> None:
    lines = [f"{json.dumps(record)}\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))


def write_lines(folder: Path, *lines: tuple[str, int, int, float]) -> None:
    """Writes metrics: of each line kind, epoch, step and log loss."""
    names = ("kind", "epoch", "step", "log_loss")
    write_metrics(folder, *(dict(zip(names, each, strict=True)) for each in lines))


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    output = tmp_path_factory.mktemp("page") / "report.html"
    result = report(runs, output, importance_rows=400)
    assert result == {"report": str(output), "runs": 2, "runs_with_importance": 1}
    return Page(output.read_text())


@pytest.fixture(scope="module")
def page_of_one(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    output = tmp_path_factory.mktemp("page") / "report.html"
    report(runs[:1], output, importance_rows=0)
    return Page(output.read_text())


def test_every_section_is_there_with_a_chart(page: Page) -> None:
    assert page.sections == SECTIONS
    assert all(page.values[section] for section in SECTIONS)


def test_page_refers_to_nothing_outside(page: Page) -> None:
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "base"})
    links = [value for name, value in page.attributes if name in {"href", "src", "xlink:href"}]
    assert {f"#{section}" for section in SECTIONS} <= set(links)
    assert all(link and link.startswith("#") for link in links)
    addresses = [name for name, value in page.attributes if value and "://" in value]
    assert set(addresses) <= {"xmlns", "xmlns:xlink"}
    assert "url(" not in page.texts[""]
    assert "@import" not in page.texts[""]


def test_settings_of_runs_are_shown_where_they_differ(page: Page, page_of_one: Page) -> None:
    text = page.texts["runs"]

    shown = text.split("Settings that differ")[1]
    assert shown.startswith("settingwhole <b>bare")
    assert 'valid.group_by"site"""' in shown
    assert "optimizer.sparse.learning_rate" in shown
    assert "0.02" in shown
    for same in ("train.epochs", "model.name", "checkpoint.dir", "run.dir", "data.train"):
        assert same not in shown
    assert "Settings that differ" not in page_of_one.texts["runs"]


def test_text_of_users_is_no_markup(page: Page) -> None:
    assert page.tags.isdisjoint({"b", "i"})
    assert "<i>noise</i>" in page.texts["auc-by-slot-value"]
    assert "<i>noise</i>" in page.texts["feature-importance"]
    assert "whole <b>" in page.texts["runs"]


def test_text_of_users_has_no_control_characters() -> None:
    assert r"<h1>a\x1b[2J\u202e</h1>" in whole_page("a\x1b[2J\u202e", {})


@pytest.mark.parametrize(
    ("section", "kind", "names"),
    [
        ("training", "train", ["step", "loss", "auc", "examples_per_s"]),
        ("validation", "valid", ["step", "log_loss", "auc", "gauc", "calibration"]),
        ("progressive-validation", "pass", ["epoch", "log_loss", "auc", "calibration"]),
        ("runs", "test", ["auc", "log_loss", "base_log_loss", "calibration"]),
    ],
)
def test_curves_are_the_figures_of_the_run(
    runs: tuple[Path, Path], page: Page, section: str, kind: str, names: list[str]
) -> None:
    lines = records(runs[0], kind)
    expected = {line[name] for line in lines for name in names if line[name] is not None}

    assert lines
    assert expected <= set(page.values[section])


def test_breakdowns_are_those_of_the_test_data(runs: tuple[Path, Path], page: Page) -> None:
    (test,) = records(runs[0], "test")
    buckets, slices = test["calibration_buckets"], test["slices"]

    assert len(buckets) == 5
    assert {each["value"] for each in slices["site"]} == {f"site{site}" for site in range(4)}
    assert {each["predicted"] for each in buckets} <= set(page.values["calibration"])
    assert {each["click_rate"] for each in buckets} <= set(page.values["calibration"])
    for each in [*slices["site"], *slices["<i>noise</i>"]]:
        assert each["value"] in page.texts["auc-by-slot-value"]
        assert {each["auc"], each["examples"]} - {None} <= set(page.values["auc-by-slot-value"])


def test_tables_staleness_and_time_are_those_of_the_passes(
    runs: tuple[Path, Path], page: Page, page_of_one: Page
) -> None:
    passes = records(runs[0], "pass")
    for each in passes:
        rows = {table["rows"] for table in each["tables"].values()}
        assert rows <= set(page.values["table-growth"])
        assert rows <= set(page_of_one.values["table-growth"])
    (name,) = passes[0]["tables"]
    assert f"whole <b>: {name}" in page.texts["table-growth"]
    assert set(passes[-1]["staleness"]["counts"].values()) <= set(page.values["staleness"])
    for part in ("read", "pull", "compute", "push", "wait"):
        seconds = sum(each["seconds"][part] for each in passes)
        expected = 1000 * seconds / passes[-1]["step"]
        assert any(
            value == pytest.approx(expected) for value in page.values["time-by-part-of-a-step"]
        )


def test_runs_are_overlaid_and_named(page: Page) -> None:
    for section in SECTIONS:
        assert "whole <b>" in page.texts[section]
        assert "bare" in page.texts[section]
    assert [value for _, value in page.attributes if value and "stroke: var(--c0)" in value]
    assert [value for _, value in page.attributes if value and "stroke: var(--c1)" in value]


def test_what_is_missing_is_said_with_what_to_do(page: Page, page_of_one: Page) -> None:
    assert "bare: no validation: set data.valid" in page.texts["validation"]
    assert "bare: no calibration: set data.test or data.valid" in page.texts["calibration"]
    assert "bare: no figures by slot value: name slots" in page.texts["auc-by-slot-value"]
    assert "bare: no saved model: train with checkpoint.dir" in page.texts["feature-importance"]
    assert "not measured: give --importance-rows" in page_of_one.texts["feature-importance"]


def test_model_that_is_gone_leaves_the_rest_of_the_page(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(runs[0], moved)
    job = json.loads((moved / "job.json").read_text())
    job["checkpoint"]["dir"] = f"{tmp_path}/gone"
    (moved / "job.json").write_text(json.dumps(job))

    result = report([moved], tmp_path / "page.html", importance_rows=100)

    assert result["runs_with_importance"] == 0
    page = Page((tmp_path / "page.html").read_text())
    assert "moved: not measured: " in page.texts["feature-importance"]
    assert page.values["training"]


def test_model_of_another_run_has_no_importance_here(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of one that has replaced this run's checkpoints, or whose checkpoints this run is to replace."""
    other, later = tmp_path / "other", tmp_path / "later"
    for folder in (other, later):
        shutil.copytree(runs[0], folder)
    job = json.loads((other / "job.json").read_text())
    job["run"]["dir"] = str(other)
    (other / "job.json").write_text(json.dumps(job))
    start = {"kind": "start", "time": time.time(), "epoch": 0, "step": 0}
    write_metrics(later, start)

    result = report([runs[0], other, later], tmp_path / "page.html", importance_rows=100)

    assert result["runs_with_importance"] == 1
    said = Page((tmp_path / "page.html").read_text()).texts["feature-importance"]
    model = job["checkpoint"]["dir"]
    assert f"other: not measured: the model in {model} belongs to another run, with run.dir" in said
    assert f"later: not measured: the model in {model} belongs to another run: it is older" in said


def test_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    """Without any figures, without a job, and in the middle of writing its first line."""
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start", "step": 0}\n{"kind": "tr')

    report([tmp_path], tmp_path / "page.html", importance_rows=100)

    page = Page((tmp_path / "page.html").read_text())
    assert page.sections == SECTIONS
    assert "No lines of training" in page.texts["training"]


def test_passes_of_a_stream_stand_beside_the_served_model(tmp_path: Path) -> None:
    figures = {"auc": 0.71, "log_loss": 0.41, "normalized_entropy": 0.81, "calibration": 1.01}
    gate = {
        f"served_{key}": each for key, each in zip(SERVED, (0.72, 0.42, 0.82, 1.02), strict=True)
    }
    passes = [
        {
            "kind": "pass",
            "epoch": epoch,
            "step": epoch,
            "until": f"2026-11-08T10:{epoch}0:00",
            **figures,
        }
        for epoch in (1, 2, 3)
    ]
    held = {
        "kind": "publish",
        "epoch": 2,
        "step": 2,
        "is_published": False,
        "reason": "it is <bad>",
    }
    taken = {"kind": "publish", "epoch": 3, "step": 3, "is_published": True, "served": "epoch-1"}
    write_metrics(tmp_path, *passes, held, {**taken, **gate, "sample_normalized_entropy": 0.83})
    output = tmp_path / "report.html"

    report([tmp_path], output, importance_rows=0)

    section = Page(output.read_text()).texts["progressive-validation"].split("Stream")[1]
    assert "2026-11-08T10:10:00" in section
    assert re.search(
        r"10:20:00.*it is <bad>.*10:30:00.*yesepoch-10\.720\.420\.821\.020\.83", section
    )
    assert section.count("0.71") == 3


def test_stream_has_no_place_in_the_report_of_files(page: Page) -> None:
    assert "NE of sample" not in page.texts["progressive-validation"]


def test_figures_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        {"kind": "train", "step": 1, "loss": None, "auc": None},
        {"kind": "train", "step": 2, "loss": 0.5, "auc": None},
        {"kind": "pass", "step": 2, "epoch": 1, "log_loss": 0.5, "tables": None, "seconds": {}},
        {"kind": "test", "step": 2, "calibration_buckets": [{"predicted": None}], "slices": {}},
    )

    report([tmp_path], tmp_path / "page.html", importance_rows=0)

    assert Page((tmp_path / "page.html").read_text()).values["training"] == [2, 0.5]


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    write_metrics(
        tmp_path,
        {"kind": "start", "step": 0},
        *({"kind": "train", "step": step, "loss": 0.1 * step} for step in (10, 20, 30)),
        {"kind": "start", "step": 20},
        *({"kind": "train", "step": step, "loss": 0.2 * step} for step in (30, 40)),
    )

    (run,) = read_runs([tmp_path / "metrics.jsonl"])

    assert run.points("train", "step", "loss") == [(10, 1.0), (20, 2.0), (30, 6.0), (40, 8.0)]


def test_lines_that_a_resumed_run_writes_again_replace_those_of_the_process_before(
    tmp_path: Path,
) -> None:
    """As where a checkpoint was saved at the last step of a pass, and the process then died."""
    write_lines(
        tmp_path,
        ("start", 0, 0, 0.0),
        ("valid", 1, 10, 0.50),
        ("pass", 1, 20, 0.40),
        ("valid", 1, 20, 0.45),
        ("start", 0, 20, 0.0),
        ("pass", 1, 20, 0.39),
        ("valid", 1, 20, 0.44),
    )

    (run,) = read_runs([tmp_path])

    assert run.points("pass", "epoch", "log_loss") == [(1, 0.39)]
    assert run.points("valid", "step", "log_loss") == [(10, 0.5), (20, 0.44)]


def test_validations_of_one_process_may_share_a_step(tmp_path: Path) -> None:
    write_lines(tmp_path, ("start", 0, 0, 0.0), ("valid", 1, 10, 0.5), ("valid", 1, 10, 0.4))

    (run,) = read_runs([tmp_path])

    assert run.points("valid", "step", "log_loss") == [(10, 0.5), (10, 0.4)]


def test_end_of_a_run_is_that_of_its_last_process(tmp_path: Path) -> None:
    """Until then a run that trains on has none, and newer figures stand alone."""
    ended = [
        ("start", 0, 0, 0.0),
        ("valid", 1, 10, 0.50),
        ("test", 1, 10, 0.51),
        ("end", 1, 10, 0.0),
        ("start", 1, 10, 0.0),
        ("valid", 2, 20, 0.40),
    ]
    write_lines(tmp_path, *ended)
    (run,) = read_runs([tmp_path])
    assert (run.of_kind("test"), run.of_kind("end")) == ([], [])
    assert run.figure("log_loss", ("test", "valid")) == 0.4

    write_lines(tmp_path, *ended, ("test", 2, 20, 0.41))
    (run,) = read_runs([tmp_path])
    assert run.points("test", "step", "log_loss") == [(20, 0.41)]


def test_part_that_fails_is_told_in_its_place(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of <nothing>")

    monkeypatch.setattr("ctr_ps.ps_worker.extras.report.sections.training", fail)
    monkeypatch.setattr("ctr_ps.ps_worker.extras.report.report.importance_of_checkpoint", fail)

    done = report([runs[0]], tmp_path / "report.html", importance_rows=50)

    page = (tmp_path / "report.html").read_text()
    assert done["runs_with_importance"] == 0
    assert "This part failed: ZeroDivisionError: of &lt;nothing&gt;" in page
    assert "not measured: ZeroDivisionError: of &lt;nothing&gt;" in page
    assert "Calibration" in page


def test_runs_of_the_same_folder_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run/metrics.jsonl").touch()

    runs = read_runs([tmp_path / "a/run", tmp_path / "b/run"])

    assert [run.name for run in runs] == ["a/run", "b/run"]


def test_what_cannot_be_reported_is_refused(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    output = tmp_path / "page.html"
    with pytest.raises(UsageError, match=r"cannot read .*metrics\.jsonl'?: No such file.*run\.dir"):
        report([tmp_path / "none"], output, importance_rows=0)
    with pytest.raises(UsageError, match="is given twice"):
        report([runs[0], runs[0]], output, importance_rows=0)
    with pytest.raises(UsageError, match="--output: cannot write"):
        report(runs, tmp_path / "none/page.html", importance_rows=0)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "start"}\nnothing\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not JSON"):
        report([tmp_path], output, importance_rows=0)
    assert not output.exists()
