"""Roles of columns: what is taken as what and why, and that all that is taken can be read."""

import datetime
import decimal
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from pyarrow import csv, orc

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CtrPsError, DataError, UsageError
from ctr_ps.ps_worker.data.columnar.column_values import flat
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.extras.data_tools import first_job
from ctr_ps.ps_worker.extras.data_tools.first_job import write_first_job
from ctr_ps.ps_worker.extras.data_tools.roles import (
    Ignored,
    Number,
    Proposal,
    Slot,
    Vector,
    propose,
    why_numbers_are_times,
    why_text_is_time,
)
from ctr_ps.ps_worker.extras.data_tools.samples import Sample, sample_of
from ctr_ps.ps_worker.job import load_job
from tests.support.needs import IN_CI

ROWS = 400
RNG = np.random.default_rng(1)
LABELS = pa.array(
    np.random.default_rng(2).permutation([0, 1] * (ROWS // 2))
)  # no column tells them
DAY = datetime.date(2026, 1, 1)


def cycle(values: list[Any], kind: pa.DataType | None = None) -> pa.Array:
    return pa.array((values * ROWS)[:ROWS], kind)


def proposal_of(
    folder: Path, columns: dict[str, pa.Array], suffix: str = ".parquet", **options: Any
) -> Proposal:
    path = folder / f"rows{suffix}"
    write(path, pa.table({"click": LABELS, **columns}))
    return propose(sample_of([str(path)]), **options)


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".orc":
        orc.write_table(table, str(path))
    else:
        csv.write_csv(table, path)


def role_in(proposal: Proposal, name: str) -> Number | Slot | Vector | Ignored:
    (role,) = [
        *(each for each in proposal.numbers if each.column.name == name),
        *(
            each
            for each in (*proposal.slots, *proposal.vectors, *proposal.ignored)
            if each.name == name
        ),
    ]
    return role


NUMBER, SLOT, IGNORED, VECTOR = Number, Slot, Ignored, Vector
CASES = {
    "text": (cycle(["a", "b", None, ""]), SLOT, "text, 3 distinct"),
    "large text": (cycle(["a", "b"], pa.large_string()), SLOT, "text"),
    "dictionary": (cycle(["a", "b"]).dictionary_encode(), SLOT, "text"),
    "text view": (cycle(["a", "b"], pa.string_view()), SLOT, "text, 2 distinct"),
    "bytes view": (cycle([b"a", b"\xff"], pa.binary_view()), SLOT, "text, 2 distinct"),
    "fixed bytes": (cycle([b"ab", b"cd"], pa.binary(2)), SLOT, "text, 2 distinct"),
    "lists of views": (cycle([["a", "b"], []], pa.list_(pa.string_view())), SLOT, "2 distinct"),
    "lists of dictionaries": (
        cycle([["a", "b"], None, ["c"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        SLOT,
        "3 distinct",
    ),
    "bytes": (cycle([b"\xff", b"\x00"]), SLOT, "text"),
    "few whole numbers": (cycle([-3, 0, 7, None]), SLOT, "only 3 values"),
    "user_id": (
        pa.array(RNG.integers(0, 150, ROWS)),
        SLOT,
        "read as ids because of the column's name",
    ),
    "counts": (pa.array(RNG.geometric(0.01, ROWS) * 3), NUMBER, "standardised"),
    "long tail": (pa.array([*(RNG.geometric(0.01, ROWS - 1) * 3), 10**9]), NUMBER, "logarithms"),
    "whole names": (pa.array(RNG.integers(10**6, 10**6 + 150, ROWS)), SLOT, "spread evenly"),
    "number": (pa.array(RNG.normal(size=ROWS)), NUMBER, "standardised"),
    "huge": (pa.array(RNG.normal(size=ROWS) * 1e300), NUMBER, "logarithms"),
    "with nan": (cycle([1.5, float("nan"), None, 2.5]), NUMBER, "50.0% missing"),
    "bool": (cycle([True, False, None]), NUMBER, "from 0 to 1"),
    "decimal": (cycle([decimal.Decimal("1.50"), decimal.Decimal("2.25")]), NUMBER, "from 1.5"),
    "lists": (cycle([[1, 2], [], None, [3, None]]), SLOT, "lists"),
    "text lists": (cycle([["a"], ["b", "c"]]), SLOT, "lists, 1.5 values a row, 3 distinct"),
    "infinite": (cycle([1.0, float("inf")]), IGNORED, "infinite"),
    "constant": (cycle([1]), IGNORED, "always 1"),
    "constant text": (cycle(["x"]), IGNORED, "the same in every row: 'x'"),
    "unique": (pa.array([f"{number:x}" for number in range(ROWS)]), IGNORED, "different in nearly"),
    "row": (pa.array(RNG.permutation(ROWS) + 17), IGNORED, "like a row number"),
    "seen_at": (pa.array(RNG.integers(1_600_000_000, 1_700_000_000, ROWS)), IGNORED, "since 1970"),
    "date": (cycle([DAY, DAY + datetime.timedelta(1)]), IGNORED, "a time"),
    "text time": (cycle(["2026-01-01 10:00", "2026-01-02T11:30:00Z"]), IGNORED, "times"),
    "nothing": (pa.nulls(ROWS), IGNORED, "no value"),
    "nan alone": (cycle([float("nan")]), IGNORED, "no value"),
    "empty lists": (cycle([[], None], pa.list_(pa.int64())), IGNORED, "no value"),
    "vectors": (cycle([[0.5, 1], [1.5, 2], None]), VECTOR, "lists of 2 numbers, not scaled"),
    "fixed vectors": (cycle([[0.5], [1.5]], pa.list_(pa.float32(), 1)), VECTOR, "of 1 numbers"),
    "number lists": (cycle([[0.5], [1.5, 2]]), IGNORED, "dense columns lists of one length"),
    "infinite lists": (cycle([[0.5], [float("inf")]]), IGNORED, "lists of double"),
    "price in text": (
        pa.array([f"{each:.2f}" for each in RNG.random(ROWS)]),
        SLOT,
        "numbers taken as names, without an order: for numbers write them as such, not as text",
    ),
    "vector in text": (
        cycle(["[0.5, 1]", "[0.1, 2e-3]"]),
        SLOT,
        "2 distinct values; numbers taken",
    ),
    "whole vectors": (cycle([[1, 2], [3, 4], None]), SLOT, "4 distinct; numbers taken as names"),
    "nested lists": (cycle([[[1]], [[2]]]), IGNORED, "lists of list"),
    "event_time": (pa.array(RNG.integers(16 * 10**17, 17 * 10**17, ROWS)), IGNORED, "since 1970"),
    "one name or none": (cycle([1, None]), SLOT, "only 1 value"),
    "one number or none": (cycle([1.5, None]), IGNORED, "always 1.5 where it is not missing"),
}


@pytest.mark.parametrize("name", CASES)
def test_role_and_its_reason(tmp_path: Path, name: str) -> None:
    array, role, reason = CASES[name]

    found = role_in(proposal_of(tmp_path, {"slot": cycle(["p", "q"]), name: array}), name)

    assert isinstance(found, role), found
    assert reason in found.why


def sample_with(
    name: str,
    array: pa.Array,
    *,
    is_text: bool = False,
    is_complete: bool = True,
    **others: pa.Array,
) -> Sample:
    return Sample(
        columns={name: array, **others},
        unusable={},
        is_text=is_text,
        num_rows=len(array),
        total_rows=len(array),
        is_complete=is_complete,
    )


@pytest.mark.parametrize(
    ("values", "suffix", "shown"),
    [
        ([1.0, 2.0, None, 7], ".parquet", "'1.0'"),
        ([float("nan"), 12.0, 7], ".parquet", "'nan'"),
        ([decimal.Decimal(12), decimal.Decimal(13), 7], ".parquet", "'12'"),
        (["12.0", "7.0", ""], ".csv", "'12.0'"),
    ],
)
def test_ids_that_are_no_integers_are_left_out_and_said(
    tmp_path: Path, values: list[Any], suffix: str, shown: str
) -> None:
    """As numbers they would be scaled; slots take no floats."""
    columns = {"slot": cycle(["p", "q"]), "user_id": cycle(values)}

    found = role_in(proposal_of(tmp_path, columns, suffix), "user_id")

    assert isinstance(found, Ignored)
    assert f"an id by its name, but a slot cannot read {shown}" in found.why
    assert "write it as integers or text" in found.why


@pytest.mark.parametrize("kind", ["whole numbers", "text", "csv"])
@pytest.mark.parametrize(
    ("is_complete", "name", "role"),
    [(True, "user_id", IGNORED), (False, "user_id", SLOT), (False, "anything", IGNORED)],
)
def test_ids_that_are_unique_in_a_part_of_the_rows_are_kept(
    kind: str, is_complete: bool, name: str, role: type
) -> None:
    users = RNG.permutation(ROWS) + 10**9
    values = pa.array(users if kind == "whole numbers" else [f"{user}" for user in users])
    if kind == "text":
        values = pa.array([f"u{user}" for user in users])
    sample = sample_with(name, values, is_text=kind == "csv", is_complete=is_complete)

    found = role_in(propose(sample, needs_label=False), name)

    assert isinstance(found, role), found
    assert "different in nearly every" in found.why


def test_row_numbers_in_order_are_no_ids() -> None:
    sample = sample_with("id", pa.array(range(70, 70 + ROWS)), is_complete=False)

    assert isinstance(role_in(propose(sample, needs_label=False), "id"), Ignored)


IDS = ["id", "AD_ID", "userId", "itemIDs", "userid", "ADID", "my_uid", "zip_code", "device-hash"]
NO_IDS = ["bid", "amount_paid", "BID", "MaxBid", "grid", "valid", "said"]


@pytest.mark.parametrize(
    ("name", "is_id"), [*((name, True) for name in IDS), *((name, False) for name in NO_IDS)]
)
def test_ids_are_told_by_their_names(name: str, is_id: bool) -> None:
    counts = pa.array(RNG.geometric(0.01, ROWS) * 3)

    found = role_in(propose(sample_with(name, counts, slot=LABELS), needs_label=False), name)

    assert isinstance(found, SLOT if is_id else NUMBER)


@pytest.mark.parametrize("label", ["", "label"])
def test_other_columns_named_like_labels_are_left_out(tmp_path: Path, label: str) -> None:
    others = {"target": cycle([1, 1, 0]), "CLK": cycle([0, 1, 2, 3])}
    if not label:
        others.pop("target")
    table = pa.table({"label": LABELS, "slot": cycle(["p", "q", "r"]), **others})
    pq.write_table(table, tmp_path / "rows.parquet")

    found = propose(sample_of([f"{tmp_path}/rows.parquet"]), label=label)

    assert found.label is not None
    assert found.label.name == "label"
    assert found.schema().features == ("slot",)
    for name in others:
        assert "its name is that of a label" in role_in(found, name).why


AFTER_CLICK = ["purchase", "conversion", "convert", "cvr", "buy", "pay", "order", "cart", "like"]
AFTER_CLICK += ["finish", "favorite", "is_favourite", "Purchased", "add_to_cart", "cvr_label"]


@pytest.mark.parametrize("name", AFTER_CLICK)
def test_what_follows_a_click_is_a_label_of_its_own_or_nothing(tmp_path: Path, name: str) -> None:
    found = proposal_of(tmp_path, {name: cycle([0, 0, 1]), "slot": cycle(["p", "q", "r"])})
    amounts = proposal_of(tmp_path, {name: cycle([0, 5, 7]), "slot": cycle(["p", "q", "r"])})

    assert found.schema().features == amounts.schema().features == ("slot",)
    assert (
        f'to learn it as a second label, set labels = ["click", "{name}"]'
        in role_in(found, name).why
    )
    assert "its name is that of an event after a click; add it to" in role_in(amounts, name).why


def test_names_with_such_words_in_them_are_features(tmp_path: Path) -> None:
    names = ["orders_30d", "user_cvr", "likes_of_user", "payment_method", "cartoon", "unlike"]

    found = proposal_of(tmp_path, {name: cycle(["p", "q", "r"]) for name in names})

    assert found.schema().slots == tuple(names)


def test_leak_is_left_out_with_what_it_would_be(tmp_path: Path) -> None:
    price = pa.array(
        [0.0 if label == 0 else number + 0.5 for number, label in enumerate(LABELS.to_pylist())]
    )
    code = pa.array([f"c{label}" for label in LABELS.to_pylist()])

    found = proposal_of(tmp_path, {"price": price, "code": code, "slot": cycle(["p", "q", "r"])})

    assert found.leaks == ("price", "code")
    assert found.schema().features == ("slot",)
    assert re.search(r"almost perfectly.*\(numbers from 0", role_in(found, "price").why)
    assert re.search(r"almost perfectly.*\(text, 2 distinct", role_in(found, "code").why)
    with pytest.raises(UsageError, match=r"no column can be a slot.*'code': predicts .*by hand"):
        proposal_of(tmp_path, {"code": code}).schema()


@pytest.mark.parametrize("place", [0, 1])
def test_leak_in_a_vector_is_found(tmp_path: Path, place: int) -> None:
    noise = RNG.normal(size=(2, ROWS))
    rows = [[*pair] for pair in zip(*noise, strict=True)]
    vectors = [[*pair] for pair in zip(*noise, strict=True)]
    for vector, label in zip(vectors, LABELS.to_pylist(), strict=True):
        vector[place] += 10 * (label or 0)

    found = proposal_of(tmp_path, {"v": vectors, "free": rows, "slot": cycle(["p", "q", "r"])})

    assert found.leaks == ("v",)
    assert [each.name for each in found.vectors] == ["free"]


@pytest.mark.parametrize(
    ("values", "separator", "why"),
    [
        (
            ["Action|Drama", "Drama", "Action|War"],
            "|",
            "in 67% .* lists, 1.67 values a row, 3 distinct",
        ),
        (["1^2^3", "2^3", "3^1"], "^", "in 100%"),
        (["a;b", "b;c", "c", "a;c"], ";", "in 75%"),
        (["a;b", "b;c", "c"], "", "3 distinct"),
        (["1 2", "2 1", "1 1", "2 2"], " ", "in 100%"),
        (["1,2", "2,1", "1,1", "2,2"], ",", "in 100%"),
        ([b"\xff|\xfe", b"\xff|a"], "|", "in 100%"),
        (["a|b", "c", "d"], "|", "in 34%"),
        (["a|b", "c", "d", "e"], "", "4 distinct"),
        (["New York", "Los Angeles", "Paris"], "", "3 distinct"),
        (["Mozilla (X; Linux)", "Mozilla (X; Mac)", "Opera (X; Mac)"], "", "3 distinct"),
        (["[1,2]", "[2,1]", "[1,1]"], "", "3 distinct"),
        (["|", "||"], "", "2 distinct"),
    ],
)
def test_text_with_a_separator_is_lists(
    tmp_path: Path, values: list[str | bytes], separator: str, why: str
) -> None:
    found = proposal_of(tmp_path, {"x": cycle(values)})

    assert found.schema().split == ({"x": separator} if separator else {})
    assert re.search(why, role_in(found, "x").why)


def test_lists_in_text_are_a_slot_though_each_is_different(tmp_path: Path) -> None:
    histories = [f"{row % 7}^{row % 11}^{row}" for row in range(len(LABELS))]

    found = proposal_of(tmp_path, {"x": pa.array(histories)})

    assert found.schema().split == {"x": "^"}


def test_labels_that_may_be_it_are_no_features_without_one(tmp_path: Path) -> None:
    columns = {"label": cycle([0, 1, 1]), "slot": cycle(["p", "q", "r"])}

    found = proposal_of(tmp_path, columns, needs_label=False)

    assert found.label is None
    assert "the label may be 'click' or 'label'" in found.no_label
    assert found.schema().features == ("slot",)


@pytest.mark.parametrize("name", ["", "click"])
def test_label_that_cannot_be_read_is_said_with_its_reason(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("click,click,a\n" + "0,1,x\n1,0,y\n" * 100)

    with pytest.raises(UsageError, match="2 columns have this name" if name else "no column is a"):
        propose(sample_of([str(path)]), label=name)


@pytest.mark.parametrize(
    ("distinct", "rows_each", "role"), [(100, 10, SLOT), (101, 10, NUMBER), (100, 9, NUMBER)]
)
def test_whole_numbers_like_counts_are_names_if_few_and_each_comes_often(
    distinct: int, rows_each: int, role: type
) -> None:
    counts = pa.array([number**3 for number in range(distinct)] * rows_each)
    names = pa.array(["p", "q"] * (len(counts) // 2) + ["p"] * (len(counts) % 2))
    sample = sample_with("n", counts, slot=names)

    assert isinstance(role_in(propose(sample, needs_label=False), "n"), role)


@pytest.mark.parametrize(
    ("first", "step", "rows", "role"),
    [
        (0, 1, 600, SLOT),
        (1, 1, 600, SLOT),
        (0, 1, 598, NUMBER),
        (2, 1, 600, NUMBER),
        (0, 2, 600, NUMBER),
    ],
)
def test_whole_numbers_from_0_or_1_without_a_gap_are_codes(
    first: int, step: int, rows: int, role: type
) -> None:
    codes = [first + step * number for number in range(200)] + [first] * (rows - 200)
    names = pa.array(["p", "q"] * (rows // 2))

    found = propose(sample_with("n", pa.array(codes), slot=names), needs_label=False)

    assert isinstance(role_in(found, "n"), role), role_in(found, "n").why


def test_columns_are_what_they_are_told_to_be() -> None:
    columns = {
        "feat_1": pa.array([number**3 for number in range(len(LABELS))]),
        "feat_2": cycle(["x", "y"]),
        "price": cycle([1.5, 2.5]),
        "level": cycle([1, 2]),
        "purchase": cycle([0, 1]),
    }
    sample = sample_with("click", LABELS, **columns)

    found = propose(sample, slots=["feat_*", "purchase"], numbers=["pri?e", "level"])

    assert found.schema().features == ("price", "level", "feat_1", "feat_2", "purchase")
    assert "as --slots says" in role_in(found, "feat_1").why
    for slots, numbers, message in (
        (["price"], [], "column 'price' cannot be a slot, it is of type double: numbers from"),
        ([], ["feat_2"], "column 'feat_2' cannot be a number, it is of type string: text, 2"),
        (["feats_*"], [], r"no column matches 'feats_\*'"),
    ):
        with pytest.raises(UsageError, match=message):
            propose(sample, slots=slots, numbers=numbers)


@pytest.mark.parametrize(
    ("values", "role", "reason"),
    [
        (["1", "2", "3", ""], SLOT, "only 3 values"),
        (["0.5", "1e3", "", "nan"], NUMBER, "75"),
        (["007", "012", "123"], SLOT, "digits with leading zeros, 3 distinct values"),
        (["0.50", "007"], NUMBER, "from 0.5 to 7"),
        (["12.0", "7.0", ""], NUMBER, "from 7 to 12"),
        (["1", "2", "3", "4"] * 10 + ["NA"], SLOT, "numbers except 'NA'"),
        (["a, b", 'say "x"'], SLOT, "text"),
    ],
)
def test_types_of_csv_are_told_from_its_text(
    tmp_path: Path, values: list[str], role: type, reason: str
) -> None:
    columns = {"slot": cycle(["p", "q"]), "x": cycle(values)}

    found = role_in(proposal_of(tmp_path, columns, ".csv"), "x")

    assert isinstance(found, role)
    assert reason in found.why or role is NUMBER


@pytest.mark.parametrize(
    "labels", [[0, 1], [0.0, 1.0, 1.0], [False, True], ["0", "1"], [None, 0, 1]]
)
@pytest.mark.parametrize("suffix", [".parquet", ".orc", ".csv"])
def test_label_of_any_type_is_found_and_read(
    tmp_path: Path, labels: list[Any], suffix: str
) -> None:
    if suffix == ".csv" and labels[0] is False:
        labels = [0, 1]  # a writer's true and false are no labels in CSV
    path = tmp_path / f"rows{suffix}"
    column = cycle(labels)
    write(path, pa.table({"x": cycle(["a", "b", "c"]), "Is_Click": column, "flag": cycle([0, 1])}))

    first = write_first_job([str(path)], tmp_path / "out")

    assert first.proposal.label is not None
    assert first.proposal.label.name == "Is_Click"
    assert first.proposal.label.missing_rate == pytest.approx(column.null_count / ROWS)
    rows, bad_rows, clicks = read(path, tmp_path / "out")
    assert (rows, bad_rows) == (ROWS - column.null_count, column.null_count)
    assert clicks == sum(str(value) in {"1", "1.0", "True"} for value in column.to_pylist())


def read(path: Path, out: Path) -> tuple[int, int, float]:
    """Returns good rows, malformed ones, and clicks, read as the first job says."""
    job = load_job(out / "job.toml", [])
    schema = Schema.load(job.data.schema_source)
    dataset = QueueDataset(schema, 64, bad_row_limit=job.data.bad_row_limit)
    dataset.set_filelist([str(path)])
    clicks = 0.0
    for batch in dataset:
        assert batch.labels is not None
        assert np.isfinite(batch.dense).all()
        clicks += float(batch.labels.sum())
    return dataset.rows, dataset.bad_rows, clicks


@pytest.mark.parametrize(
    ("columns", "options", "fault"),
    [
        ({}, {}, r"it may be 'a' or 'b': choose by --label NAME, in Python by label=$"),
        (
            {"Click": [0, 1], "label": [0, 1]},
            {},
            r"the label may be 'Click' or 'label': choose by",
        ),
        ({"click": ["yes", "no"]}, {}, r"'click' has the values 'yes', 'no', expected 0 and 1"),
        ({"click": [0, 1]}, {"label": "clik"}, r"no column 'clik', did you mean 'click'\?"),
        ({"click": [0, 1]}, {"ignore": ["bb"]}, r"no column 'bb', did you mean 'b'\?"),
        ({"click": [0, 1]}, {"label": "a", "ignore": ["a"]}, "cannot be both"),
        ({"click": [0, 1, 2]}, {"label": "click"}, r"values '0', '1', '2', expected 0 and 1"),
        ({"click": [0]}, {}, "is 0 in all 400 rows"),
    ],
)
def test_a_label_that_is_not_clear_is_an_error(
    tmp_path: Path, columns: dict[str, list[Any]], options: dict[str, Any], fault: str
) -> None:
    arrays = {name: cycle(values) for name, values in columns.items()}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": cycle([0, 1]), "b": cycle([1, 0, 0]), **arrays}), path)

    with pytest.raises(UsageError, match=fault):
        write_first_job([str(path)], tmp_path / "out", **options)

    assert not (tmp_path / "out").exists()


def test_number_becomes_the_slot_that_models_need(tmp_path: Path) -> None:
    """The one with the fewest values."""
    more, fewer = (pa.array(RNG.geometric(share, ROWS) * 3) for share in (0.005, 0.02))
    columns = {"x": pa.array(RNG.normal(size=ROWS)), "more": more, "fewer": fewer}

    found = proposal_of(tmp_path, columns)

    assert [slot.name for slot in found.slots] == ["fewer"]
    assert [number.column.name for number in found.numbers] == ["x", "more"]


def test_columns_of_unusual_names_are_taken_or_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    header = '"dense","a.b","say ""x""","",größe,"# no",twice,twice,"tab\there",click\n'
    path.write_text(
        header
        + "".join(
            f"{n % 7},x{n % 3},y{n % 9},,z{n % 5},{n / 7:.3f},1,2,t{n % 3},{n % 2}\n"
            for n in range(ROWS)
        )
    )

    first = write_first_job([str(path)], tmp_path / "out")

    slots = {slot.name for slot in first.proposal.slots}
    assert slots == {"dense", "a.b", 'say "x"', "größe", "tab\there"}
    assert {each.name for each in first.proposal.ignored} == {"", "twice"}
    assert Schema.load(tmp_path / "out/schema.toml") == first.proposal.schema()
    assert read(path, tmp_path / "out")[:2] == (ROWS, 0)


def test_sample_is_spread_over_files_and_their_places(tmp_path: Path) -> None:
    for part in range(3):
        rows = range(part * 120_000, (part + 1) * 120_000)
        table = pa.table({"n": list(rows), "click": [int(row >= 340_000) for row in rows]})
        for suffix in (".parquet", ".csv"):
            write(tmp_path / f"{part}{suffix}", table)

    for suffix in (".parquet", ".csv"):
        sample = sample_of([str(tmp_path / f"{part}{suffix}") for part in range(3)])

        assert not sample.is_complete
        assert 150_000 < sample.num_rows <= 210_000
        assert sample.total_rows == pytest.approx(360_000, rel=0.1)
        if suffix == ".csv":  # each of these Parquet files is one row group
            assert 0 < np.mean(sample.columns["click"].to_numpy(zero_copy_only=False) == b"1") < 0.2


def test_sample_of_many_files_is_of_files_from_all_over_them(tmp_path: Path) -> None:
    files = [f"{tmp_path}/{number:02d}.parquet" for number in range(24)]
    for number, path in enumerate(files):
        pq.write_table(pa.table({"n": [number]}), path)

    sample = sample_of(files)

    expected = [number for number in range(24) if number % 3 != 2]  # 16 of them
    assert sample.columns["n"].to_pylist() == expected
    assert not sample.is_complete
    assert sample.total_rows == 24


def test_files_of_the_test_are_not_trained_on_whatever_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        pq.write_table(pa.table({"click": LABELS, "a": cycle(["x", "y"])}), f"{name}.parquet")
    (tmp_path / "link").symlink_to(tmp_path)

    for number, test in enumerate([f"{tmp_path}/two.parquet", "link/two.parquet"]):
        first = write_first_job(["*.parquet"], tmp_path / f"out-{number}", test=[test])
        assert (first.train, first.test) == (["one.parquet"], [test])


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_large_whole_numbers_are_not_taken_for_one(tmp_path: Path, suffix: str) -> None:
    users = [2**62 + number % 5 for number in range(len(LABELS))]  # one number as float64
    write(tmp_path / f"rows{suffix}", pa.table({"click": LABELS, "user": users}))

    first = write_first_job([str(tmp_path / f"rows{suffix}")], tmp_path / "out")

    assert [(each.name, each.why) for each in first.proposal.slots] == [
        ("user", "whole numbers with only 5 values")
    ]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"a": None}, r"a test file has.*2\.parquet: no column 'a'.*--test"),
        ({"a": cycle([0.5, 1.5])}, r"2\.parquet: column 'a' is of type double"),
        ({"x": cycle(["p", "q"])}, r"2\.parquet: column 'x' is of type string, expected numbers"),
        ({"click": pa.nulls(ROWS, pa.int64())}, r"no row .*2\.parquet:row 1: the label is missing"),
        ({"click": cycle([2, 3])}, r"no row .*2\.parquet:row 1: the label is 2"),
    ],
)
def test_file_of_the_test_that_the_schema_cannot_read_is_refused(
    tmp_path: Path, columns: dict[str, pa.Array | None], fault: str
) -> None:
    table = {"click": LABELS, "a": cycle(["x", "y", "z"]), "x": pa.array(RNG.normal(size=ROWS))}
    pq.write_table(pa.table(table), tmp_path / "1.parquet")
    other = {name: column for name, column in (table | columns).items() if column is not None}
    pq.write_table(pa.table(other), tmp_path / "2.parquet")

    with pytest.raises(UsageError, match=fault):
        write_first_job([f"{tmp_path}/*.parquet"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_file_of_the_test_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("click,a\n" + "0,x\n1,y\n1,x\n0,y\n" * 50)
    (tmp_path / "2.csv").write_text("click,a\n")

    with pytest.raises(UsageError, match=r"test file .*2\.csv has no row"):
        write_first_job([f"{tmp_path}/*.csv"], tmp_path / "out")


def test_rows_without_a_label_do_not_allow_any_number_of_malformed_ones(tmp_path: Path) -> None:
    table = pa.table({"click": cycle([0, 1, None, 1]), "a": cycle(["x", "y", "z"])})
    pq.write_table(table, tmp_path / "rows.parquet")

    write_first_job([f"{tmp_path}/rows.parquet"], tmp_path / "out")

    text = (tmp_path / "out/job.toml").read_text()
    assert tomllib.loads(text)["data"]["bad_row_limit"] == 2 * ROWS // 4 + 100
    assert "25.0% of the rows have no label and are skipped" in text


@pytest.mark.parametrize(("keys", "is_in_memory"), [(2, True), (200, False)])
def test_rows_are_shuffled_in_memory_if_their_bytes_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: int, is_in_memory: bool
) -> None:
    monkeypatch.setattr(first_job, "_MAX_BYTES_IN_MEMORY", ROWS * 100)
    table = pa.table(
        {"click": LABELS, "tags": cycle([list(range(keys)), list(range(3, keys + 3))])}
    )
    pq.write_table(table, tmp_path / "rows.parquet")

    write_first_job([f"{tmp_path}/rows.parquet"], tmp_path / "out")

    data = tomllib.loads((tmp_path / "out/job.toml").read_text())["data"]
    assert data.get("in_memory", False) == is_in_memory


def test_files_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"click": LABELS, "a": cycle(["x", "y"])}), path)
    (tmp_path / "job.toml").write_text("mine")

    with pytest.raises(UsageError, match=r"job\.toml' exists: give --overwrite, or choose"):
        write_first_job([str(path)], tmp_path)

    assert (tmp_path / "job.toml").read_text() == "mine"
    assert not (tmp_path / "schema.toml").exists()


def test_last_day_is_tested_on_however_a_shell_has_ordered_them(tmp_path: Path) -> None:
    days = [str(tmp_path / f"day-{day}.parquet") for day in (1, 10, 2, 9)]
    for path in days:
        pq.write_table(pa.table({"click": LABELS, "a": cycle(["x", "y"])}), path)

    first = write_first_job(days, tmp_path)

    assert [Path(path).stem for path in first.train] == ["day-1", "day-2", "day-9"]
    assert [Path(path).stem for path in first.test] == ["day-10"]


def test_files_without_names_of_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("1\ta\n")

    with pytest.raises(
        UsageError, match=r"rows\.tsv: files of format 'criteo' have no names of columns"
    ):
        write_first_job([str(tmp_path / "rows.tsv")], tmp_path)


@pytest.mark.parametrize("name", ["rows.tsv", "rows.txt", "rows.csv"])
def test_files_in_criteos_layout_are_told_their_schema(name: str, tmp_path: Path) -> None:
    row = ["1", *map(str, range(12)), "", *(f"{number:08x}" for number in range(26))]
    lines = ["\t".join(row), "\t".join(row[:-1]), "\t".join(["0", *row[1:]])]
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))

    with pytest.raises(
        UsageError, match=rf"{name}: the rows have Criteo's layout .* data\.schema = \"criteo\""
    ):
        write_first_job([str(tmp_path / name)], tmp_path / "out")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["", "\n", "click,a\n"])
def test_files_without_rows_are_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.csv").write_text(content)

    with pytest.raises(DataError, match="no rows in 1 file"):
        write_first_job([str(tmp_path / "rows.csv")], tmp_path)


def test_paths_with_the_characters_of_patterns_are_read(tmp_path: Path) -> None:
    path = tmp_path / 'a[1]*"?.parquet'
    pq.write_table(pa.table({"click": LABELS, "a": cycle(["x", "y"])}), path)

    write_first_job([f"{tmp_path}/*.parquet"], tmp_path / "out")

    (pattern,) = tomllib.loads((tmp_path / "out/job.toml").read_text())["data"]["train"]
    assert [str(found) for found in Path("/").glob(pattern[1:])] == [str(path)]


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("ts", [1.6e9, 1.7e9], "since 1970"),
        ("EVENT_TIME", [1.6e12, 1.7e12], "since 1970"),
        ("created_at", [1.6e9, 1.7e9, 1.7e9 + 0.5, 1.65e9, 0], "since 1970"),  # 0 is unknown
        ("hour", [14102100, 14102123], "as digits, such as 14102100"),
        ("dt", [20240101, 20241231], "as digits"),
        ("eventDate", [2024010123, 2024123100], "as digits"),
        ("day", [90101, 91231], "as digits"),  # of 2009
        ("datetime", [20240101235959, 20240101000000], "as digits"),
        ("hour", range(24), ""),
        ("day", range(1, 32), ""),
        ("dt", [20241301, 20240132], ""),  # no month 13, no day 32
        ("campaign", [20240101, 20240102], ""),
        ("candidate", [1.6e9, 1.7e9], ""),
        ("update_count", [1.6e9 + 1, 5], ""),
        ("time_spent", [3.5, 1200, 86399], ""),
    ],
)
def test_numbers_of_times_are_told_and_those_that_come_again_or_measure_are_none(
    name: str, values: Sequence[float], reason: str
) -> None:
    why = why_numbers_are_times(name, np.array(values, np.float64))

    assert (reason in why, bool(why)) == (True, bool(reason))


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("day", ["20240101", "20240102"], "as digits"),
        ("DATE", ["20240101"] * 9 + ["unknown"], "as digits"),
        ("ts", ["1600000000", "1600000001"], "since 1970"),
        ("when", ["2026-01-01 10:00"] * 9 + ["unknown"], "times: make features"),
        (
            "at",
            ["", "2026-01-01T10:00Z", "2026-01-02"] * 2 + ["2026-01-02"] * 9,
            'as slots add "at.hour"',
        ),
        ("day", ["Monday", "Tuesday"], ""),
        ("campaign", ["20240101", "20240102"], ""),
        ("hour", ["00", "23"], ""),
        ("code", ["2026-01-01"] * 7 + ["a", "b", "c"], ""),
    ],
)
def test_text_of_times_is_told_and_that_which_comes_again_is_none(
    name: str, values: list[str], reason: str
) -> None:
    why = why_text_is_time(name, pa.array(values))

    assert (reason in why, bool(why)) == (True, bool(reason))


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=6)
VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (
        pa.string(),
        TEXT | st.sampled_from(["", "NULL", "nan", "inf", "-", "1", "0x1", "1e999", "007"]),
    ),
    (pa.string(), st.sampled_from(["0", "1", ""])),
    (pa.large_string(), TEXT),
    (pa.binary(), st.binary(max_size=4).filter(lambda value: not set(value) & {0, 10, 13})),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)),
    (pa.int8(), st.integers(-3, 3)),
    (pa.float64(), st.floats(width=64)),
    (pa.float32(), st.floats(width=32)),
    (pa.bool_(), st.booleans()),
    (pa.decimal128(20, 3), st.decimals(-(10**6), 10**6, places=3)),
    (pa.date32(), st.dates()),
    (
        pa.timestamp("us"),
        st.datetimes(datetime.datetime(1990, 1, 1), datetime.datetime(2100, 1, 1)),
    ),
    (pa.list_(pa.int64()), st.lists(st.none() | st.integers(-5, 5), max_size=3)),
    (pa.list_(pa.string()), st.lists(st.none() | TEXT, max_size=3)),
    (pa.list_(pa.float64()), st.lists(st.floats(), max_size=2)),
    (pa.struct([("a", pa.int64())]), st.fixed_dictionaries({"a": st.integers(-5, 5)})),
]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    num_rows = draw(st.integers(1, 30))
    # A slot, which models need, so that most examples are read.
    columns: dict[str, pa.Array] = {"word": cycle(["x", "y"])[:num_rows]} if num_rows > 1 else {}
    columns |= {"click": pa.array(draw(lists_of(st.sampled_from([0, 1, None]), num_rows)))}
    for name in draw(st.lists(TEXT, unique=True, max_size=6)):
        kind, values = draw(st.sampled_from(VALUES))
        columns[name] = pa.array(draw(lists_of(st.none() | values, num_rows)), kind)
    return pa.table(columns)


