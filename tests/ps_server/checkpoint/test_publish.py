"""Publishing: at any time the old checkpoint or the new one is complete."""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint import publish as publish_module
from ctr_ps.ps_server.checkpoint.files.manifest import PUBLISHED, PUBLISHING, manifest_to_json
from ctr_ps.ps_server.checkpoint.publish import (
    begin_gate,
    best_in,
    of_newest,
    open_data,
    publish,
    read_manifest,
    remove_checkpoints,
    remove_unfinished,
    require_writable,
    resolve,
    write_best,
    write_latest,
)
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_server.checkpoint.writer import check_folder
from tests.support.checkpoints import fake_model, whole_at
from tests.support.interruptions import Killed, disk_full_at, killed_at, steps_counted

OLD, NEW, NEXT = fake_model(1), fake_model(2), fake_model(3)


def num_steps(action: Callable[[Path], object], folder: Path) -> int:
    with steps_counted(lambda _: None) as steps:
        action(folder)
    return len(steps)


def assert_nothing_else(target: Path) -> None:
    """A checkpoint is its manifest and one folder of files."""
    data_folder = read_manifest(LocalFolder(target)).data_folder
    assert {path.name for path in target.iterdir()} == {"MANIFEST.json", data_folder}
    assert not (target / data_folder / "TOKEN").exists()


@pytest.mark.parametrize("is_first", [False, True])
def test_killed_at_any_step_of_a_save_the_old_or_the_new_one_is_found(
    is_first: bool, tmp_path: Path
) -> None:
    old = None if is_first else OLD.save(tmp_path / "whole")
    total = num_steps(NEW.save, tmp_path / "whole")
    new = whole_at(tmp_path / "whole")
    found = []
    for step in range(1, total + 1):
        target = tmp_path / str(step) / "saved"
        target.parent.mkdir()
        if not is_first:
            OLD.save(target)

        with steps_counted(killed_at(step)), suppress(Killed):
            NEW.save(target)

        is_there = (target / "MANIFEST.json").exists()
        found.append(whole_at(target) if is_there else None)
        assert NEXT.save(target) == whole_at(target)
        assert_nothing_else(target)
    switch = found.index(new)
    assert [old] * switch + [new] * (total - switch) == found


def without_token(path: Path | str) -> str:
    """Returns the path of a file that is to replace another one, without what tells its writer."""
    return re.sub(r"\.[0-9a-f]{16}\.next$", ".next", str(path))


