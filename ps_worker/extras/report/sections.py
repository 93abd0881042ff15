"""The sections of a report: each shows one thing of all runs, and says of which runs it is missing."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ctr_ps.ps_worker.extras.report.charts import Series, calibration, lines, rows, thinned
from ctr_ps.ps_worker.extras.report.importance import Importance
from ctr_ps.ps_worker.extras.report.page import Card, Cell, Section, shown, table
from ctr_ps.ps_worker.extras.report.runs import EVALUATED, Point, RunRecords, missing, number

Runs = Sequence[RunRecords]

FEATURES_SHOWN = 30
WINDOWS_SHOWN = 100  # of a run, the last

_SPEED, _ROWS, _MIB = "examples a second", "rows", "MiB"
_CALIBRATION = ("calibration", "calibration")
_FROM_ZERO = (_SPEED, _ROWS, _MIB)


def overview(runs: Runs) -> Section:
    """Returns the table of all runs."""
    headers = ["run", "model", "mode", "steps", "epochs", "examples"]
    headers += ["AUC", "log loss", "base rate's", "calibration", "best validation", "checkpoint"]
    card = Card(
        title="Runs",
        body=table(headers, [_row(run) for run in runs]),
        note=(
            "AUC, log loss and calibration: on data.test (test); else of the last validation (valid), or of "
            "the last pass, from predictions made before training on each example (pass)."
        ),
    )
    lead = "Models, data and quality of the runs."
    return Section(lead=lead, cards=[card, *_differing(runs)])


def _differing(runs: Runs) -> list[Card]:
    """Returns the settings in which the jobs of runs differ, if some do; not their folders."""
    jobs = {run.name: run.job.settings() for run in runs if run.job is not None}
    keys = dict.fromkeys(key for each in jobs.values() for key in each)
    shown = [[key, *(json.dumps(each.get(key)) for each in jobs.values())] for key in keys]
    cells = [row for row in shown if len({*row[1:]}) > 1 and not row[0].endswith(".dir")]
    title = "Settings that differ"
    return [Card(title=title, body=table(["setting", *jobs], cells))] if cells else []


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


def _curves(
    runs: Runs, *, kind: str, figures: Sequence[tuple[str, str]], lead: str, why_missing: str
) -> Section:
    """Returns charts of figures, given by key and name, with a line a run, if one has it."""
    key_of_x, x = ("epoch", "pass") if kind == "pass" else ("step", "step")
    cards = []
    for key, y in figures:
        series = [
            Series(name=run.name, number=index, points=thinned(points))
            for index, run in enumerate(runs)
            if (points := run.points(kind, key_of_x, key))
        ]
        if series:
            cards.append(_card_of_lines(series, x, y, _levels(runs, kind, y)))
    return Section(
        lead=lead, cards=cards, missing=missing(runs, lambda run: run.of_kind(kind), why_missing)
    )


training = partial(
    _curves,
    kind="train",
    figures=[("loss", "log loss"), ("auc", "AUC"), ("examples_per_s", _SPEED)],
    lead=(
        "Of worker 0, at each line of its log, from predictions made before training on each example. A log "
        "loss above that of the base rate is worse than one constant prediction."
    ),
    why_missing=(
        "no lines of training: they are written every train.log_every_s seconds and at the end of a pass"
    ),
)
validation = partial(
    _curves,
    kind="valid",
    figures=[("log_loss", "log loss"), ("auc", "AUC"), ("gauc", "GAUC"), _CALIBRATION],
    lead=(
        "On data.valid, which is not trained on: if it gets worse while the log loss of training falls, the "
        "model overfits."
    ),
    why_missing="no validation: set data.valid, and valid.every_steps for more than one in an epoch",
)
_figures_of_passes = partial(
    _curves,
    kind="pass",
    figures=[("log_loss", "log loss"), ("auc", "AUC"), _CALIBRATION],
    lead=(
        "Of all workers, from predictions made before training on each example: the first pass shows the "
        "quality in online use; in later passes the examples are known."
    ),
    why_missing="no pass has ended yet: report again later",
)


def passes(runs: Runs) -> Section:
    """Returns charts by pass, and of a stream's also what was published, and the served model's figures."""
    found = _figures_of_passes(runs)
    return replace(found, cards=[*found.cards, *_windows(runs)])


def _windows(runs: Runs) -> list[Card]:
    figures = ("auc", "log_loss", "normalized_entropy", "calibration")
    cells: list[list[Cell]] = []
    for run in runs:
        judged = {each.get("epoch"): each for each in run.of_kind("publish")}
        for each in run.of_kind("pass")[-WINDOWS_SHOWN:]:
            gate = judged.get(each.get("epoch"), {})
            published = "yes" if gate.get("is_published") else gate.get("reason")
            if gate or each.get("until"):
                own = [each.get(key) for key in ("epoch", "until", "examples", *figures)]
                served = [gate.get("served"), *(gate.get(f"served_{key}") for key in figures)]
                live = gate.get("sample_normalized_entropy")
                cells.append([run.name, *own, published, *served, live])
    headers = ["run", "pass", "until", "examples", "AUC", "log loss", "NE", "calibration"]
    headers += ["published", "served", "AUC", "log loss", "NE", "calibration", "NE of sample"]
    note = (
        "NE: normalized entropy. The second figures are of the served model, on a sample of the pass, where "
        "the trained one has the last. Without [publish] the first ones are those of what was served."
    )
    return [Card(title="Stream", body=table(headers, cells), note=note)] if cells else []


def _levels(runs: Runs, kind: str, y: str) -> list[tuple[str, float]]:
    """Returns the values, by name, that a figure is compared with."""
    if y == "log loss":
        return _base_rates(runs, kind)
    return [("1: equal", 1.0)] if y == "calibration" else []


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


def tables(runs: Runs) -> Section:
    """Returns how the tables of runs grow."""
    cards = []
    for key, unit, y in (("rows", 1, _ROWS), ("size_bytes", 2**20, _MIB)):
        sizes: dict[str, list[Point]] = {}
        for run in runs:
            for record in run.of_kind("pass"):
                step = number(record.get("step"))
                for name, figures in (record.get("tables") or {}).items():
                    size = number(figures.get(key))
                    if step is not None and size is not None:
                        line = name if len(runs) == 1 else f"{run.name}: {name}"
                        sizes.setdefault(line, []).append((step, size / unit))
        if sizes:
            series = [
                Series(name=name, number=index, points=points)
                for index, (name, points) in enumerate(sizes.items())
            ]
            cards.append(_card_of_lines(series, "step", y))
    return Section(
        lead="Rows on all servers at the end of each pass, and the memory of rows, index and marks; [life] "
        "limits both.",
        cards=cards,
        missing=missing(
            runs,
            lambda run: any(each.get("tables") for each in run.of_kind("pass")),
            "no sizes of tables: they are written at the end of a pass",
        ),
    )


def _card_of_lines(
    series: Sequence[Series], x: str, y: str, levels: Sequence[tuple[str, float]] = ()
) -> Card:
    return Card(
        title=f"{y[0].upper()}{y[1:]}",
        body=lines(series, x=x, y=y, levels=levels, is_from_zero=y in _FROM_ZERO),
        headers=["line", x, y],
        cells=[[each.name, a, b] for each in series for a, b in each.points],
    )


def calibrated(runs: Runs) -> Section:
    """Returns predicted and actual click rates by bucket."""
    name = "calibration_buckets"
    series, cells = [], []
    for index, run in enumerate(runs):
        found = run.last(name, EVALUATED)
        buckets = [] if found is None else found[0]
        points = [
            (predicted, clicked)
            for bucket in buckets
            if (predicted := number(bucket.get("predicted"))) is not None
            and (clicked := number(bucket.get("click_rate"))) is not None
        ]
        if points:
            series.append(Series(name=run.name, number=index, points=points))
        keys = ("examples", "lowest", "highest", "predicted", "click_rate", "calibration")
        cells += [[run.name, *(bucket.get(key) for key in keys)] for bucket in buckets]
    cards = []
    if series:
        headers = ["run", "examples", "lowest", "highest", "predicted", "click rate", "calibration"]
        cards.append(
            Card(
                title="Click rate by prediction",
                body=calibration(series),
                note=(
                    f"{_of_what(runs, name)} Buckets of about equal numbers of examples. Above the line, "
                    "clicks exceed the prediction."
                ),
                headers=headers,
                cells=cells,
            )
        )
    return Section(
        lead="Whether predicted click rates match the actual ones: bids and budgets rely on it.",
        cards=cards,
        missing=missing(
            runs,
            lambda run: run.last(name, EVALUATED),
            "no calibration: set data.test or data.valid, and valid.calibration_buckets above 0",
        ),
    )


def _of_what(runs: Runs, name: str) -> str:
    """Returns which evaluation the figures of each run are of."""
    found = {run.name: run.last(name, EVALUATED) for run in runs}
    kinds = {run: each[1]["kind"] for run, each in found.items() if each is not None}
    if len(set(kinds.values())) == 1:
        return f"Of data.{next(iter(kinds.values()))}."
    return " ".join(f"{run}: of data.{kind}." for run, kind in kinds.items())


def by_slot_value(runs: Runs) -> Section:
    """Returns AUC by the most frequent values of slots."""
    found = [run.last("slices", EVALUATED) for run in runs]
    slices: list[Mapping[str, Any]] = [{} if each is None else each[0] for each in found]
    slots = dict.fromkeys(slot for each in slices for slot in each)
    cards = [_card_of_slot(runs, slot, slices) for slot in slots]
    return Section(
        lead=(
            "Whether the model is equally good for each site, device or country. Shown are the most "
            "frequent values; a value with unknown text is shown as its hash."
        ),
        cards=[card for card in cards if card is not None],
        missing=missing(
            runs,
            lambda run: run.last("slices", EVALUATED),
            'no figures by slot value: name slots, such as --set valid.slices=["site","device"]',
        ),
    )


def _card_of_slot(runs: Runs, slot: str, slices: Sequence[Mapping[str, Any]]) -> Card | None:
    of_runs = [{_value(each): each for each in of_run.get(slot, ())} for of_run in slices]
    values = dict.fromkeys(value for each in of_runs for value in each)
    labelled = {
        value: [number(each.get(value, {}).get("auc")) for each in of_runs] for value in values
    }
    if not any(each is not None for figures in labelled.values() for each in figures):
        return None
    overall = [run.figure("auc", EVALUATED) for run in runs]
    levels = [("all examples", overall[0])] if len(runs) == 1 and overall[0] is not None else []
    keys = ("examples", "click_rate", "auc", "calibration")
    return Card(
        title=slot,
        body=rows(labelled, [run.name for run in runs], x="AUC", is_bars=False, levels=levels),
        note="Most frequent values first. Values with examples of one class only have no AUC.",
        headers=["value", "run", "examples", "click rate", "AUC", "calibration"],
        cells=_cells(runs, of_runs, values, lambda each: [each.get(key) for key in keys]),
    )


def _value(figures: Mapping[str, Any]) -> str:
    """Returns the text of a slot's value, or its key where that is not known."""
    value = figures.get("value")
    return str(figures.get("key") if value is None else value or "(missing)")


