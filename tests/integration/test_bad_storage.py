"""Storage that is full or cannot be written: said by name, and training goes on as it was."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.files.manifest import MANIFEST
from ctr_ps.ps_server.checkpoint.publish import keep_last, write_latest
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.store import ParameterStore
from tests.support.cluster import cluster
from tests.support.disks import Mount, mounting_at
from tests.support.stores import KEYS, declare, in_process, push_id, random_gradients


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def mount(disk: Path) -> Iterator[Mount]:
    with mounting_at(disk) as call:
        yield call


def trained(num_pushes: int) -> ParameterStore:
    store = in_process()
    for sequence in range(num_pushes):
        store.push_grad(random_gradients(sequence), push_id(sequence=sequence))
    return store


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_no_space_leaves_the_old_checkpoint_and_the_training_as_they_were(
    mount: Mount, disk: Path, tmp_path: Path
) -> None:
    small, large = trained(1), trained(10)
    small_digest = small.save(SaveRequest(url=str(tmp_path / "small")))
    large.save(SaveRequest(url=str(tmp_path / "large")))
    # For the small one and half of the large one; a file takes up to a page more than its size.
    room = size_of(tmp_path / "small") + size_of(tmp_path / "large") // 2
    mount(f"size={room + 12 * 4096}")
    small.save(SaveRequest(url=str(disk / "model")))
    before = large.digest(), replace(large.status(), last_save=None)

    for _ in range(3):  # what the first try left would take the room of the next
        with pytest.raises(CheckpointError, match=r"cannot write .*/disk/model/.*No space left"):
            large.save(SaveRequest(url=str(disk / "model"), attachments={"large": bytes(room)}))

        checkpoint = Checkpoint.open(disk / "model")
        checkpoint.verify()
        assert checkpoint.model_digest == small_digest
        assert {MANIFEST, checkpoint.manifest.data_folder} == {
            path.name for path in (disk / "model").iterdir()
        }
    assert (large.digest(), replace(large.status(), last_save=None)) == before
    large.push_grad(random_gradients(99), push_id(sequence=10))
    assert large.digest() != before[0]
    mount(f"size={10 * room}")
    assert large.save(SaveRequest(url=str(disk / "model"))) == large.digest()


def test_no_space_of_a_server_is_said_by_its_endpoint(mount: Mount, disk: Path) -> None:
    mount("size=40k")
    with cluster(num_servers=2) as servers:
        store = servers.client()
        declare(store)
        store.push_grad(random_gradients(1), push_id()).result()
        before = store.digest()

        with pytest.raises(
            CheckpointError, match=r"127\.0\.0\.1:\d+: cannot write .*No space left"
        ):
            store.save(SaveRequest(url=str(disk / "model")))

        assert store.digest() == before
    assert not list(disk.iterdir())


def test_folder_that_cannot_be_written_is_said_before_training_and_when_saving(
    mount: Mount, disk: Path
) -> None:
    mount("size=4m")
    store = trained(1)
    store.save(SaveRequest(url=str(disk / "epoch-1")))
    store.save(SaveRequest(url=str(disk / "epoch-2")))
    write_latest(disk, "epoch-2")
    mount("ro")

    for action in (
        lambda: store.require_writable(str(disk)),
        lambda: store.save(SaveRequest(url=str(disk / "epoch-2"))),
        lambda: store.save(SaveRequest(url=str(disk / "epoch-3"))),
        lambda: write_latest(disk, "epoch-1"),
        lambda: keep_last(disk, 1, ["epoch-1", "epoch-2"]),
    ):
        with pytest.raises(
            CheckpointError, match=r"cannot (make|write|remove) .*/disk/.*: Read-only file system"
        ):
            action()
    loaded = ParameterStore()
    loaded.load(str(disk))
    assert loaded.digest() == store.digest()
    assert KEYS.size > store.status().tables["deep"].rows > 0
