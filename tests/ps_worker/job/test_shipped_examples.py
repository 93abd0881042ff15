"""Examples that come with the package, written to where their user works."""

import ast
import re
from pathlib import Path

import pytest

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker.job import load_job
from ctr_ps.ps_worker.job.shipped_examples import example_names, write_example

ROOT = Path(__file__).parents[3]


def test_every_example_has_a_name_and_a_sentence() -> None:
    names = example_names()

    stems = {path.stem for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert names.keys() == stems
    assert all(line[0].isupper() or line[0].isdigit() for line in names.values()), names
    assert all(line.endswith(".") for line in names.values()), names


@pytest.mark.parametrize("folder", [".", "work/first"])
@pytest.mark.parametrize("name", example_names())
def test_example_is_whole_where_it_is_written(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    written = write_example(name, Path(folder))

    assert written[0].stem == name
    prefix = "" if folder == "." else f"{folder}/"
    for path in written:
        text = path.read_text()
        assert "examples/" not in text
        named = re.findall(rf"\b{re.escape(prefix)}([\w/]+\.(?:toml|py|sh))\b", text)
        sources = {each for each in named if (ROOT / "examples" / each).exists()}
        assert sources <= {each.relative_to(folder).as_posix() for each in written}
        if path.suffix == ".toml" and "schemas" not in path.parts:
            job = load_job(path)
            Schema.load(job.data.schema_source)
            model_file, colon, _ = job.model.name.rpartition(":")
            assert not colon or Path(model_file) in written
        if path.suffix == ".py":
            imported = {
                node.module
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) and node.module
            }
            beside = {each.stem for each in (ROOT / "examples").glob("*.py")}
            assert imported & beside <= {each.stem for each in written}
        if path.suffix == ".sh":
            assert path.stat().st_mode & 0o111


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("mine")

    with pytest.raises(UsageError, match=r"my_model\.py exist already and are not replaced"):
        write_example("my_model", tmp_path)

    assert (tmp_path / "my_model.py").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["my_model.py"]


def test_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="no example 'deep_fm', did you mean 'deepfm'"):
        write_example("deep_fm", Path())


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match=f"cannot write into {tmp_path}/file"):
        write_example("deepfm", tmp_path / "file")
