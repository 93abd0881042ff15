"""PaddleRec's slot text: words of name:value, of which a name may come several times."""

from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import joined
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.formats import guessed_format
from ctr_ps.ps_worker.data.text.slot_text import SlotTextReader
from tests.reference.features import key_of

SCHEMA = Schema.from_dict(
    {
        "hash_version": 1,
        "label": "click",
        "slots": ["1", "2", "words"],
        "dense": [{"name": "dense_feature", "width": 2}, {"name": "price"}],
    }
)
GOOD = "click:1 dense_feature:0.05 dense_feature:-2e-1 price:3 1:715353 2:817085 words:9 words:12"


def read(tmp_path: Path, text: str, schema: Schema = SCHEMA) -> tuple[Batch, BadRows]:
    path = tmp_path / "part-0"
    path.write_text(text)
    bad_rows = BadRows(100)
    blocks = list(SlotTextReader(schema, bad_rows).blocks(FileSplit(str(path))))
    return joined([block.rows for block in blocks]), bad_rows


def test_rows_have_the_numbers_in_order_and_the_keys_of_the_values_text(tmp_path: Path) -> None:
    text = (
        f"{GOOD}\n"
        " 2:a:b:c\t1:  unknown:7 click:0 words:7 dense_feature:nan dense_feature:4 \r\n"
        "click:0\n"
    )

    rows, bad_rows = read(tmp_path, text)

    assert bad_rows.total == 0
    assert rows.labels is not None
    assert rows.labels.tolist() == [1, 0, 0]
    # A missing number is 0, as the schema says by default.
    expected = np.float32([[0.05, -0.2, 3], [0, 4, 0], [0, 0, 0]])
    assert rows.dense.tolist() == expected.tolist()
    values = [["715353"], ["817085"], ["9", "12"], [""], ["a:b:c"], ["7"], [""], [""], [""]]
    assert np.diff(rows.offsets).tolist() == [len(each) for each in values]
    keys = [key_of(at % 3 + 1, text.encode()) for at, each in enumerate(values) for text in each]
    assert rows.keys.tolist() == keys


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (GOOD.replace("click:1 ", ""), "the label is missing, expected 0 or 1"),
        (GOOD.replace("click:1", "click:2"), "the label is '2', expected 0 or 1"),
        (f"{GOOD} click:1", "'click' has 2 values, expected 1"),
        (f"{GOOD} price:4", "'price' has 2 values, expected 1"),
        (f"{GOOD} dense_feature:1", "'dense_feature' has 3 values, expected 2"),
        (
            GOOD.replace(":-2e-1", ":x"),
            "column 'dense_feature[1]' is 'x', expected a finite number",
        ),
        (GOOD.replace("price:3", "price:"), "column 'price' is '', expected a finite number"),
        (GOOD.replace("dense_feature:-2e-1 ", ""), "'dense_feature' has 1 value, expected 2"),
        (f"{GOOD} word", "'word' does not have the form name:value"),
        ("  ", "an empty line"),
    ],
)
def test_a_malformed_line_is_counted_and_its_word_named(
    tmp_path: Path, line: str, fault: str
) -> None:
    rows, bad_rows = read(tmp_path, f"{GOOD}\n{line}\n{GOOD}\n")

    assert bad_rows.total == 1
    assert bad_rows.first == f"{tmp_path / 'part-0'}:2: {fault}"
    assert rows.size == 2
    assert rows.keys[:4].tolist() == rows.keys[4:].tolist()


def test_weight_id_and_other_labels_are_words_too(tmp_path: Path) -> None:
    entries = {"labels": ["click", "buy"], "weight": "w", "id": "request"}
    schema = Schema.from_dict({"hash_version": 1, "slots": ["1"], "dense": [], **entries})

    rows, bad_rows = read(tmp_path, "w:2.5 1:a buy:1 click:0\n1:a w:1 click:1\n", schema)

    assert bad_rows.first.endswith(":2: the label 'buy' is missing, expected 0 or 1")
    assert rows.row_columns().keys() == {"labels", "other_labels", "weights"}
    assert [
        rows.row_columns()[name].tolist() for name in ("labels", "other_labels", "weights")
    ] == [
        [0],
        [[1]],
        [2.5],
    ]


def test_a_label_that_the_first_lines_lack_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'click', the label of the schema"):
        read(tmp_path, "clik:1 1:2\n")


def test_a_name_that_the_first_lines_lack_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(tmp_path, "click:1 dense_feat:1 1:3 2:4 words:5 price:6\n")

    assert "has 'dense_feature': read as missing, did you mean 'dense_feat'?" in caplog.text
    assert caplog.text.count("read as missing") == 1


@pytest.mark.parametrize(
    ("line", "format"),
    [
        (GOOD, "paddlerec"),
        ("click:0 1:715353", "paddlerec"),
        ("1 3:0.5 17:1", None),
        ("0\t12:30\t4:5", None),
        ("click:0", None),
        ('{"a": 1, "b": 2}', None),
    ],
)
def test_the_format_is_told_by_the_first_line(
    tmp_path: Path, line: str, format: str | None
) -> None:
    path = tmp_path / "part-0"
    path.write_text(f"{line}\n")

    assert guessed_format(str(path)) == format
