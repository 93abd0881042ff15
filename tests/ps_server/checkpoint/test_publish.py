"""Publishing: the old checkpoint or the new one is to be found, whatever happens when."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from protos.errors import CheckpointError
from ps_server.checkpoint.publish import (
    local_path,
    resolve,
    write_latest,
)
from ps_server.checkpoint.reader import Checkpoint
from tests.support.checkpoints import fake_model

OLD, NEW, NEXT = fake_model(1), fake_model(2), fake_model(3)


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def steps_counted(fails: Callable[[int], BaseException | None]) -> Iterator[list[str]]:
    """Counts the calls that change the file system, from 1; raises what `fails` gives for them."""
    steps: list[str] = []

    def watched(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            steps.append(name)
            error = fails(len(steps))
            if error is not None:
                raise error
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield steps


def killed_at(step: int) -> Callable[[int], BaseException | None]:
    """A killed process does nothing any more: no step after that one works either."""
    return lambda number: Killed() if number >= step else None


def disk_full_at(step: int) -> Callable[[int], BaseException | None]:
    return lambda number: OSError(28, "No space left on device") if number == step else None


def num_steps(action: Callable[[Path], object], folder: Path) -> int:
    with steps_counted(lambda _: None) as steps:
        action(folder)
    return len(steps)


def whole_at(target: Path) -> str:
    checkpoint = Checkpoint.open(target)
    checkpoint.verify()
    return checkpoint.model_digest


def test_killed_at_any_step_of_a_save_the_old_or_the_new_one_is_found(tmp_path: Path) -> None:
    old = OLD.save(tmp_path / "whole")
    total = num_steps(NEW.save, tmp_path / "whole")
    new = whole_at(tmp_path / "whole")
    found = []
    for step in range(1, total + 1):
        target = tmp_path / str(step) / "saved"
        OLD.save(target)

        with steps_counted(killed_at(step)), suppress(Killed):
            NEW.save(target)

        found.append(whole_at(target))
        assert NEXT.save(target) == whole_at(target)
        assert not target.with_name(".saved.previous").exists()
    switch = found.index(new)
    assert [old] * switch + [new] * (total - switch) == found


def test_half_removed_checkpoint_is_never_found(tmp_path: Path) -> None:
    """Killed while it removes the previous one, of which the new one's removal leaves the name."""
    OLD.save(tmp_path / "whole")
    total = num_steps(NEW.save, tmp_path / "whole")
    for step in range(1, total + 1):
        target = tmp_path / str(step) / "saved"
        OLD.save(target)
        with steps_counted(killed_at(step)), suppress(Killed):
            NEW.save(target)
        shutil.rmtree(target, ignore_errors=True)

        try:
            folder = resolve(target)
        except CheckpointError:
            continue
        whole_at(folder)


def test_everything_is_on_disk_before_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "saved"
    OLD.save(target)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def note_rename(source: Path, destination: Path) -> None:
        events.append(f"{source.name} -> {destination.name}")
        rename(source, destination)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    NEW.save(target)

    *before, to_previous, published, last = events
    staging = published.removesuffix(" -> saved")
    written = list(target.rglob("*"))
    expected = {str(tmp_path / staging / path.relative_to(target)) for path in written}
    assert expected | {str(tmp_path / staging)} <= set(before)
    assert str(tmp_path / staging) == before[-1]
    assert [to_previous, last] == ["saved -> .saved.previous", str(tmp_path)]


def test_killed_at_any_step_of_the_first_save_nothing_or_a_whole_one_is_found(
    tmp_path: Path,
) -> None:
    total = num_steps(NEW.save, tmp_path / "whole")
    new = whole_at(tmp_path / "whole")
    found = []
    for step in range(1, total + 1):
        target = tmp_path / str(step) / "saved"
        target.parent.mkdir()

        with steps_counted(killed_at(step)), suppress(Killed):
            NEW.save(target)

        found.append(whole_at(target) if target.exists() else None)
        assert NEXT.save(target) == whole_at(target)
    assert {None, new} == set(found)


def test_error_at_any_step_leaves_the_old_or_the_new_one_and_no_staging(tmp_path: Path) -> None:
    old = OLD.save(tmp_path / "whole")
    total = num_steps(NEW.save, tmp_path / "whole")
    new = whole_at(tmp_path / "whole")
    refused = 0
    for step in range(1, total + 1):
        target = tmp_path / str(step) / "saved"
        OLD.save(target)

        try:
            with steps_counted(disk_full_at(step)):
                NEW.save(target)
        except CheckpointError:
            refused += 1
            expected = {old, new}
        else:
            expected = {new}

        assert whole_at(target) in expected
        assert not list(target.parent.glob(".saved.staging-*"))
    assert refused > total / 3