def lists_of(values: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=size, max_size=size)


@settings(
    max_examples=150 if IN_CI else 60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(table=tables(), suffix=st.sampled_from([".parquet", ".csv", ".orc"]))
def test_every_row_is_read_by_what_was_proposed(
    tmp_path_factory: pytest.TempPathFactory, table: pa.Table, suffix: str
) -> None:
    """Whatever the columns hold: an error says why not, or the job reads all rows that have a label.

    But for those with a number beyond float32, which are malformed whatever was proposed.
    """
    folder = tmp_path_factory.mktemp("rows")
    path = folder / f"rows{suffix}"
    try:
        write(path, table)
    except (pa.ArrowException, OSError, KeyError):
        return  # what this format cannot hold
    labels = table["click"].to_pylist()

    try:
        write_first_job([str(path)], folder, label="click")
    except CtrPsError:
        return

    schema = Schema.load(load_job(folder / "job.toml", []).data.schema_source)
    table = flat(table, schema.vectors)
    numbers = [table[each.name].to_pylist() for each in schema.dense]
    good = [
        label
        for label, *row in zip(labels, *numbers, strict=True)
        if label is not None and not any(map(is_beyond_float32, row))
    ]

    rows, bad_rows, clicks = read(path, folder)

    assert (rows, bad_rows) == (len(good), len(labels) - len(good))
    assert clicks == sum(good)


def is_beyond_float32(value: object) -> bool:
    with np.errstate(over="ignore"):
        return isinstance(value, float) and math.isfinite(value) and np.isinf(np.float32(value))
