"""The sections of a report that show how figures of runs go on: by step, or by pass."""

from collections.abc import Mapping, Sequence
from typing import Any

from ctr_ps.ps_worker.extras.report.charts import Series, lines, thinned
from ctr_ps.ps_worker.extras.report.page import Card, Section, shown, table
from ctr_ps.ps_worker.extras.report.runs import EVALUATED, Point, RunRecords, missing, number

Runs = Sequence[RunRecords]


def overview(runs: Runs) -> Section:
    """Returns the table of all runs."""
    headers = ["run", "model", "mode", "steps", "epochs", "examples"]
    headers += ["AUC", "log loss", "base rate's", "calibration", "best validation", "checkpoint"]
    card = Card(
        title="Runs",
        body=table(headers, [_row(run) for run in runs]),
        note="AUC, log loss and calibration are of data.test; without it, of the last validation (valid) or "
        "of the last pass, each example predicted before it was trained on (pass).",
    )
    return Section(
        anchor="runs",
        title="Runs",
        lead="What was trained, and how well it predicts.",
        cards=[card],
        is_wide=True,
    )


def _row(run: RunRecords) -> list[object]:
    steps = [number(each.get("step")) or 0 for each in run.records]
    epochs = [number(each.get("epoch")) or 0 for each in run.records]
    examples = sum(number(each.get("examples")) or 0 for each in run.of_kind("pass"))
    kind = next((each for each in (*EVALUATED, "pass") if run.of_kind(each)), "")
    last: Mapping[str, Any] = run.of_kind(kind)[-1] if kind else {}
    auc = last.get("auc")
    job = run.job
    return [
        run.name,
        None if job is None else job.model.name,
        None if job is None else job.strategy.mode,
        int(max(steps, default=0)),
        int(max(epochs, default=0)),
        examples or None,
        auc if kind == "test" or number(auc) is None else f"{shown(auc)} ({kind})",
        last.get("log_loss"),
        last.get("base_log_loss"),
        last.get("calibration"),
        _best(run),
        None if job is None else job.checkpoint.dir or "none: set checkpoint.dir",
    ]


def _best(run: RunRecords) -> str | None:
    metric = "log_loss" if run.job is None else run.job.valid.metric
    points = [each for each in run.of_kind("valid") if number(each.get(metric)) is not None]
    if not points:
        return None
    choose = min if metric == "log_loss" else max
    best = choose(points, key=lambda each: each[metric])
    name = metric.replace("_", " ").replace("auc", "AUC")
    return f"{name} {shown(best[metric])} at step {shown(best.get('step'))}"


def training(runs: Runs) -> Section:
    """Returns the curves of training."""
    charts = [
        ("Log loss while training", "loss", "log loss"),
        ("AUC while training", "auc", "AUC"),
        ("Speed", "examples_per_s", "examples a second"),
    ]
    return Section(
        anchor="training",
        title="Training",
        lead="Of worker 0 at each line of its log, each example predicted before it was trained on. "
        "A model whose log loss is above that of the base rate knows less than one number.",
        cards=_curves(runs, charts, "train", x="step"),
        missing=missing(runs, lambda run: run.points("train", "step", "loss"), _NO_TRAINING),
    )


_NO_TRAINING = (
    "no lines of training: one is written every train.log_every_s seconds, and at the end of a pass"
)


def validation(runs: Runs) -> Section:
    """Returns the curves of validation."""
    charts = [
        ("Log loss of validation", "log_loss", "log loss"),
        ("AUC of validation", "auc", "AUC"),
        ("AUC within groups", "gauc", "GAUC"),
        ("Calibration of validation", "calibration", "calibration"),
    ]
    return Section(
        anchor="validation",
        title="Validation",
        lead="On data.valid, which the model does not learn from: where it gets worse while the log loss of "
        "training falls, the model overfits.",
        cards=_curves(runs, charts, "valid", x="step"),
        missing=missing(
            runs,
            lambda run: run.of_kind("valid"),
            "no validation: set data.valid, and valid.every_steps for more than one an epoch",
        ),
    )


def passes(runs: Runs) -> Section:
    """Returns progressive validation by pass."""
    charts = [
        ("Log loss by pass", "log_loss", "log loss"),
        ("AUC by pass", "auc", "AUC"),
        ("Calibration by pass", "calibration", "calibration"),
    ]
    return Section(
        anchor="passes",
        title="Progressive validation",
        lead="Of all workers, each example predicted before it was trained on: in the first pass this is "
        "what the model would have done online; in later ones it has seen the examples before.",
        cards=_curves(runs, charts, "pass", x="epoch"),
        missing=missing(
            runs,
            lambda run: run.of_kind("pass"),
            "no pass has ended yet: train on, and report again",
        ),
    )


