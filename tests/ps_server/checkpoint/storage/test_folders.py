"""Storage: one behaviour for all kinds of folders, and errors that name URL and operation."""

import itertools
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint.publish import keep_last, remove_unfinished, resolve, write_latest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, LocalFolder, folder_at
from ctr_ps.ps_server.checkpoint.storage.remote import RenamingFolder
from tests.support.checkpoints import content, fake_counting_model
from tests.support.s3 import BUCKET, register_renaming

MODEL, OTHER = fake_counting_model(1), fake_counting_model(2)


@pytest.fixture(params=["local", "memory", "s3", "renaming"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a folder that does not exist."""
    if request.param == "local":
        yield str(tmp_path / "root")
        return
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield f"s3://{BUCKET}/{uuid.uuid4()}/root"
        return
    register_renaming()
    url = f"{request.param}://{uuid.uuid4()}/root"
    yield url
    with suppress(FileNotFoundError):
        fsspec.filesystem(request.param).rm(url.rpartition("/")[0], recursive=True)


@pytest.fixture
def folder(root: str) -> Folder:
    made = folder_at(root)
    made.make()
    return made


def test_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert folder_at("~/model").url == folder_at(Path("~/model")).url == f"{tmp_path}/model"


def test_file_is_created_once(folder: Folder) -> None:
    assert folder.create_new("OWNER", b"one")
    assert not folder.create_new("OWNER", b"two")

    assert folder.read("OWNER") == b"one"


def test_url_leads_to_the_same_folder(folder: Folder) -> None:
    folder.child("child").make()
    folder.child("child").put("file", b"content")

    found = folder_at(folder_at(folder.url).child("child").url)

    assert (found.name, found.url) == ("child", f"{folder.url}/child")
    assert found.read("file") == b"content"


def test_folder_tells_its_files_and_folders(folder: Folder) -> None:
    folder.put("file", b"12345")
    folder.put("empty", b"")
    folder.child("a").child("b").make()
    folder.child("a").child("b").put("deep", b"")

    assert dict(folder.files()) == {"file": 5, "empty": 0}
    assert list(folder.folders()) == ["a"]
    assert [folder.has(name) for name in ("file", "empty", "a", "missing")] == [1, 1, 0, 0]


def test_folder_that_is_not_there_has_nothing(folder: Folder) -> None:
    missing = folder.child("missing")

    assert not missing.files()
    assert not missing.folders()
    assert not missing.has("file")
    missing.remove()
    missing.remove_file("file")
    missing.remove_if_empty()


def test_put_replaces_what_was_there(folder: Folder) -> None:
    folder.put("file", b"long content")
    folder.put("file", b"short")

    assert folder.read("file") == b"short"
    assert dict(folder.files()) == {"file": 5}


def test_created_file_is_read_as_it_was_written(folder: Folder) -> None:
    with folder.create("file") as sink:
        sink.write(b"first ")
        sink.write(pa.py_buffer(b"second"))

    with folder.open("file") as source:
        assert source.size() == 12
        source.seek(6)
        assert source.read(3) == b"sec"
        assert source.read() == b"ond"
    assert folder.read("file") == b"first second"


def test_what_is_removed_is_gone_and_nothing_else(folder: Folder) -> None:
    for name in ("a", "ab"):
        folder.child(name).make()
        folder.child(name).put("file", b"")
    folder.put("file", b"")

    folder.child("a").remove()
    folder.remove_file("file")
    folder.child("ab").remove_if_empty()

    assert not folder.files()
    assert list(folder.folders()) == ["ab"]


def test_missing_file_is_named_with_what_was_tried(folder: Folder) -> None:
    with pytest.raises(
        CheckpointError, match=rf"^cannot read {folder.url}/gone: .*[Nn]o such file"
    ):
        folder.read("gone")
    with (
        pytest.raises(CheckpointError, match=rf"^cannot read {folder.url}/gone: .*[Nn]o such file"),
        folder.open("gone"),
    ):
        pass


def test_error_of_the_writer_is_passed_on(folder: Folder) -> None:
    def write() -> None:
        with folder.create("file") as sink:
            sink.write(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()


def test_threads_share_a_folder(folder: Folder) -> None:
    def write(number: int) -> bytes:
        with folder.create(f"file-{number}") as sink:
            sink.write(b"%d" % number)
        return folder.read(f"file-{number}")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write, range(12))) == [b"%d" % number for number in range(12)]


def test_checkpoint_comes_back(root: str) -> None:
    digest = MODEL.save(f"{root}/saved", num_servers=2)

    checkpoint = Checkpoint.open(f"{root}/saved")

    checkpoint.verify()
    assert checkpoint.model_digest == digest
    in_memory = f"memory://{uuid.uuid4()}/saved"
    MODEL.save(in_memory, num_servers=2)
    assert sorted(content(checkpoint)) == sorted(content(Checkpoint.open(in_memory)))


def test_checkpoint_is_replaced_and_nothing_of_the_old_one_left(root: str) -> None:
    MODEL.save(f"{root}/saved")

    digest = OTHER.save(f"{root}/saved")

    checkpoint = Checkpoint.open(f"{root}/saved")
    checkpoint.verify()
    assert checkpoint.model_digest == digest
    assert [checkpoint.manifest.data_folder] == list(folder_at(f"{root}/saved").folders())
    assert list(folder_at(f"{root}/saved").files()) == ["MANIFEST.json"]


def test_latest_is_found_and_old_ones_go(root: str) -> None:
    for number in (1, 2, 3):
        MODEL.save(f"{root}/epoch-{number}", clock=lambda number=number: 1e9 + number)
        write_latest(root, f"epoch-{number}")

    removed = keep_last(root, 1, ["epoch-1", "epoch-2", "epoch-3"])

    assert removed == ["epoch-1", "epoch-2"]
    assert list(folder_at(root).folders()) == ["epoch-3"]
    assert resolve(root).url == folder_at(f"{root}/epoch-3").url
    Checkpoint.open(root).verify()


def test_part_of_a_file_is_refused(root: str) -> None:
    MODEL.save(f"{root}/saved")
    data = folder_at(f"{root}/saved")
    data = data.child(data.folders()[0])
    name = "table.exact.server-0.arrow"
    whole = data.read(name)

    data.put(name, whole[:-8])
    with pytest.raises(CheckpointError, match=rf"{name} has {len(whole) - 8} bytes"):
        Checkpoint.open(f"{root}/saved")
    data.put(name, b"\0" * len(whole))
    with pytest.raises(CheckpointError, match=name):
        Checkpoint.open(f"{root}/saved").verify()


def test_path_becomes_absolute_and_loses_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")

    for url in ("link/saved", Path("link/saved"), f"file://{tmp_path}/link/../link/saved"):
        assert folder_at(url) == LocalFolder(tmp_path / "disk" / "saved")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (Path("s3://bucket/saved"), "'s3:/bucket/saved' is neither a path nor a URL"),
        ("hdfs:/saved", "'hdfs:/saved' is neither a path nor a URL"),
        ("memory://a/../b", "patterns and chained file systems are not allowed"),
        ("memory://a/*/b", "patterns and chained file systems are not allowed"),
        ("memory://a/x[0]", "patterns"),
        ("simplecache::memory://a", "is neither a path nor a URL"),
        ("memory://a::s3://b", "chained"),
        ("nowhere://a", "cannot reach nowhere://a: ValueError: Protocol not known"),
        ("a\0b", "cannot be the path of a checkpoint"),
    ],
)
def test_what_cannot_be_a_folder_is_refused(url: str | Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        folder_at(url)


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")

    with pytest.raises(CheckpointError, match="circle"):
        MODEL.save(tmp_path / "circle" / "saved")


def test_bucket_that_is_not_there_is_said_and_not_made(s3: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write s3://other/x/.*: no such .* bucket"):
        MODEL.save("s3://other/x")
    with pytest.raises(CheckpointError, match=r"no checkpoint s3://other/x"):
        Checkpoint.open("s3://other/x")

    assert not fsspec.filesystem("s3").exists("other")


def test_storage_that_does_not_answer_is_not_taken_to_be_empty(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    MODEL.save(f"s3://{BUCKET}/unreachable")

    async def fail(*_: object, **__: object) -> Any:
        raise ConnectionError("connection lost")

    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_call_s3", fail)
    for action in (Checkpoint.open, MODEL.save):
        with pytest.raises(
            CheckpointError, match=rf"^cannot read s3://{BUCKET}/unreachable/.*: connection lost"
        ):
            action(f"s3://{BUCKET}/unreachable")


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("has_old", [False, True])
def test_killed_at_any_step_of_a_put_by_renaming_old_or_new_is_read(
    monkeypatch: pytest.MonkeyPatch, has_old: bool
) -> None:
    register_renaming()
    file_system = fsspec.get_filesystem_class("renaming")
    steps = 0

    def counted(name: str) -> None:
        function = getattr(file_system, name)

        def call(*args: object, **kwargs: object) -> object:
            nonlocal steps
            steps += 1
            if steps > limit:
                raise Killed
            return function(*args, **kwargs)

        monkeypatch.setattr(file_system, name, call)

    for name in ("rm_file", "rename", "pipe_file"):
        counted(name)
    found = []
    for first, second in itertools.product(range(8), repeat=2):
        limit, steps = 99, 0
        folder = folder_at(f"renaming://{uuid.uuid4()}")
        assert isinstance(folder, RenamingFolder)
        if has_old:
            folder.put("file", b"old")

        for text, last_step in ((b"new", first), (b"newer", second)):
            limit, steps = last_step, 0
            with suppress(Killed):
                folder.put("file", text)

        limit, steps = 99, 0
        found.append(folder.read("file") if folder.has("file") else b"")
        folder.put("file", b"next")
        assert folder.read("file") == b"next"
        assert "file.next" not in folder.files()

    order = [b"old" if has_old else b"", b"new", b"newer"]
    assert set(found) == set(order)
    assert found[-1] == b"newer"
    for number in range(0, len(found), 8):  # once replaced, the old content never comes back
        assert sorted(found[number : number + 8], key=order.index) == found[number : number + 8]
        assert order.index(found[number]) >= order.index(found[max(0, number - 8)])


def test_manifest_whose_rename_was_cut_short_is_one_and_what_it_names_stays() -> None:
    register_renaming()
    root = f"renaming://{uuid.uuid4()}/root"
    MODEL.save(f"{root}/epoch-1")
    path = f"{root}/epoch-1/MANIFEST.json"
    fsspec.filesystem("renaming").mv(path, f"{path}.next")

    assert remove_unfinished(root) == []
    Checkpoint.open(f"{root}/epoch-1").verify()
    fsspec.filesystem("renaming").rm(root.rpartition("/")[0], recursive=True)
