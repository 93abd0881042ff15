"""Dependencies between the checkpoints of a folder: a base that is needed is not replaced."""

import uuid
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.chain import dependants
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.rewrite import compact
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder, folder_at
from tests.support.checkpoints import fake_model
from tests.support.stores import trained_chain


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ["local", "memory"])
def test_dependants_are_all_deltas_above(place: str, tmp_path: Path) -> None:
    root = str(tmp_path) if place == "local" else f"memory://{uuid.uuid4()}"
    trained_chain(root, 3)
    fake_model(1).save(f"{root}/other")

    found = {name: dependants(folder_at(f"{root}/{name}")) for name in ("0", "1", "3", "other")}

    assert found == {"0": ["1", "2", "3"], "1": ["2", "3"], "3": [], "other": []}
    assert dependants(folder_at(f"{root}/nothing")) == []


def test_what_stands_alone_in_its_storage_has_no_dependants() -> None:
    url = f"memory://{uuid.uuid4()}"
    fake_model(1).save(url)

    assert dependants(folder_at(url)) == []


def test_delta_of_what_was_replaced_or_is_damaged_is_no_dependant(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 2)
    (tmp_path / "2" / "MANIFEST.json").write_text("{")
    assert dependants(LocalFolder(tmp_path / "0")) == ["1"]

    store.save(SaveRequest(url=str(tmp_path / "0")))

    assert dependants(LocalFolder(tmp_path / "0")) == []


@pytest.mark.parametrize(
    ("source", "target", "needed_by"), [("0", "0", "1, 2"), ("1", "1", "2"), ("2", "0", "1, 2")]
)
def test_what_deltas_need_is_not_replaced(
    source: str, target: str, needed_by: str, tmp_path: Path
) -> None:
    trained_chain(tmp_path, 2)
    before = content_of(tmp_path)

    with pytest.raises(
        CheckpointError,
        match=rf"/{target} is the base of {needed_by} in the same .*write to",
    ):
        compact(Checkpoint.open(tmp_path / source), tmp_path / target)

    assert content_of(tmp_path) == before
    Checkpoint.open(tmp_path / "2").verify()


def test_delta_that_nobody_needs_is_replaced_by_its_model(tmp_path: Path) -> None:
    store = trained_chain(tmp_path, 2)

    compact(Checkpoint.open(tmp_path / "2"), tmp_path / "2")

    checkpoint = Checkpoint.open(tmp_path / "2")
    checkpoint.verify()
    assert (checkpoint.manifest.kind, checkpoint.model_digest) == ("full", store.digest())
