"""The sections of a report that show runs as they are: calibration, slots, features, staleness and time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctr_ps.ps_worker.extras.report.charts import (
    Series,
    calibration,
    columns,
    rows,
    stacked,
)
from ctr_ps.ps_worker.extras.report.importance import Importance
from ctr_ps.ps_worker.extras.report.page import Card, Section, shown
from ctr_ps.ps_worker.extras.report.runs import EVALUATED, RunRecords, missing, number

Runs = Sequence[RunRecords]

FEATURES_SHOWN = 30


def calibrated(runs: Runs) -> Section:
    """Returns predicted and actual click rates by bucket."""
    name = "calibration_buckets"
    found = [(index, run.last(name, EVALUATED)) for index, run in enumerate(runs)]
    series, cells = [], []
    for index, each in found:
        buckets = [] if each is None else each[0]
        points = [
            (predicted, clicked)
            for bucket in buckets
            if (predicted := number(bucket.get("predicted"))) is not None
            and (clicked := number(bucket.get("click_rate"))) is not None
        ]
        if points:
            series.append(Series(name=runs[index].name, number=index, points=points))
        keys = ("examples", "lowest", "highest", "predicted", "click_rate", "calibration")
        cells += [[runs[index].name, *(bucket.get(key) for key in keys)] for bucket in buckets]
    cards = []
    if series:
        headers = ["run", "examples", "lowest", "highest", "predicted", "click rate", "calibration"]
        cards.append(
            Card(
                title="Click rate by prediction",
                body=calibration(series),
                note=f"{_of_what(runs, name)} Buckets of about equally many examples. Above the line clicks "
                "are more than predicted.",
                headers=headers,
                cells=cells,
            )
        )
    return Section(
        anchor="calibration",
        title="Calibration",
        lead="Whether a predicted click rate is the actual one: bids and budgets rely on it.",
        cards=cards,
        missing=missing(
            runs,
            lambda run: run.last(name, EVALUATED),
            "no calibration: set data.test or data.valid, and valid.calibration_buckets above 0",
        ),
    )


def by_slot_value(runs: Runs) -> Section:
    """Returns AUC by the most frequent values of slots."""
    found = [run.last("slices", EVALUATED) for run in runs]
    slices: list[Mapping[str, Any]] = [{} if each is None else each[0] for each in found]
    slots = dict.fromkeys(slot for each in slices for slot in each)
    cards = [_card_of_slot(runs, slot, slices) for slot in slots]
    return Section(
        anchor="slots",
        title="AUC by slot value",
        lead="Whether the model is as good for each site, device or country as for all examples together. "
        "Values are the most frequent ones; a value whose text is not known has its hash.",
        cards=[card for card in cards if card is not None],
        missing=missing(
            runs,
            lambda run: run.last("slices", EVALUATED),
            'no figures by slot value: name slots, as by --set valid.slices=["site","device"]',
        ),
    )


def _card_of_slot(runs: Runs, slot: str, slices: Sequence[Mapping[str, Any]]) -> Card | None:
    of_runs = [{_value(each): each for each in of_run.get(slot, ())} for of_run in slices]
    values = dict.fromkeys(value for each in of_runs for value in each)
    labelled = {
        value: [number(each.get(value, {}).get("auc")) for each in of_runs] for value in values
    }
    keys = ("examples", "click_rate", "auc", "calibration")
    cells = [
        [value, run.name, *(each[value].get(key) for key in keys)]
        for value in values
        for run, each in zip(runs, of_runs, strict=True)
        if value in each
    ]
    if not any(each is not None for figures in labelled.values() for each in figures):
        return None
    names = [run.name for run in runs]
    overall = [run.figure("auc", EVALUATED) for run in runs]
    levels = [("all examples", overall[0])] if len(runs) == 1 and overall[0] is not None else []
    return Card(
        title=slot,
        body=rows(labelled, names, x="AUC", is_bars=False, levels=levels),
        note="From the most frequent value down. Values whose examples are of one class have no AUC.",
        headers=["value", "run", "examples", "click rate", "AUC", "calibration"],
        cells=cells,
    )


def _value(figures: Mapping[str, Any]) -> str:
    """Returns the text of a slot's value, or its key where that is not known."""
    value = figures.get("value")
    return str(figures.get("key") if value is None else value or "(missing)")


