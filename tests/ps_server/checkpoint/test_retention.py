"""Retention: old checkpoints of a run are removed, and nothing else."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ctr_ps.ps_server.checkpoint.files.manifest import manifest_to_json
from ctr_ps.ps_server.checkpoint.publish import (
    keep_last,
    open_data,
    read_manifest,
    remove_unfinished,
    write_best,
    write_latest,
)
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from tests.support.checkpoints import fake_model, whole_at
from tests.support.interruptions import Killed, killed_at, steps_counted

OLD = fake_model(1)
EPOCHS = [f"epoch-{number}" for number in range(1, 5)]


def saved_epochs(root: Path, *ages: float) -> None:
    for number, age in enumerate(ages, start=1):
        OLD.save(root / f"epoch-{number}", clock=lambda age=age: 1e9 + age)


def names_in(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.mark.parametrize(
    ("number", "kept"),
    [(0, {1, 2, 3, 4}), (1, {4}), (2, {1, 4}), (3, {1, 2, 4}), (9, {1, 2, 3, 4})],
)
def test_newest_are_kept(tmp_path: Path, number: int, kept: set[int]) -> None:
    saved_epochs(tmp_path, 30, 20, 10, 40)

    removed = keep_last(tmp_path, number, EPOCHS)

    assert {f"epoch-{number}" for number in kept} == names_in(tmp_path)
    assert {f"epoch-{number}" for number in {1, 2, 3, 4} - kept} == set(removed)


def test_latest_and_what_is_needed_are_kept_however_old(tmp_path: Path) -> None:
    saved_epochs(tmp_path, 10, 20, 30, 40)
    write_latest(tmp_path, "epoch-2")
    newest = tmp_path / "epoch-4" / "MANIFEST.json"
    manifest = replace(read_manifest(LocalFolder(tmp_path / "epoch-4")), base="epoch-1")
    newest.write_text(manifest_to_json(manifest))

    removed = keep_last(str(tmp_path), 1, EPOCHS)

    assert removed == ["epoch-3"]
    assert {"LATEST", "epoch-1", "epoch-2", "epoch-4"} == names_in(tmp_path)


def test_best_is_kept_however_old(tmp_path: Path) -> None:
    saved_epochs(tmp_path, 10, 20, 30, 40)
    write_latest(tmp_path, "epoch-4")
    write_best(tmp_path, "epoch-1")

    assert keep_last(tmp_path, 1, EPOCHS) == ["epoch-2", "epoch-3"]
    assert {"LATEST", "BEST", "epoch-1", "epoch-4"} == names_in(tmp_path)


def test_published_one_and_its_base_are_kept_however_old(tmp_path: Path) -> None:
    saved_epochs(tmp_path, 10, 20, 30, 40)
    write_latest(tmp_path, "epoch-4")
    manifest = replace(read_manifest(LocalFolder(tmp_path / "epoch-3")), base="epoch-1")
    (tmp_path / "epoch-3" / "MANIFEST.json").write_text(manifest_to_json(manifest))
    write_best(tmp_path, "epoch-3", "PUBLISHED")

    assert keep_last(tmp_path, 1, EPOCHS) == ["epoch-2"]
    assert {"LATEST", "PUBLISHED", "epoch-1", "epoch-3", "epoch-4"} == names_in(tmp_path)


def test_checkpoints_of_others_stay_with_what_they_need(tmp_path: Path) -> None:
    saved_epochs(tmp_path, 10, 20, 30, 40)
    other = replace(read_manifest(LocalFolder(tmp_path / "epoch-1")), base="epoch-2")
    OLD.save(tmp_path / "mine")
    (tmp_path / "mine" / "MANIFEST.json").write_text(manifest_to_json(other))
    predicts = replace(read_manifest(LocalFolder(tmp_path / "epoch-3")), kind="inference")
    (tmp_path / "epoch-3" / "MANIFEST.json").write_text(manifest_to_json(predicts))

    removed = keep_last(tmp_path, 1, EPOCHS)

    assert removed == ["epoch-1"]
    assert {"mine", "epoch-2", "epoch-3", "epoch-4"} == names_in(tmp_path)


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    saved_epochs(tmp_path, 10, 20)
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "epoch-1")
    open_data(LocalFolder(tmp_path / "at-work"))
    OLD.save(tmp_path / "damaged")
    (tmp_path / "damaged" / "MANIFEST.json").write_text("{")

    removed = keep_last(tmp_path, 1, names_in(tmp_path))

    assert removed == ["epoch-1"]
    assert {"mine", "file", "link", "at-work", "damaged", "epoch-2"} == names_in(tmp_path)


def test_what_killed_saves_left_goes_and_nothing_else(tmp_path: Path) -> None:
    saved_epochs(tmp_path, 10)
    for name in ("step-7", "step-9"):
        open_data(LocalFolder(tmp_path / name))
    (tmp_path / "step-9" / "MANIFEST.json.next").touch()
    open_data(LocalFolder(tmp_path / "mine"))
    (tmp_path / "mine" / "notes.txt").touch()
    (tmp_path / "empty").mkdir()

    removed = remove_unfinished(tmp_path)

    assert {"step-7", "step-9"} == set(removed)
    assert {"epoch-1", "mine", "empty"} == names_in(tmp_path) - {"LATEST"}
    assert whole_at(tmp_path / "epoch-1")
    assert remove_unfinished(tmp_path / "none") == []


def test_killed_at_any_step_of_a_removal_the_next_one_ends_it(tmp_path: Path) -> None:
    saved_epochs(tmp_path / "counted", 10, 20)
    with steps_counted(lambda _: None) as steps:
        keep_last(tmp_path / "counted", 1, EPOCHS)
    for step in range(1, len(steps) + 1):
        root = tmp_path / str(step)
        saved_epochs(root, 10, 20)

        with steps_counted(killed_at(step)), suppress(Killed):
            keep_last(root, 1, EPOCHS)

        assert (root / "epoch-1" / "MANIFEST.json").exists() == (step == 1)
        keep_last(root, 1, EPOCHS)
        assert not list((root / "epoch-1").rglob("*.arrow"))
        assert whole_at(root / "epoch-2")