def tables(runs: Runs) -> Section:
    """Returns how tables grow: each table of one run, or all tables of each of several runs."""
    named: list[tuple[str, int, list[Point], list[Point]]] = []
    for index, run in enumerate(runs):
        sizes, memory = _sizes_of_tables(run, "rows"), _sizes_of_tables(run, "size_bytes")
        if len(runs) > 1 and sizes:
            named.append((run.name, index, _of_all(sizes), _of_all(memory)))
        elif len(runs) == 1:
            names = dict.fromkeys(name for _, each in sizes for name in each)
            named += [
                (name, place, _of_table(sizes, name), _of_table(memory, name))
                for place, name in enumerate(names)
            ]
    unit, scale = _unit_of_bytes(max((b for *_, of in named for _, b in of), default=0.0))
    cards = []
    if named:
        by_rows = [Series(name=name, number=index, points=of) for name, index, of, _ in named]
        by_size = [
            Series(name=name, number=index, points=[(a, b / scale) for a, b in of])
            for name, index, _, of in named
        ]
        cards = [
            _card_of(by_rows, "Rows of tables", "step", "rows", is_from_zero=True),
            _card_of(by_size, "Memory of tables", "step", unit, is_from_zero=True),
        ]
    which = "" if len(runs) == 1 else " Sums over the tables of each run."
    return Section(
        anchor="tables",
        title="Table growth",
        lead="Rows on all servers at the end of each pass, and the memory of rows, index and marks; [life] "
        f"limits both.{which}",
        cards=cards,
        missing=missing(
            runs,
            lambda run: _sizes_of_tables(run, "rows"),
            "no sizes of tables: they are written at the end of a pass",
        ),
    )


def _sizes_of_tables(run: RunRecords, key: str) -> list[tuple[float, dict[str, float]]]:
    """Returns steps, and the size of each table there."""
    found = []
    for record in run.of_kind("pass"):
        step, tables = number(record.get("step")), record.get("tables") or {}
        sizes = {name: number(each.get(key)) for name, each in tables.items()}
        known = {name: size for name, size in sizes.items() if size is not None}
        if step is not None and known:
            found.append((step, known))
    return found


def _of_table(sizes: Sequence[tuple[float, Mapping[str, float]]], name: str) -> list[Point]:
    return [(step, each[name]) for step, each in sizes if name in each]


def _of_all(sizes: Sequence[tuple[float, Mapping[str, float]]]) -> list[Point]:
    return [(step, sum(each.values())) for step, each in sizes]


def _curves(runs: Runs, charts: Sequence[tuple[str, str, str]], kind: str, *, x: str) -> list[Card]:
    """Returns charts with a line a run, without those that no run has figures for.

    Args:
        runs: Each a line.
        charts: Of each its title, the figure, and the name of it.
        kind: Of the records that have the figures.
        x: Of the same records: "step" or "epoch".
    """
    cards = []
    for title, key, y in charts:
        series = [
            Series(name=run.name, number=index, points=thinned(points))
            for index, run in enumerate(runs)
            if (points := run.points(kind, x, key))
        ]
        if series:
            label = "pass" if x == "epoch" else x
            levels = _levels(runs, kind, y)
            is_speed = key == "examples_per_s"
            cards.append(_card_of(series, title, label, y, levels=levels, is_from_zero=is_speed))
    return cards


def _levels(runs: Runs, kind: str, y: str) -> list[tuple[str, float]]:
    """Returns the values, by name, that a figure is compared with."""
    if y == "log loss":
        return _base_rates(runs, kind)
    return [("1: as many", 1.0)] if y == "calibration" else []


def _card_of(
    series: Sequence[Series],
    title: str,
    x: str,
    y: str,
    *,
    levels: Sequence[tuple[str, float]] = (),
    is_from_zero: bool = False,
) -> Card:
    return Card(
        title=title,
        body=lines(series, x=x, y=y, levels=levels, is_from_zero=is_from_zero),
        headers=["line", x, y],
        cells=[[each.name, a, b] for each in series for a, b in each.points],
    )


def _base_rates(runs: Runs, kind: str) -> list[tuple[str, float]]:
    """Returns the log loss of the base rate in each run; one line for runs in which it is the same."""
    kinds = (kind, "pass") if kind == "train" else (kind,)
    by_value: dict[str, list[tuple[str, float]]] = {}
    for run in runs:
        value = run.figure("base_log_loss", kinds)
        if value is not None:
            by_value.setdefault(f"{value:.4f}", []).append((run.name, value))
    if len(by_value) == 1:
        ((same),) = by_value.values()
        return [("base rate", same[0][1])]
    return [(f"base rate {each[0][0]}", each[0][1]) for each in by_value.values()]


def _unit_of_bytes(largest: float) -> tuple[str, float]:
    """Returns the binary unit in which a size reads well, and its bytes."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if largest >= 1024**power:
            return name, float(1024**power)
    return "bytes", 1.0
