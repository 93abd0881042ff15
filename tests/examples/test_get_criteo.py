"""examples/get_criteo.sh, with small local archives in place of the real one."""

import hashlib
import socket
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.support.commands import COMMANDS, ROOT, clean_environment

TRAIN = [f"1\t{number}" + "\t" * 38 for number in range(300)]
TEST = [f"0\t{number}" + "\t" * 38 for number in range(30)]


def archive_of(path: Path, **files: list[str]) -> Path:
    """Writes an archive; "__" in a name stands for "/"."""
    folder = path.with_name("content")
    for name, lines in files.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines))
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=".")
    return path


@pytest.fixture
def tutorial(tmp_path: Path) -> Path:
    """An archive with the layout of Paddle's tutorials."""
    parts = {"raw_data__part-0": TRAIN[:200], "raw_data__part-1": TRAIN[200:]}
    return archive_of(tmp_path / "ctr_data.tar.gz", **parts, **{"test_data__part-220": TEST})


def get(folder: Path, url: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    url = url.as_uri() if isinstance(url, Path) else url
    environment = clean_environment()
    path = f"{COMMANDS}:{environment['PATH']}"
    return subprocess.run(
        ["bash", ROOT / "examples" / "get_criteo.sh", folder],
        capture_output=True,
        text=True,
        timeout=60.0,
        env={**environment, "PATH": path, "CRITEO_URL": url, **variables},
        check=False,
    )


def rows_in(folder: Path) -> list[str]:
    return [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def test_archive_of_the_tutorials_is_unpacked(tmp_path: Path, tutorial: Path) -> None:
    result = get(tmp_path / "criteo", tutorial)

    assert result.returncode == 0, result.stderr
    assert rows_in(tmp_path / "criteo" / "train") == TRAIN
    assert rows_in(tmp_path / "criteo" / "test") == TEST
    names = {path.name for path in (tmp_path / "criteo").iterdir()}
    assert names == {"train", "test", "ctr_data.tar.gz"}


def test_archive_of_criteo_is_split(tmp_path: Path) -> None:
    unlabelled = [line[2:] for line in TEST]
    archive = archive_of(tmp_path / "dac.tar.gz", **{"train.txt": TRAIN, "test.txt": unlabelled})

    result = get(tmp_path / "criteo", archive)

    assert result.returncode == 0, result.stderr
    train, test = (rows_in(tmp_path / "criteo" / name) for name in ("train", "test"))
    assert sorted(train + test) == sorted(TRAIN)
    assert 10 < len(test) < 60


def test_interrupted_download_is_resumed(tmp_path: Path, tutorial: Path) -> None:
    folder = tmp_path / "criteo"
    folder.mkdir()
    (folder / "ctr_data.tar.gz.partial").write_bytes(tutorial.read_bytes()[:100])

    result = get(folder, tutorial)

    assert result.returncode == 0, result.stderr
    assert (folder / "ctr_data.tar.gz").read_bytes() == tutorial.read_bytes()
    assert "Resuming transfer from byte position 100" in result.stderr
    assert rows_in(folder / "train") == TRAIN


def test_second_call_has_nothing_to_do(tmp_path: Path, tutorial: Path) -> None:
    get(tmp_path / "criteo", tutorial)

    result = get(tmp_path / "criteo", "http://127.0.0.1:1/never-asked.tar.gz")

    assert result.returncode == 0
    assert "are there already" in result.stdout


def test_partial_data_is_not_overwritten(tmp_path: Path, tutorial: Path) -> None:
    (tmp_path / "criteo" / "train").mkdir(parents=True)

    result = get(tmp_path / "criteo", tutorial)

    assert result.returncode == 1
    assert "move it away" in result.stderr


@pytest.mark.parametrize("damage", ["cut", "flipped", "page"])
def test_broken_archive_is_named_and_leaves_no_rows(
    tmp_path: Path, tutorial: Path, damage: str
) -> None:
    content = bytearray(tutorial.read_bytes())
    middle = len(content) // 2
    if damage == "flipped":
        content[middle] ^= 255
    broken = {"cut": content[:middle], "flipped": content, "page": b"<html>gone</html>"}
    tutorial.write_bytes(broken[damage])

    result = get(tmp_path / "criteo", tutorial)

    assert result.returncode == 1
    assert "criteo/ctr_data.tar.gz is not a sound archive: remove it" in result.stderr
    assert [path.name for path in (tmp_path / "criteo").iterdir()] == ["ctr_data.tar.gz"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"readme": ["x"]}, "has neither train.txt nor raw_data/ and test_data/"),
        ({"raw_data__part-0": TRAIN}, "has neither train.txt"),
        ({"raw_data__part-0": ["1\t2"], "test_data__part-0": TEST}, "do not have 40 columns"),
        ({"raw_data__rows": TRAIN, "test_data__part-0": TEST}, "no part-* in raw_data"),
    ],
    ids=["another", "half", "columns", "names"],
)
def test_archive_of_another_layout_is_refused(
    tmp_path: Path, files: dict[str, list[str]], message: str
) -> None:
    result = get(tmp_path / "criteo", archive_of(tmp_path / "other.tar.gz", **files))

    assert result.returncode == 1
    assert message in result.stderr
    assert not (tmp_path / "criteo" / "train").exists()


def test_given_checksum_is_checked(tmp_path: Path, tutorial: Path) -> None:
    digest = hashlib.sha256(tutorial.read_bytes()).hexdigest()

    wrong = get(tmp_path / "wrong", tutorial, CRITEO_SHA256="0" * 64)
    right = get(tmp_path / "right", tutorial, CRITEO_SHA256=digest)

    assert wrong.returncode == 1
    assert "has another SHA-256" in wrong.stderr
    assert not (tmp_path / "wrong" / "train").exists()
    assert right.returncode == 0


def test_failed_download_names_other_sources(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/ctr_data.tar.gz"

        result = get(tmp_path / "criteo", url)

    assert result.returncode == 1
    assert "https://www.kaggle.com/c/criteo-display-ad-challenge" in result.stderr
    assert "CRITEO_URL=file:///path/of/dac.tar.gz" in result.stderr
    assert "ps-data generate" in result.stderr