def importance(runs: Runs, found: Sequence[Importance | str]) -> Section:
    """Returns what models lose without each feature; a text in place of an importance says why not."""
    of_runs = [
        {} if isinstance(each, str) else {feature.name: feature for feature in each.features}
        for each in found
    ]
    names = sorted(
        dict.fromkeys(name for own in of_runs for name in own),
        # -1.0 first: a run of one class has nan, which is then no maximum
        key=lambda name: -max((-1.0, *(own[name].auc_lost for own in of_runs if name in own))),
    )
    cards = []
    if names:
        labelled = {
            name: [number(own[name].auc_lost) if name in own else None for own in of_runs]
            for name in names[:FEATURES_SHOWN]
        }
        examples = ", ".join(
            f"{run.name}: {shown(each.examples)} rows, AUC {shown(each.auc)}, log loss {shown(each.log_loss)}"
            for run, each in zip(runs, found, strict=True)
            if isinstance(each, Importance)
        )
        hidden = len(names) - FEATURES_SHOWN
        more = f" The {hidden} features below are in the figures." if hidden > 0 else ""
        figures = _cells(runs, of_runs, names, lambda each: [each.auc_lost, each.log_loss_gained])
        cards.append(
            Card(
                title="AUC lost",
                body=rows(labelled, [run.name for run in runs], x="AUC lost"),
                note=f"{examples}.{more}",
                headers=["feature", "run", "AUC lost", "log loss gained"],
                cells=figures,
            )
        )
    return Section(
        lead=(
            "The loss in quality of the saved model when the values of one slot or dense column are "
            "permuted among the examples. Redundant features share their importance; features near 0 do not "
            "help this model."
        ),
        cards=cards,
        missing=[
            f"{run.name}: {each}"
            for run, each in zip(runs, found, strict=True)
            if isinstance(each, str)
        ],
    )


