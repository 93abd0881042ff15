"""Saving: shared folders, and errors before anything is published."""

from dataclasses import replace
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.store import WorkerProgress
from ctr_ps.ps_server.checkpoint.files.manifest import Share
from ctr_ps.ps_server.checkpoint.publish import open_data
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_server.checkpoint.writer import save_checkpoint, shared_folder
from tests.support.checkpoints import FakeModel, fake_model

MODEL = fake_model(1)


def share_of(model: FakeModel, url: str, server_index: int = 0, num_servers: int = 1) -> Share:
    entries = model.write(Path(url), server_index, num_servers)
    return Share(entries=tuple(entries))


def save_with(target: Path, model: FakeModel = MODEL, **changes: object) -> str:
    arguments = {
        "write_shares": lambda url, _: [share_of(model, url)],
        "tables": {name: table.spec for name, table in model.tables.items()},
        "blocks": {name: block.spec for name, block in model.blocks.items()},
        "attachments": {},
    }
    return save_checkpoint(target, **{**arguments, **changes})


def test_server_that_sees_no_folder_or_another_one_says_so(tmp_path: Path) -> None:
    data, _ = open_data(LocalFolder(tmp_path / "saved"))

    with pytest.raises(
        CheckpointError, match=r"does not find the worker's folder .*shared storage"
    ):
        shared_folder(str(tmp_path / "elsewhere"), "token")
    with pytest.raises(CheckpointError, match=r"is another folder on this server .*shared storage"):
        shared_folder(data.url, "token of another save")


def test_server_that_comes_late_does_not_write_into_what_was_published(tmp_path: Path) -> None:
    asked = []

    def write_shares(url: str, token: str) -> list[Share]:
        asked.append((url, token))
        return [share_of(MODEL, url)]

    save_with(tmp_path / "saved", write_shares=write_shares)

    with pytest.raises(CheckpointError, match="or the save was aborted"):
        shared_folder(*asked[0])


def test_tokens_and_folders_are_new_each_time(tmp_path: Path) -> None:
    target = LocalFolder(tmp_path / "saved")

    first, second = open_data(target), open_data(target)

    assert first[0] != second[0]
    assert first[1] != second[1]


def test_part_can_be_written_again(tmp_path: Path) -> None:
    assert MODEL.write(tmp_path) == MODEL.write(tmp_path)


def test_manifest_says_what_every_server_has(tmp_path: Path) -> None:
    def progress(step: int) -> WorkerProgress:
        return WorkerProgress(incarnation=3, sequence=step + 1, step=step, position=f"at {step}")

    def write_shares(url: str, _: str) -> list[Share]:
        first, second = (share_of(MODEL, url, server, 2) for server in (0, 1))
        return [
            replace(first, version=7, workers={0: progress(4), 1: progress(3)}),
            replace(second, version=6, workers={0: progress(2), 1: progress(4), 2: progress(1)}),
        ]

    save_with(tmp_path / "saved", write_shares=write_shares, clock=lambda: 1.5e9)

    manifest = Checkpoint.open(tmp_path / "saved").manifest
    assert (manifest.version, manifest.created) == (6, 1.5e9)
    assert {0: progress(2), 1: progress(3)} == manifest.workers


def write_without_last(url: str, _: str) -> list[Share]:
    return [share_of(MODEL, url, 0, 3), share_of(MODEL, url, 1, 3)]


def write_first_twice(url: str, _: str) -> list[Share]:
    return [share_of(MODEL, url, 0, 2), share_of(MODEL, url, 0, 2)]


def write_elsewhere(url: str, _: str) -> list[Share]:
    (Path(url) / "elsewhere").mkdir()
    return [share_of(MODEL, f"{url}/elsewhere")]


@pytest.mark.parametrize(
    ("write_shares", "message"),
    [
        (
            write_without_last,
            r"table 'wide' needs each of its 4 shards once.* hold shards \[0, 1, 3\]; did each server",
        ),
        (
            write_first_twice,
            r"table 'wide' needs each of its 4 shards once.* hold shards \[0, 0, 2, 2\]",
        ),
        (
            write_elsewhere,
            r"table\.wide\.server-0\.arrow is missing from the checkpoint",
        ),
    ],
)
def test_what_is_not_whole_is_not_published(
    tmp_path: Path, write_shares: object, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_with(tmp_path / "saved", write_shares=write_shares)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../x", "", ".hidden"])
def test_attachment_whose_name_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be part of a file name"):
        save_with(tmp_path / "saved", attachments={name: b""})

    assert not list(tmp_path.iterdir())


def test_attachments_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    def write_shares(url: str, token: str) -> list[Share]:
        (Path(url) / "attachments").touch()
        return [share_of(MODEL, url)]

    with pytest.raises(CheckpointError, match=r"cannot make .*attachments: "):
        save_with(tmp_path / "saved", write_shares=write_shares, attachments={"job": b""})