def test_everything_is_on_disk_before_the_manifest_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "saved"
    OLD.save(target)
    events: list[str] = []
    fsync, replace_file = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        events.append(without_token(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def note_replace(source: Path, destination: Path) -> None:
        events.append(f"{without_token(source.name)} -> {destination.name}")
        replace_file(source, destination)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    NEW.save(target)

    *before, manifest, published, last = events
    data = target / read_manifest(LocalFolder(target)).data_folder
    attachments = data / "attachments"
    arrow = set(map(str, data.glob("*.arrow")))
    assert arrow | {str(target), str(data), str(attachments)} <= set(before)
    assert {f"{attachments}/{name}.next" for name in ("job.toml", "empty")} <= set(before)
    assert max(map(before.index, arrow)) < len(before) - before[::-1].index(str(data))
    assert [manifest, last] == [str(target / "MANIFEST.json.next"), str(target)]
    assert published == "MANIFEST.json.next -> MANIFEST.json"


def test_error_at_any_step_leaves_the_old_or_the_new_one_and_nothing_else(tmp_path: Path) -> None:
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
        assert NEXT.save(target) == whole_at(target)
        assert_nothing_else(target)
    assert refused > total / 3


def test_published_checkpoint_stays_when_the_answer_to_its_put_is_lost(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    OLD.save(target)

    def fsync_after_replace_fails(_: int) -> BaseException | None:
        is_last = steps[-1] == "fsync" and steps.count("replace") == num_replaces
        return OSError(5, "Input/output error") if is_last else None

    with steps_counted(lambda _: None) as counted:
        NEW.save(tmp_path / "other")
    num_replaces = counted.count("replace")

    with (
        pytest.raises(CheckpointError, match=r"cannot write .*MANIFEST\.json: Input/output"),
        steps_counted(fsync_after_replace_fails) as steps,
    ):
        NEW.save(target)

    assert whole_at(target) == whole_at(tmp_path / "other")


def test_save_whose_files_another_process_has_removed_publishes_nothing(tmp_path: Path) -> None:
    """It was paused, and the same checkpoint saved in its place."""
    target = LocalFolder(tmp_path / "saved")
    OLD.save(target.path)
    data, _ = open_data(target)
    NEW.save(target.path)
    published = target.read("MANIFEST.json")

    with pytest.raises(
        CheckpointError, match=r"another process, .*, removed the files of this save"
    ):
        publish(target, data, read_manifest(target))

    assert target.read("MANIFEST.json") == published


def test_two_processes_replace_a_file_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, replace_file = LocalFolder(tmp_path), os.replace

    def other_first(source: Path, destination: Path) -> None:
        monkeypatch.setattr(os, "replace", replace_file)
        folder.put("LATEST", b"other")
        replace_file(source, destination)

    monkeypatch.setattr(os, "replace", other_first)
    folder.put("LATEST", b"own")

    assert (folder.read("LATEST"), list(folder.files())) == (b"own", ["LATEST"])


def test_folders_above_a_new_checkpoint_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: set[str] = set()
    fsync = os.fsync

    def note_fsync(descriptor: int) -> None:
        forced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    OLD.save(tmp_path / "a" / "b" / "saved")

    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= forced


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()

    assert NEW.save(tmp_path / "saved") == whole_at(tmp_path / "saved")


def test_what_others_put_beside_a_checkpoint_stays(tmp_path: Path) -> None:
    OLD.save(tmp_path / "saved")
    (tmp_path / "saved" / "notes.txt").write_text("the good one")
    (tmp_path / "saved" / "data-of-mine").mkdir()

    NEW.save(tmp_path / "saved")

    assert (tmp_path / "saved" / "notes.txt").read_text() == "the good one"
    assert (tmp_path / "saved" / "data-of-mine").is_dir()


def test_what_a_killed_save_has_left_is_removed_before_the_next_needs_the_room(
    tmp_path: Path,
) -> None:
    OLD.save(tmp_path / "saved")
    left, _ = open_data(LocalFolder(tmp_path / "saved"))

    opened, _ = open_data(LocalFolder(tmp_path / "saved"))

    assert not Path(left.url).exists()
    assert Path(opened.url).exists()
    whole_at(tmp_path / "saved")


def test_damaged_manifest_is_replaced_with_all_that_was_there(tmp_path: Path) -> None:
    OLD.save(tmp_path / "saved")
    (tmp_path / "saved" / "MANIFEST.json").write_text("{")

    NEW.save(tmp_path / "saved")

    assert_nothing_else(tmp_path / "saved")


def test_checkpoint_of_another_format_version_is_not_replaced(tmp_path: Path) -> None:
    OLD.save(tmp_path / "saved")
    manifest = tmp_path / "saved" / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 3', '"format_version": 4'))
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(CheckpointError, match=r"is not replaced: .*has format version 4"):
        NEW.save(tmp_path / "saved")

    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoint_that_cannot_be_read_now_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = OLD.save(tmp_path / "saved")

    def fail(path: Path) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as unreachable:
        unreachable.setattr(Path, "read_bytes", fail)
        with pytest.raises(CheckpointError, match=r"is not replaced: .*Input/output error"):
            NEW.save(tmp_path / "saved")

    assert whole_at(tmp_path / "saved") == old


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

    with pytest.raises(CheckpointError, match=r"thesis.*(is not a checkpoint|Not a directory)"):
        NEW.save(target)

    assert path.read_text() == "irreplaceable"
    assert [target] == list(tmp_path.iterdir())


def test_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(CheckpointError, match=r"cannot \w+ .*file/saved.*: Not a directory"):
        NEW.save(tmp_path / "file" / "saved")
    with pytest.raises(CheckpointError, match=r"cannot \w+ .*file/probe.*: Not a directory"):
        require_writable(tmp_path / "file", check_folder)


def test_server_that_cannot_write_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    def other_storage(url: str, token: str) -> None:
        check_folder(f"{url}-elsewhere", token, 0)

    with pytest.raises(CheckpointError, match=r"does not find the worker's folder .*-elsewhere"):
        require_writable(tmp_path / "new", other_storage)

    assert not list((tmp_path / "new").iterdir())


def test_latest_is_the_one_last_named(tmp_path: Path) -> None:
    old, new = OLD.save(tmp_path / "epoch-1"), NEW.save(tmp_path / "epoch-2")

    write_latest(tmp_path, "epoch-1")
    first = whole_at(tmp_path)
    write_latest(str(tmp_path), "epoch-2")
    second = whole_at(tmp_path)

    assert [old, new] == [first, second]
    assert (tmp_path / "LATEST").read_text() == "epoch-2\n"
    assert resolve(tmp_path) == resolve(tmp_path / "epoch-2") == LocalFolder(tmp_path / "epoch-2")


def test_best_and_latest_can_stand_behind_the_folder(tmp_path: Path) -> None:
    OLD.save(tmp_path / "epoch-1")
    NEW.save(tmp_path / "epoch-2")
    write_latest(tmp_path, "epoch-2")
    assert best_in(tmp_path) is None

    write_best(tmp_path, "epoch-1")

    assert best_in(tmp_path) == "epoch-1"
    assert resolve(f"{tmp_path}/BEST") == LocalFolder(tmp_path / "epoch-1")
    assert resolve(f"{tmp_path}/LATEST") == resolve(tmp_path) == LocalFolder(tmp_path / "epoch-2")


def test_folder_is_its_final_model_until_the_next_save(tmp_path: Path) -> None:
    OLD.save(tmp_path / "epoch-1")
    NEW.save(tmp_path / "epoch-2")
    write_latest(tmp_path, "epoch-2")

    write_best(tmp_path, "epoch-1", PUBLISHED)
    assert resolve(tmp_path) == LocalFolder(tmp_path / "epoch-1")
    assert resolve(f"{tmp_path}/LATEST") == LocalFolder(tmp_path / "epoch-2")

    write_latest(tmp_path, "epoch-2")
    assert resolve(tmp_path) == LocalFolder(tmp_path / "epoch-2")
    write_best(tmp_path, "epoch-1", PUBLISHED)
    begin_gate(tmp_path, is_on=False, is_fresh=False)  # as a new run does
    assert resolve(tmp_path) == LocalFolder(tmp_path / "epoch-2")


def test_readers_of_a_gated_folder_take_nothing_but_what_was_published(tmp_path: Path) -> None:
    begin_gate(tmp_path, is_on=True, is_fresh=True)
    OLD.save(tmp_path / "epoch-1")
    write_latest(tmp_path, "epoch-1", is_gated=True)

    with pytest.raises(CheckpointError, match=r"is published yet: .*ps-ckpt publish .* NAME"):
        resolve(tmp_path)
    assert best_in(tmp_path, PUBLISHED) is None
    write_best(tmp_path, "epoch-1", PUBLISHED)
    NEW.save(tmp_path / "epoch-2")
    write_latest(tmp_path, "epoch-2", is_gated=True)
    remove_unfinished(tmp_path)
    begin_gate(tmp_path, is_on=True, is_fresh=False)  # of the run that resumes it

    assert resolve(tmp_path) == resolve(tmp_path / "PUBLISHED")
    assert resolve(tmp_path) == LocalFolder(tmp_path / "epoch-1")
    assert resolve(tmp_path / "LATEST") == LocalFolder(tmp_path / "epoch-2")
    with pytest.raises(
        CheckpointError, match="has no checkpoint 'epoch-3', so it cannot be the published one"
    ):
        write_best(tmp_path, "epoch-3", PUBLISHED)
    assert best_in(tmp_path, PUBLISHED) == "epoch-1"
    write_latest(tmp_path, "epoch-2")  # of a run without a gate
    assert not (tmp_path / "PUBLISHED").exists()


def test_gate_begins_with_what_readers_take(tmp_path: Path) -> None:
    OLD.save(tmp_path / "epoch-1")
    write_latest(tmp_path, "epoch-1")

    assert begin_gate(tmp_path, is_on=True, is_fresh=False) == "", "as before"
    assert best_in(tmp_path, PUBLISHED) == "epoch-1"
    assert begin_gate(tmp_path, is_on=True, is_fresh=True) == ""
    assert (tmp_path / "PUBLISHED").read_text() == "\n"
    assert begin_gate(tmp_path, is_on=False, is_fresh=False) == "epoch-1"
    assert not (tmp_path / "PUBLISHED").exists()
    assert begin_gate(tmp_path, is_on=False, is_fresh=False) == ""


def test_what_a_run_that_was_turned_back_saves_again_is_no_longer_published(tmp_path: Path) -> None:
    OLD.save(tmp_path / "epoch-1")
    NEW.save(tmp_path / "epoch-2")
    write_latest(tmp_path, "epoch-2")
    write_best(tmp_path, "epoch-2", PUBLISHED)
    newer = read_manifest(LocalFolder(tmp_path / "epoch-2"))
    newer = replace(newer, version=newer.version + 1)
    (tmp_path / "epoch-2/MANIFEST.json").write_text(manifest_to_json(newer))
    begin_gate(tmp_path, is_on=True, is_fresh=False)
    assert best_in(tmp_path, PUBLISHED) == "epoch-2"

    write_latest(tmp_path, "epoch-1", is_gated=True)  # by hand
    begin_gate(tmp_path, is_on=True, is_fresh=False)

    assert (tmp_path / "PUBLISHED").read_text() == "\n"


@pytest.mark.parametrize(
    ("of_crash", "published"),
    [
        ("LATEST", "epoch-2"),
        ("PUBLISHED", "epoch-2"),
        ("by hand", "epoch-1"),
        ("before", "epoch-1"),
    ],
)
def test_what_passed_before_a_crash_is_published_at_the_next_start(
    of_crash: str, published: str, tmp_path: Path
) -> None:
    """But not what was not the latest yet, and not once a person has published another one."""
    OLD.save(tmp_path / "epoch-1")
    write_best(tmp_path, "epoch-1", PUBLISHING)
    write_latest(tmp_path, "epoch-1", is_gated=True)
    write_best(tmp_path, "epoch-1", PUBLISHED)
    assert not (tmp_path / "PUBLISHING").exists()
    NEW.save(tmp_path / "epoch-2")
    write_best(tmp_path, "epoch-2", PUBLISHING)
    write_latest(tmp_path, "epoch-2", is_gated=True)
    assert resolve(tmp_path) == LocalFolder(tmp_path / "epoch-1")
    if of_crash == "PUBLISHED":
        (tmp_path / "PUBLISHED").write_text("epoch-2\n")
    if of_crash == "by hand":
        write_best(tmp_path, "epoch-1", PUBLISHED)
    if of_crash == "before":
        (tmp_path / "LATEST").write_text("epoch-1\n")

    taken = begin_gate(tmp_path, is_on=True, is_fresh=False)

    assert taken == ("epoch-2" if published == "epoch-2" else "")
    assert best_in(tmp_path, PUBLISHED) == published
    assert not (tmp_path / "PUBLISHING").exists()


@pytest.mark.parametrize(("is_on", "is_fresh"), [(True, True), (False, True), (False, False)])
def test_what_another_run_was_about_to_publish_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_on: bool, is_fresh: bool
) -> None:
    """Not for a moment, in which readers look."""
    OLD.save(tmp_path / "epoch-1")
    write_best(tmp_path, "epoch-1", PUBLISHING)
    write_latest(tmp_path, "epoch-1", is_gated=True)
    monkeypatch.setattr(publish_module, "write_best", lambda *names: pytest.fail(f"wrote {names}"))

    begin_gate(tmp_path, is_on=is_on, is_fresh=is_fresh)

    assert best_in(tmp_path, PUBLISHED) is None
    assert not (tmp_path / "PUBLISHING").exists()


@pytest.mark.parametrize(("is_removed", "loaded"), [(True, [1, 2, 3, 4, 5]), (False, [1])])
def test_newest_is_looked_for_again_only_if_it_is_another_one_and_five_times_at_most(
    tmp_path: Path, *, is_removed: bool, loaded: list[int]
) -> None:
    for number in range(1, 10):
        OLD.save(tmp_path / f"epoch-{number}")
    write_latest(tmp_path, "epoch-1")
    found: list[int] = []

    def load(url: str) -> None:
        found.append(int(url.rpartition("-")[2]))
        assert len(found) < 9
        if is_removed:
            write_latest(tmp_path, f"epoch-{len(found) + 1}")
        raise CheckpointError("a file is missing")

    with pytest.raises(CheckpointError, match="a file is missing"):
        of_newest(tmp_path, load)

    assert found == loaded


@pytest.mark.parametrize(
    ("keep", "removed"), [(0, ["a", "b", "c"]), (1, ["a", "b"]), (3, []), (4, []), (9, [])]
)
def test_all_but_the_newest_are_removed(tmp_path: Path, keep: int, removed: list[str]) -> None:
    for name in ("a", "other", "b", "c", "newest"):
        OLD.save(tmp_path / name)
    write_latest(tmp_path, "newest")

    assert remove_checkpoints(tmp_path, {"a", "b", "c"}, keep=keep) == removed

    left = {path.parent.name for path in tmp_path.glob("*/MANIFEST.json")}
    assert left == {"a", "other", "b", "c", "newest"} - {*removed}


def test_checkpoint_may_have_the_name_of_the_best(tmp_path: Path) -> None:
    OLD.save(tmp_path / "BEST")

    assert resolve(tmp_path / "BEST") == LocalFolder(tmp_path / "BEST")


def test_best_that_is_forgotten_leaves_its_checkpoint(tmp_path: Path) -> None:
    old = OLD.save(tmp_path / "epoch-1")
    write_best(tmp_path, "epoch-1")

    (tmp_path / "BEST").unlink()

    assert best_in(tmp_path) is None
    assert whole_at(tmp_path / "epoch-1") == old
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path} has no BEST: a run writes it if data.valid"
    ):
        resolve(tmp_path / "BEST")
    with pytest.raises(
        CheckpointError, match=r"^no checkpoint .*gone/BEST: the folder is empty or"
    ):
        resolve(tmp_path / "gone/BEST")