def staleness(runs: Runs) -> Section:
    """Returns the histogram of staleness."""
    found = [run.last("staleness", ("pass", "end")) for run in runs]
    counts = [{} if each is None else each[0].get("counts") or {} for each in found]
    totals = [sum(each.values()) for each in counts]
    labels = sorted({label for each in counts for label in each}, key=_start)
    cards = []
    if labels:
        labelled = {
            label: [
                100 * each[label] / total if label in each else None
                for each, total in zip(counts, totals, strict=True)
            ]
            for label in labels
        }
        means = "; ".join(
            f"{run.name}: mean {shown(number(each[0].get('mean')))}, largest "
            f"{shown(each[0].get('largest'))}"
            for run, each in zip(runs, found, strict=True)
            if each is not None
        )
        cards.append(
            Card(
                title="Batches by staleness in versions",
                body=rows(labelled, [run.name for run in runs], x="% of batches"),
                note=f"{means}.",
                headers=["staleness", "run", "batches"],
                cells=_cells(runs, counts, labels, lambda batches: [batches]),
            )
        )
    return Section(
        lead=(
            "Number of versions between the pull of a batch and its push, over all workers; always 0 in "
            "mode sync."
        ),
        cards=cards,
        missing=missing(
            runs,
            lambda run: run.last("staleness", ("pass", "end")),
            "no staleness: it is written at the end of a pass",
        ),
    )