def importance(runs: Runs, found: Sequence[Importance | str]) -> Section:
    """Returns what models lose without each feature; a text in place of an importance says why not."""
    measured = [each if isinstance(each, Importance) else None for each in found]
    largest: dict[str, float] = {}
    for each in measured:
        for feature in () if each is None else each.features:
            largest[feature.name] = max(largest.get(feature.name, -1.0), feature.auc_lost)
    names = sorted(largest, key=lambda name: -largest[name])
    by_name = [
        {} if each is None else {feature.name: feature for feature in each.features}
        for each in measured
    ]
    cells = [
        [name, run.name, own[name].auc_lost, own[name].log_loss_gained]
        for name in names
        for run, own in zip(runs, by_name, strict=True)
        if name in own
    ]

    def chart(value: Callable[[Any], float], x: str, title: str, note: str) -> Card:
        labelled = {
            name: [number(value(own[name])) if name in own else None for own in by_name]
            for name in names[:FEATURES_SHOWN]
        }
        return Card(
            title=title,
            body=rows(labelled, [run.name for run in runs], x=x, is_bars=True),
            note=note,
            headers=["feature", "run", "AUC lost", "log loss gained"],
            cells=cells,
        )

    examples = ", ".join(
        f"{run.name}: {shown(each.examples)} rows, AUC {shown(each.auc)}, log loss {shown(each.log_loss)}"
        for run, each in zip(runs, measured, strict=True)
        if each is not None
    )
    hidden = len(names) - FEATURES_SHOWN
    more = f" The {hidden} features below are in the figures." if hidden > 0 else ""
    cards = []
    if names:
        by_auc = chart(lambda each: each.auc_lost, "AUC lost", "AUC lost", f"{examples}.{more}")
        by_loss = chart(
            lambda each: each.log_loss_gained,
            "log loss gained",
            "Log loss gained",
            "In the order of the AUC lost.",
        )
        cards = [by_auc, by_loss]
    return Section(
        anchor="importance",
        title="Feature importance",
        lead="What the saved model loses when the values of one slot or dense column are permuted among the "
        "examples. Features that say the same share their importance; one near 0 is of no use to this model.",
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
        names = [run.name for run in runs]
        cards.append(
            Card(
                title="Batches by staleness",
                body=columns(labelled, names, x="staleness in versions", y="% of batches"),
                note=f"{means}.",
                headers=["staleness", "run", "batches"],
                cells=[
                    [label, run.name, each[label]]
                    for label in labels
                    for run, each in zip(runs, counts, strict=True)
                    if label in each
                ],
            )
        )
    return Section(
        anchor="staleness",
        title="Staleness",
        lead="How many versions the parameters went on between the pull of a batch and its push, over all "
        "workers. 0 in mode sync.",
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
    totals, threads = [], []
    for run in runs:
        each = _milliseconds_by_part(run)
        if each:
            totals.append((run.name, each))
            number_of = run.figure("threads", ("pass",))
            if number_of is not None and number_of > 1:
                threads.append(f"{run.name}: {shown(int(number_of))} threads")
    parts = list(dict.fromkeys(part for _, each in totals for part in each))
    cards = []
    if totals:
        several = f" Threads train at the same time: {', '.join(threads)}." if threads else ""
        cards.append(
            Card(
                title="Milliseconds a step",
                body=stacked(totals, parts, x="milliseconds"),
                note=f"Mean over the steps of worker 0, on the thread that takes them.{several}",
                headers=["run", "part", "milliseconds a step"],
                cells=[
                    [name, part, each[part]]
                    for name, each in totals
                    for part in parts
                    if part in each
                ],
            )
        )
    return Section(
        anchor="time",
        title="Time by part of a step",
        lead="Where worker 0 spends its time: what is largest is what to make faster.",
        cards=cards,
        missing=missing(
            runs, _milliseconds_by_part, "no times: they are written at the end of a pass"
        ),
        is_wide=True,
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


def _of_what(runs: Runs, name: str) -> str:
    """Returns which evaluation the figures of each run are of."""
    found = {run.name: run.last(name, EVALUATED) for run in runs}
    kinds = {run: each[1]["kind"] for run, each in found.items() if each is not None}
    if len(set(kinds.values())) == 1:
        return f"Of data.{next(iter(kinds.values()))}."
    return " ".join(f"{run}: of data.{kind}." for run, kind in kinds.items())
