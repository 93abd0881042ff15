"""Vectors by value: each value's own row of the checkpoint, in files that other tools read."""

import json
import math
import re
import shutil
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctr_ps.protos.errors import CheckpointError, DataError, UsageError
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.data.distinct_values import DistinctValues
from ctr_ps.ps_worker.predict import checkpoint_cli, value_vectors
from ctr_ps.ps_worker.predict.predictor import Predictor
from ctr_ps.ps_worker.predict.value_vectors import (
    ExportedValues,
    export_values,
    import_vectors,
    nearest,
)
from tests.reference.features import key_of
from tests.support.commands import in_this_process
from tests.support.training import job_of, train_alone

ADS = ["red shoe", "two\nlines", "blue", "", "größe 9", "100%", "blue"]
DATA = {"train": "clicks.parquet", "schema": "schema.toml"}
USERS = [1, 2, 3, 1, 2, None, -4]
TAGS = [["a", "b"], [], None, ["b", None], ["c"], ["d"], ["a"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`clicks.parquet`, and `model`, trained on it."""
    folder = tmp_path_factory.mktemp("values")
    train_on(pa.array(ADS, pa.large_string()), folder)
    return folder


def train_on(ads: pa.Array, folder: Path) -> None:
    """Writes seven rows with these ads, and trains on them."""
    (folder / "schema.toml").write_text(
        'hash_version = 1\nslots = ["user", "ad", "tags"]\ndense = []\n'
    )
    columns = {
        "ad": ads,
        "user": pa.array(USERS, pa.int32()),
        "click": [0, 1, 0, 1, 0, 1, 1],
        "tags": pa.array(TAGS, pa.list_(pa.string())),
    }
    pq.write_table(pa.table(columns), folder / "clicks.parquet")
    settings = [
        f"data.train={folder}/clicks.parquet",
        f"data.schema={folder}/schema.toml",
        f"checkpoint.dir={folder}/model",
        "model.name=deepfm",
        "model.hidden=[4]",
        "model.dim=3",
        "train.batch_size=2",
    ]
    train_alone(job_of(*settings))


def shards_by_key(model: Path, table: str) -> dict[int, tuple[list[float], ...]]:
    """Returns the weights and state in a checkpoint by key, read shard by shard."""
    checkpoint = Checkpoint.open(model)
    return {
        int(key): (rows.weights[i].tolist(), rows.state[i].tolist())
        for _, rows in checkpoint.read_shards(table, range(checkpoint.tables[table].num_shards))
        for i, key in enumerate(rows.keys)
    }


def rows_of(model: Path, table: str = "embedding") -> dict[int, np.ndarray]:
    rows = shards_by_key(model, table)
    return {key: np.array(weights, np.float32) for key, (weights, _) in rows.items()}


def exported(folder: Path, to: Path, **options: Any) -> ExportedValues:
    files = options.pop("files", [str(folder / "clicks.parquet")])
    settings = {"slot": "ad", "kind": "parquet", **options}
    return export_values(Checkpoint.open(folder / "model"), LocalFolder(to), files, **settings)


@pytest.mark.parametrize(
    ("slot", "number", "values"),
    [
        ("ad", 2, list(dict.fromkeys(ADS))),
        ("user", 1, ["1", "2", "3", "", "-4"]),
        ("tags", 3, ["a", "b", "", "c", "d"]),
    ],
)
def test_each_value_has_its_row_once(
    folder: Path, tmp_path: Path, slot: str, number: int, values: list[str]
) -> None:
    report = exported(folder, tmp_path, slot=slot)

    assert [each.table for each in report.tables] == ["embedding", "linear"]
    assert (report.rows, report.distinct, report.collisions) == (len(ADS), len(values), 0)
    for table in ("embedding", "linear"):
        found = pq.read_table(tmp_path / f"{table}.{slot}.parquet")
        rows = rows_of(folder / "model", table)
        assert sorted(found["value"].to_pylist()) == sorted(values)
        for value, key, vector in zip(
            *(found[name].to_pylist() for name in found.column_names), strict=True
        ):
            assert key == key_of(number, value.encode())
            assert np.float32(vector).tobytes() == rows[key].tobytes()
        assert pa.types.is_fixed_size_list(found.schema.field("vector").type)


def test_npy_and_word2vec_have_what_parquet_has(folder: Path, tmp_path: Path) -> None:
    for kind in ("parquet", "npy", "word2vec"):
        report = exported(folder, tmp_path, kind=kind, tables=["embedding"])
        # Parquet holds all values, npy no line break, word2vec no empty word.
        assert (report.tables[0].written, report.tables[0].left_out) == (
            (6, 0) if kind == "parquet" else (5, 1)
        )

    table = pq.read_table(tmp_path / "embedding.ad.parquet")
    vectors = dict(zip(table["value"].to_pylist(), table["vector"].to_pylist(), strict=True))
    matrix = np.load(tmp_path / "embedding.ad.npy")
    lines = (tmp_path / "embedding.ad.values.txt").read_text().splitlines()
    assert matrix.dtype == np.float32
    assert len(lines) == 5
    assert {line: row.tolist() for line, row in zip(lines, matrix, strict=True)} == {
        value: vector for value, vector in vectors.items() if "\n" not in value
    }
    header, *words = (tmp_path / "embedding.ad.word2vec.txt").read_text().split("\n")[:-1]
    assert header == "5 3"
    parsed = {}
    for line in words:
        word, *numbers = line.split()
        parsed[urllib.parse.unquote(word)] = np.array(numbers, np.float32).tolist()
    assert parsed == {value: vector for value, vector in vectors.items() if value}
    assert {line.split()[0] for line in words} >= {
        "red%20shoe",
        "100%25",
        "two%0Alines",
        "größe%209",
    }


def test_values_come_from_any_file_with_the_column(folder: Path, tmp_path: Path) -> None:
    """A catalogue has none of the other columns, and values that the model has not seen."""
    catalogue = tmp_path / "ads.csv"
    catalogue.write_text("price,ad\n1,blue\n2,new\n3,red shoe\n4,blue\n5,newer\n")

    report = exported(folder, tmp_path, files=[str(catalogue)], tables=["embedding"])

    found = pq.read_table(tmp_path / "embedding.ad.parquet")
    keys, rows = [key_of(2, value) for value in (b"blue", b"red shoe")], rows_of(folder / "model")
    assert found["value"].to_pylist() == ["blue", "red shoe"]
    assert found["key"].to_pylist() == keys
    assert found["vector"].to_pylist() == [rows[key].tolist() for key in keys]
    assert (report.distinct, report.tables[0].without_row) == (4, 2)


def test_values_in_criteos_layout_have_the_columns_of_the_schema(
    folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "rows.tsv"
    text.write_text("1\t2\tblue\ta\n0\t7\t100%\tb\n")

    exported(folder, tmp_path, files=[str(text)], tables=["embedding"])

    assert pq.read_table(tmp_path / "embedding.ad.parquet")["value"].to_pylist() == ["blue", "100%"]


def test_two_values_of_one_key_are_said(folder: Path, tmp_path: Path) -> None:
    """mix64 is a bijection, so a second word can be chosen that brings another value to the same key."""
    first = b"bluebluebluebl!!"
    other = same_key(first, b"another!", slot=2)
    assert key_of(2, first) == key_of(2, other)
    path = tmp_path / "a.parquet"
    for values, later in (([first, other, b"blue", other], b"blue"), ([first, b"blue"], other)):
        pq.write_table(pa.table({"ad": pa.array(values, pa.binary())}), path)
        second = tmp_path / "b.parquet"
        pq.write_table(pa.table({"ad": pa.array([later], pa.binary())}), second)
        out = tmp_path / str(len(values))

        report = exported(folder, out, files=[str(path), str(second)])

        assert (report.distinct, report.collisions) == (2, 1)


def same_key(value: bytes, begin: bytes, slot: int) -> bytes:
    """Returns a value of 16 bytes, of which 8 are given, with the key of another one of 16 bytes."""
    mask = 2**64 - 1

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    start = mix(slot * 0x9E3779B97F4A7C15 & mask)
    one, two = (int.from_bytes(value[i : i + 8], "little") for i in (0, 8))
    word = mix(start ^ one) ^ two ^ mix(start ^ int.from_bytes(begin, "little"))
    return begin + word.to_bytes(8, "little")


def test_values_that_differ_have_texts_that_differ(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are escapes, and a backslash of a value is two."""
    ads = [b"\xff", rb"\xff", rb"\\xff", b"\\\xff", "größe".encode(), b"a", b"a"]
    train_on(pa.array(ads, pa.binary()), tmp_path)

    exported(tmp_path, tmp_path / "out", tables=["embedding"])

    found = pq.read_table(tmp_path / "out/embedding.ad.parquet")
    texts = dict(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True))
    assert [texts[key_of(2, ad)] for ad in ads[:6]] == [
        r"\xff",
        r"\\xff",
        r"\\\\xff",
        r"\\\xff",
        "größe",
        "a",
    ]


@pytest.mark.parametrize(
    ("options", "error", "fault"),
    [
        ({"slot": "add"}, UsageError, "--slot: the schema has no slot 'add', did you mean 'ad'"),
        ({"files": ["no.parquet"]}, DataError, "cannot read 'no.parquet'"),
        (
            {"files": ["no.svm"]},
            UsageError,
            "no.svm: cannot read single columns of format 'libsvm'",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(
    folder: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], fault: str
) -> None:
    with pytest.raises(error, match=re.escape(fault)):
        exported(folder, tmp_path / "out", **options)

    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_values_without_any_row_are_an_error(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("ad\nx\ny\n")

    with pytest.raises(
        UsageError, match="slot 'ad' has 2 values in 2 rows, but none is a key of table"
    ):
        exported(folder, tmp_path / "out", files=[str(other)])

    assert not list((tmp_path / "out").iterdir())


def test_table_that_was_named_has_a_row_or_nothing_is_written(tmp_path: Path) -> None:
    """Of tables that were not named, those without a row are left out."""
    (tmp_path / "schema.toml").write_text('hash_version = 1\nslots = ["ad", "tag"]\ndense = []\n')
    pq.write_table(pa.table({"ad": ["x"], "tag": ["y"], "click": [1]}), tmp_path / "clicks.parquet")
    settings = [f"data.{name}={tmp_path}/{file}" for name, file in DATA.items()]
    model = ["model.hidden=[4]", "model.dim=3", "model.slots={tag={dim=5}}"]
    saves = f"checkpoint.dir={tmp_path}/model"
    job = job_of(*settings, *model, saves)
    train_alone(job)

    with pytest.raises(UsageError, match=r"'ad' has 1 value in 1 row, .* of table 'embedding_5'"):
        exported(tmp_path, tmp_path / "out", tables=["embedding", "embedding_5"])

    assert not list((tmp_path / "out").iterdir())
    assert [each.table for each in exported(tmp_path, tmp_path / "out").tables] == ["embedding"]


def test_damaged_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    row = next(iter(rows_of(tmp_path / "model").values())).tobytes()
    [file] = (tmp_path / "model").glob("epoch-1/data-*/table.embedding.*")
    assert row in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(row, row[::-1]))

    with pytest.raises(CheckpointError, match="was altered"):
        exported(tmp_path, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_an_error_leaves_no_half_file_and_replaces_none(folder: Path, tmp_path: Path) -> None:
    files = [str(folder / "clicks.parquet"), str(tmp_path / "missing.parquet")]
    out = tmp_path / "out"
    for kind in ("parquet", "npy", "word2vec"):
        with pytest.raises(DataError, match="missing"):
            exported(folder, out, files=files, kind=kind)
        assert not list(out.iterdir())
    exported(folder, out)
    before = {path: path.read_bytes() for path in out.iterdir()}

    with pytest.raises(UsageError, match=r"embedding\.ad\.parquet exists"):
        exported(folder, out)
    (out / "embedding.ad.parquet").rename(out / "embedding.ad.values.txt")
    with pytest.raises(UsageError, match=r"embedding\.ad\.values\.txt exists"):
        exported(folder, out, kind="npy")
    (out / "embedding.ad.values.txt").rename(out / "embedding.ad.parquet")

    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return in_this_process("ps-ckpt", checkpoint_cli.main, monkeypatch, capsys)


def test_the_command_says_what_it_wrote(folder: Path, tmp_path: Path, run) -> None:
    values = ["--values", folder / "*.parquet", "--slot", "ad", "--table", "embedding"]

    done = run("export", folder / "model", tmp_path, *values, "--format", "npy")

    assert done.out == (
        "rows=7 malformed=0 values=6 collisions=0\n"
        f"{tmp_path}/embedding.ad.npy {tmp_path}/embedding.ad.values.txt "
        "written=5 without_row=0 left_out=1\n"
    ), done.err


FILES = {"parquet": "parquet", "npy": "npy", "word2vec": "word2vec.txt"}


@pytest.mark.parametrize(("kind", "is_by_value"), [("parquet", False), *((k, True) for k in FILES)])
def test_vectors_that_were_exported_come_back_bit_for_bit(
    kind: str, is_by_value: bool, folder: Path, tmp_path: Path
) -> None:
    before = shards_by_key(folder / "model", "embedding")
    exported(folder, tmp_path / "vectors", kind=kind, tables=["embedding"])
    keys = {key_of(2, ad.encode()) for ad in ADS}
    if kind == "npy":
        keys.discard(key_of(2, b"two\nlines"))
    if kind == "word2vec":
        keys.discard(key_of(2, b""))
    doubled = 2 * np.array([before[key][0] for key in sorted(keys)], np.float32)
    np.save(tmp_path / "doubled.npy", doubled)
    np.save(tmp_path / "doubled.keys.npy", np.array(sorted(keys), np.uint64))
    options = {"slot": "ad"} if is_by_value else {}

    checkpoint = Checkpoint.open(folder / "model")
    import_vectors(checkpoint, f"{tmp_path}/two", [f"{tmp_path}/doubled.npy"], table="embedding")
    count = import_vectors(
        Checkpoint.open(tmp_path / "two"),
        f"{tmp_path}/again",
        [f"{tmp_path}/vectors/embedding.ad.{FILES[kind]}"],
        table="embedding",
        **options,
    )

    two, again = (shards_by_key(tmp_path / name, "embedding") for name in ("two", "again"))
    assert count == len(keys) >= 5
    assert {key: again[key][0] for key in keys} == {key: before[key][0] for key in keys}
    assert [two[key][0] for key in sorted(keys)] == doubled.tolist()
    others = before.keys() - keys
    assert {key: again[key] for key in others} == {key: before[key] for key in others}
    start = checkpoint.tables["embedding"].optimizer.params["initial_accumulator"]
    np.testing.assert_allclose([again[key][1] for key in keys], start)
    assert shards_by_key(tmp_path / "again", "linear") == shards_by_key(folder / "model", "linear")


def test_model_begins_with_vectors_from_elsewhere(folder: Path, tmp_path: Path, run) -> None:
    (tmp_path / "words.txt").write_text("2 3\nnew%20ad 1 2 3.5\nblue -1 0 1e-3\n", encoding="utf-8")
    to, rows_of_ads = tmp_path / "begun", ["--table", "embedding", "--slot", "ad"]

    done = run("import", folder / "model", to, tmp_path / "words.txt", *rows_of_ads)
    store = ParameterStore()
    store.load(str(to))

    assert done.out == f"{to} vectors=2\n"
    keys = np.array([key_of(2, b"new ad"), key_of(2, b"blue")], np.uint64)
    rows = store.pull_sparse({"embedding": keys}, missing=Missing.ZEROS).result().rows["embedding"]
    np.testing.assert_array_equal(rows, np.array([[1, 2, 3.5], [-1, 0, 1e-3]], np.float32))
    assert run("verify", to).code == 0


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("2 3\na 1 2 3\n", {}, "it has 1 words, but its header says 2"),
        ("1 3\na 1 2\n", {}, "word 'a' has 2 numbers, expected 3"),
        ("1 3\na 1 2 x\n", {}, "could not convert"),
        ("1 3\na 1 2 nan\n", {}, "has infinite numbers or NaN"),
        ("1 3\na 1 2 1e39\n", {}, "has infinite numbers or NaN"),
        ("2 3\na 1 2 3\na 1 2 3\n", {}, "2 vectors have only 1 different keys"),
        ("1 2\na 1 2\n", {}, "rows of dim 3, but the vectors have 2 numbers"),
        ("", {}, "cannot be read as vectors"),
        ("1 3\na 1 2 3\n", {"slot": ""}, "name the slot of the values with --slot"),
        ("1 3\na 1 2 3\n", {"slot": "adz"}, "did you mean 'ad'"),
        ("1 3\na 1 2 3\n", {"table": "embeding"}, "no table 'embeding', only embedding, linear"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(
    text: str, options: dict[str, str], message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text(text, encoding="utf-8")
    given = {"table": "embedding", "slot": "ad", **options}

    with pytest.raises((DataError, UsageError), match=message):
        import_vectors(
            Checkpoint.open(folder / "model"), f"{tmp_path}/to", [f"{tmp_path}/words.txt"], **given
        )

    assert not (tmp_path / "to").exists()


def cosines_of(folder: Path, table: str, slot: int, value: str, others: list[str]) -> dict:
    rows = rows_of(folder / "model", table)
    vectors = {each: rows[key_of(slot, each.encode())].astype(float) for each in (value, *others)}
    own = vectors.pop(value)
    return {
        each: vector @ own / math.sqrt((vector @ vector) * (own @ own))
        for each, vector in vectors.items()
    }


@pytest.mark.parametrize("block", [1, 2, 100])
def test_nearest_values_are_those_of_the_largest_cosine(
    block: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block of the file, and over several."""
    monkeypatch.setattr(value_vectors, "DistinctValues", in_blocks_of(block))
    others = {each for each in ADS if each != "blue"}
    expected = cosines_of(folder, "embedding", 2, "blue", list(others))
    shown = {each: each.replace("\\", r"\\") for each in others}

    found = nearest(Checkpoint.open(folder / "model"), "ad", "blue", top=4)

    best = sorted(others, key=lambda each: -expected[each])[:4]
    assert [text for text, _ in found] == [shown[each] for each in best]
    assert [cosine for _, cosine in found] == pytest.approx([expected[each] for each in best])


def in_blocks_of(size: int) -> type[DistinctValues]:
    class InBlocks(DistinctValues):
        def __iter__(self):
            for texts, keys in super().__iter__():
                for start in range(0, len(texts), size):
                    yield texts[start : start + size], keys[start : start + size]

    return InBlocks


def test_nearest_values_may_be_of_other_files_and_another_table(
    folder: Path, tmp_path: Path
) -> None:
    """Whole numbers are their digits; a value without a row is near to none."""
    users = pa.array([1, 3, 99], pa.int64())
    pq.write_table(
        pa.table({"user": users, "ad": ["x"] * 3, "tags": ["y"] * 3}), tmp_path / "u.parquet"
    )
    checkpoint = Checkpoint.open(folder / "model")

    found = nearest(checkpoint, "user", "2", table="linear", files=[f"{tmp_path}/*.parquet"])

    expected = cosines_of(folder, "linear", 1, "2", ["1", "3"])
    assert dict(found) == pytest.approx(expected)  # of one number: its sign
    assert {abs(each) for _, each in found} == {1.0}


def test_predictor_chooses_among_values_that_it_is_given(folder: Path) -> None:
    values = np.array(["red shoe", "blue", "unknown", "100%", "red shoe"])
    expected = cosines_of(folder, "embedding", 2, "blue", ["red shoe", "100%"])

    found = Predictor.load(folder / "model").nearest("ad", "blue", values=values, top=9)

    assert dict(found) == pytest.approx(expected)
    assert len(found) == 2
    with pytest.raises(UsageError, match="no other value has a row in 'embedding': give values"):
        Predictor.load(folder / "model").nearest("ad", "blue", values=["blue"])


def test_predictor_finds_neighbours_in_what_it_loaded(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    predictor = Predictor.load(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")

    found = predictor.nearest("ad", "blue", values=["red shoe", "100%"])

    expected = cosines_of(folder, "embedding", 2, "blue", ["red shoe", "100%"])
    assert dict(found) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("ad", "blue", {"top": -2}), UsageError, "top is -2, expected a whole number"),
        (("ad", "blue", {"top": 1.5}), UsageError, "top is 1.5, expected a whole number"),
        (("ad", "blue", {"values": "abc"}), UsageError, "values is 'abc', expected a list"),
        (("ad", "blue", {"values": None}), UsageError, "values is None, expected a list"),
        (("ad", "blue", {"values": ["red", 7]}), UsageError, "value 7 is no text: give"),
        (("ad", "blue", {"values": [["red"]]}), UsageError, "value ['red'] is no text: give"),
        (("ad", None), UsageError, "value None is no text"),
        (("ad", "\ud800"), UsageError, "has no row in table 'embedding'"),
        (("ad", "green"), UsageError, "'green' of slot 'ad' has no row in table 'embedding'"),
        (("add", "blue"), UsageError, "the schema has no slot 'add', did you mean 'ad'"),
        (("ad", "blue", {"table": "wide"}), CheckpointError, "has no table 'wide'"),
        (("ad", "blue", {"files": ["nowhere/*"]}), DataError, "no file matches"),
    ],
)
def test_what_has_no_neighbours_is_named(
    arguments: tuple, error: type[Exception], message: str, folder: Path
) -> None:
    slot, value, *options = arguments

    with pytest.raises(error, match=re.escape(message)):
        nearest(Checkpoint.open(folder / "model"), slot, value, **dict(*options))


def test_command_prints_the_nearest_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = in_this_process("ps-ckpt", checkpoint_cli.main, monkeypatch, capsys)
    options = ["nearest", folder / "model", "--slot", "ad", "--value", "blue", "--top", "2"]

    printed, as_json = run(*options), run(*options, "--json")

    expected = nearest(Checkpoint.open(folder / "model"), "ad", "blue", top=2)
    assert [(each["value"], each["cosine"]) for each in json.loads(as_json.out)] == expected
    for _, cosine in expected:
        assert f"{cosine:.4f}" in printed.out