def test_best_that_was_removed_is_said(tmp_path: Path) -> None:
    OLD.save(tmp_path / "epoch-1")
    write_best(tmp_path, "epoch-1")
    (tmp_path / "epoch-1/MANIFEST.json").unlink()

    assert best_in(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"BEST names 'epoch-1', which is not a checkpoint"):
        resolve(tmp_path / "BEST")
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint .*, so it cannot be the best one"
    ):
        write_best(tmp_path, "epoch-1")


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


@pytest.mark.parametrize("name", ["epoch-2", "", ".", "..", "epoch-1/..", "../root/epoch-1"])
def test_only_a_checkpoint_of_the_folder_can_be_the_latest(tmp_path: Path, name: str) -> None:
    OLD.save(tmp_path / "root" / "epoch-1")

    with pytest.raises(CheckpointError, match=r"root has no checkpoint '"):
        write_latest(tmp_path / "root", name)


@pytest.mark.parametrize("content", [b"", b"epoch-2\n", b"../epoch-1\n", b"\xff\xfe"])
def test_latest_that_names_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    OLD.save(tmp_path / "epoch-1")
    (tmp_path / "LATEST").write_bytes(content)

    with pytest.raises(CheckpointError, match=r"LATEST names .* is not a checkpoint in"):
        resolve(tmp_path)


def test_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    open_data(LocalFolder(tmp_path))

    with pytest.raises(
        CheckpointError, match=r"neither a checkpoint .*no MANIFEST\.json.*no LATEST"
    ):
        resolve(tmp_path)


def test_folder_that_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)

    with pytest.raises(CheckpointError, match=r"cannot read .*MANIFEST\.json: Permission denied"):
        resolve(tmp_path)