def _start(label: str) -> int:
    """Returns where a range begins, as 3 of "3-4"."""
    start = label.split("-", maxsplit=1)[0]
    return int(start) if start.isdigit() else 0


def time_by_part(runs: Runs) -> Section:
    """Returns the time of a step by its parts."""
    of_runs = [_milliseconds_by_part(run) for run in runs]
    parts = dict.fromkeys(part for each in of_runs for part in each)
    cards = []
    if parts:
        threads = [
            f" {run.name} trains in {number_of:.0f} threads at once."
            for run in runs
            if (number_of := run.figure("threads", ("pass",))) is not None and number_of > 1
        ]
        labelled = {part: [each.get(part) for each in of_runs] for part in parts}
        cards.append(
            Card(
                title="Milliseconds a step",
                body=rows(labelled, [run.name for run in runs], x="milliseconds"),
                note="Mean over the steps of worker 0, on the thread that runs them."
                + "".join(threads),
                headers=["part", "run", "milliseconds a step"],
                cells=_cells(runs, of_runs, parts, lambda milliseconds: [milliseconds]),
            )
        )
    return Section(
        lead="Time of worker 0 by part of a step: speed up the largest part first.",
        cards=cards,
        missing=missing(
            runs, _milliseconds_by_part, "no times: they are written at the end of a pass"
        ),
    )


def _milliseconds_by_part(run: RunRecords) -> dict[str, float]:
    """Returns the mean time of a step by part, over all passes that have it."""
    totals: dict[str, float] = {}
    steps, before = 0.0, 0.0
    for each in run.records:
        step = number(each.get("step")) or 0.0
        if each.get("kind") == "start":
            before = step
        if each.get("kind") != "pass":
            continue
        found = {part: number(value) for part, value in (each.get("seconds") or {}).items()}
        if found:
            steps += step - before
            for part, seconds in found.items():
                totals[part] = totals.get(part, 0.0) + (seconds or 0.0)
        before = step
    return {part: 1000 * seconds / steps for part, seconds in totals.items()} if steps > 0 else {}


def _cells(
    runs: Runs,
    of_runs: Sequence[Mapping[str, Any]],
    labels: Iterable[str],
    figures: Callable[[Any], Sequence[Cell]],
) -> list[list[Cell]]:
    """Returns a line of a table for each label and each run that has it: both, and the figures."""
    return [
        [label, run.name, *figures(own[label])]
        for label in labels
        for run, own in zip(runs, of_runs, strict=True)
        if label in own
    ]