def test_error_in_the_swap_puts_the_old_one_back(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    old = OLD.save(target)
    renames = 0

    def second_rename_fails(_: int) -> BaseException | None:
        nonlocal renames
        renames += steps[-1] == "rename"
        return OSError(5, "Input/output error") if steps[-1] == "rename" and renames == 2 else None

    with (
        pytest.raises(CheckpointError, match=r"cannot publish checkpoint .*saved: .*Input/output"),
        steps_counted(second_rename_fails) as steps,
    ):
        NEW.save(target)

    assert [target] == list(tmp_path.iterdir())
    assert old == whole_at(target)


def test_save_makes_the_folders_above_and_leaves_nothing_else(tmp_path: Path) -> None:
    NEW.save(tmp_path / "a" / "b")

    assert [tmp_path / "a" / "b"] == list((tmp_path / "a").iterdir())
    assert not (tmp_path / "a" / "b" / "TOKEN").exists()


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()

    assert NEW.save(tmp_path / "saved") == whole_at(tmp_path / "saved")


def test_link_to_a_checkpoint_stays_a_link(tmp_path: Path) -> None:
    OLD.save(tmp_path / "disk" / "saved")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "saved")

    new = NEW.save(tmp_path / "link")

    assert (tmp_path / "link").is_symlink()
    assert new == whole_at(tmp_path / "disk" / "saved")


@pytest.mark.parametrize("kind", ["file", "folder-with-things"])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "thesis"
    path = target if kind == "file" else target / "chapter-1"
    path.parent.mkdir(exist_ok=True)
    path.write_text("irreplaceable")

    with pytest.raises(CheckpointError, match="thesis is there, and is not a checkpoint"):
        NEW.save(target)

    assert path.read_text() == "irreplaceable"
    assert [target] == list(tmp_path.iterdir())


def test_staging_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint next to .*file/saved"):
        NEW.save(tmp_path / "file" / "saved")


@pytest.mark.parametrize("url", ["s3://bucket/saved", "hdfs://host/x", "file:///tmp/x"])
@pytest.mark.parametrize("kind", [str, Path])
def test_url_is_refused(url: str, kind: type[str] | type[Path]) -> None:
    with pytest.raises(CheckpointError, match=r"is a URL.*give a path"):
        local_path(kind(url))


def test_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert tmp_path / "saved" == local_path("saved")


def test_latest_is_the_one_last_named(tmp_path: Path) -> None:
    old, new = OLD.save(tmp_path / "epoch-1"), NEW.save(tmp_path / "epoch-2")

    write_latest(tmp_path, "epoch-1")
    first = whole_at(tmp_path)
    write_latest(str(tmp_path), "epoch-2")
    second = whole_at(tmp_path)

    assert [old, new] == [first, second]
    assert (tmp_path / "LATEST").read_text() == "epoch-2\n"
    assert resolve(tmp_path) == resolve(tmp_path / "epoch-2") == tmp_path / "epoch-2"


def test_killed_at_any_step_of_naming_the_latest_one_of_the_two_is_found(tmp_path: Path) -> None:
    OLD.save(tmp_path / "epoch-1")
    NEW.save(tmp_path / "epoch-2")
    with steps_counted(lambda _: None) as steps:
        write_latest(tmp_path, "epoch-1")
    found = set()
    for step in range(1, len(steps) + 1):
        with steps_counted(killed_at(step)), suppress(Killed):
            write_latest(tmp_path, "epoch-2")
        found.add(resolve(tmp_path).name)
    assert {"epoch-1", "epoch-2"} == found
    assert steps == ["fsync", "replace", "fsync"]


def test_latest_that_cannot_be_written_stays(tmp_path: Path) -> None:
    OLD.save(tmp_path / "epoch-1")
    NEW.save(tmp_path / "epoch-2")
    write_latest(tmp_path, "epoch-1")
    before = sorted(tmp_path.iterdir())

    with (
        pytest.raises(CheckpointError, match=r"cannot write .*LATEST: .*No space left"),
        steps_counted(disk_full_at(1)),
    ):
        write_latest(tmp_path, "epoch-2")

    assert resolve(tmp_path) == tmp_path / "epoch-1"
    assert before == sorted(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["epoch-2", "", ".", "..", "epoch-1/..", "../root/epoch-1"])
def test_only_a_checkpoint_of_the_folder_can_be_the_latest(tmp_path: Path, name: str) -> None:
    OLD.save(tmp_path / "root" / "epoch-1")

    with pytest.raises(CheckpointError, match=r"is no checkpoint in .*root"):
        write_latest(tmp_path / "root", name)


@pytest.mark.parametrize("content", [b"", b"epoch-2\n", b"../epoch-1\n", b"\xff\xfe"])
def test_latest_that_names_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    OLD.save(tmp_path / "epoch-1")
    (tmp_path / "LATEST").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"LATEST names .* is no checkpoint in"):
        resolve(tmp_path)


def test_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no MANIFEST\.json in .*not a checkpoint.*no LATEST"
    ):
        resolve(tmp_path)


def test_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint .*gone: there is no such folder"):
        resolve(tmp_path / "gone")


def test_folder_that_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)

    with pytest.raises(CheckpointError, match=r"cannot read checkpoint .*Permission denied"):
        resolve(tmp_path)
