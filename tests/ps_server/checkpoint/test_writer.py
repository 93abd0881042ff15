"""Saving: what is asked of servers, and what is refused before anything is published."""

import json
from pathlib import Path

import pytest

from protos.errors import CheckpointError
from ps_server.checkpoint.manifest import Entry, entries_from_json, entries_to_json
from ps_server.checkpoint.publish import open_staging
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.writer import save_checkpoint, verify_token
from tests.support.checkpoints import FakeModel, fake_model

MODEL = fake_model(1)


def save_with(target: Path, model: FakeModel = MODEL, **changes: object) -> str:
    arguments = {
        "write_parts": lambda folder, _: model.write(folder),
        "tables": {name: table.spec for name, table in model.tables.items()},
        "blocks": {name: block.spec for name, block in model.blocks.items()},
        "attachments": {},
    }
    return save_checkpoint(target, **{**arguments, **changes})


def test_server_that_sees_the_folder_accepts_the_token(tmp_path: Path) -> None:
    staging, token = open_staging(tmp_path / "saved")

    verify_token(staging, token)


def test_server_that_sees_no_folder_or_another_one_says_so(tmp_path: Path) -> None:
    staging, _ = open_staging(tmp_path / "saved")

    with pytest.raises(CheckpointError, match=r"does not see the worker's folder .*shared storage"):
        verify_token(tmp_path / "elsewhere", "token")
    with pytest.raises(CheckpointError, match=r"sees another folder .*shared storage"):
        verify_token(staging, "token of another save")


def test_tokens_and_folders_are_new_each_time(tmp_path: Path) -> None:
    first, second = open_staging(tmp_path / "saved"), open_staging(tmp_path / "saved")

    assert first[0] != second[0]
    assert first[1] != second[1]


def test_part_can_be_written_again(tmp_path: Path) -> None:
    assert MODEL.write(tmp_path) == MODEL.write(tmp_path)


def test_entries_may_travel_as_json(tmp_path: Path) -> None:
    def write_parts(folder: Path, _: str) -> list[Entry]:
        return entries_from_json(entries_to_json(MODEL.write(folder)))

    digest = save_with(tmp_path / "saved", write_parts=write_parts)

    assert digest == Checkpoint.open(tmp_path / "saved").model_digest


def test_manifest_is_readable(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "saved")

    text = (tmp_path / "saved" / "MANIFEST.json").read_text()

    manifest = json.loads(text)
    assert text.startswith('{\n "format_version": 1,\n "model_digest": "')
    assert [spec["name"] for spec in manifest["tables"]] == ["wide", "deep"]
    assert {"job.toml", "empty"} == manifest["attachments"].keys()


def test_error_of_a_server_leaves_the_old_one_and_no_staging(tmp_path: Path) -> None:
    old = MODEL.save(tmp_path / "saved")

    def write_parts(folder: Path, token: str) -> list[Entry]:
        MODEL.write(folder)
        raise CheckpointError("server 1: disk full")

    with pytest.raises(CheckpointError, match="server 1: disk full"):
        save_with(tmp_path / "saved", write_parts=write_parts)

    assert [tmp_path / "saved"] == list(tmp_path.iterdir())
    assert old == Checkpoint.open(tmp_path / "saved").model_digest


def test_target_that_is_taken_during_the_save_is_not_replaced(tmp_path: Path) -> None:
    def write_parts(folder: Path, token: str) -> list[Entry]:
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "thing").touch()
        return MODEL.write(folder)

    with pytest.raises(CheckpointError, match="saved is there, and is not a checkpoint"):
        save_with(tmp_path / "saved", write_parts=write_parts)

    assert [tmp_path / "saved"] == list(tmp_path.iterdir())
    assert (tmp_path / "saved" / "thing").exists()


def write_without_last(folder: Path, _: str) -> list[Entry]:
    return [*MODEL.write(folder, 0, 3), *MODEL.write(folder, 1, 3)]


def write_first_twice(folder: Path, _: str) -> list[Entry]:
    return [*MODEL.write(folder, 0, 2), *MODEL.write(folder, 0, 2)]


def write_elsewhere(folder: Path, _: str) -> list[Entry]:
    (folder / "elsewhere").mkdir()
    return MODEL.write(folder / "elsewhere")


@pytest.mark.parametrize(
    ("write_parts", "message"),
    [
        (
            write_without_last,
            r"table 'wide' has 4 shards.* hold shards \[0, 1, 3\]; was each server",
        ),
        (write_first_twice, r"table 'wide' has 4 shards.* hold shards \[0, 0, 2, 2\]"),
        (write_elsewhere, r"table\.wide\.server-0\.arrow is part of the checkpoint, but: No such"),
    ],
)
def test_what_is_not_whole_is_not_published(
    tmp_path: Path, write_parts: object, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_with(tmp_path / "saved", write_parts=write_parts)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../x", "", ".hidden"])
def test_attachment_whose_name_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be part of a file name"):
        save_with(tmp_path / "saved", attachments={name: b""})

    assert not list(tmp_path.iterdir())


def test_attachments_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    def write_parts(folder: Path, _: str) -> list[Entry]:
        (folder / "attachments").touch()
        return MODEL.write(folder)

    with pytest.raises(CheckpointError, match=r"cannot write attachments to .*attachments: "):
        save_with(tmp_path / "saved", write_parts=write_parts)
