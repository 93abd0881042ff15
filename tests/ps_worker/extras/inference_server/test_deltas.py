"""Deltas that a server of predictions cannot use: refused by name, and over with the next full checkpoint.

Right answers are those of an equal run whose checkpoints have all rows.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ctr_ps.ps_server.checkpoint import saved_model
from ctr_ps.ps_server.checkpoint.files.manifest import MANIFEST
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker.extras.inference_server.served_model import ServedModel
from ctr_ps.ps_worker.predict.predictor import Predictor
from tests.ps_worker.extras.inference_server.conftest import Trained
from tests.support.training import job_of, train_alone

FULL_EVERY = 4  # epoch-1 and epoch-5 have all rows


@pytest.fixture(scope="session")
def chain(trained: Trained) -> Trained:
    return Trained(run_of_deltas(trained, "chain"), trained.samples)


@pytest.fixture(scope="session")
def other(trained: Trained) -> Trained:
    """Another run, with checkpoints of the same names."""
    return Trained(run_of_deltas(trained, "other", "train.seed=7"), trained.samples)


def run_of_deltas(trained: Trained, name: str, *settings: str) -> Path:
    folder = trained.folder.with_name(name)
    train_alone(
        job_of(
            "model.name=fm",
            f"data.train={trained.folder.parent}/data/train/*",
            f"checkpoint.dir={folder}",
            "checkpoint.mode=delta",
            f"checkpoint.full_every={FULL_EVERY}",
            "train.epochs=6",
            "train.batch_size=100",
            *settings,
        )
    )
    return folder


@pytest.fixture
def served(chain: Trained, tmp_path: Path) -> Iterator[ServedModel]:
    """Serves epoch-2, a delta, of the folder `tmp_path`."""
    chain.publish(1, tmp_path)
    chain.publish(2, tmp_path)
    model = ServedModel(str(tmp_path), name="ctr", max_rows=100, threads=1)
    yield model
    model.close()


def require_epoch(model: ServedModel, trained: Trained, epoch: int) -> None:
    """Requires that the model of an epoch answers, bitwise."""
    expected = Predictor.load(trained.folder / f"epoch-{epoch}").predict_samples(trained.samples)
    before = Predictor.load(trained.folder / f"epoch-{epoch - 1}").predict_samples(trained.samples)
    assert not np.array_equal(expected, before), "else this says nothing"
    assert model.current.version == f"epoch-{epoch}"
    answers = model.current.predictor.predict_samples(trained.samples)
    assert np.array_equal(answers, expected)


def rows_file(checkpoint: Path) -> Path:
    return max(checkpoint.glob("data-*/table.*"), key=lambda file: file.stat().st_size)


Bad = Callable[[Path, Trained, Trained], object]


def damaged_rows(folder: Path, chain: Trained, other: Trained) -> None:
    chain.publish(3, folder)
    file = rows_file(folder / "epoch-3")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def of_a_damaged_base(folder: Path, chain: Trained, other: Trained) -> None:
    damaged_rows(folder, chain, other)
    chain.publish(4, folder)


def truncated(folder: Path, chain: Trained, other: Trained) -> None:
    chain.publish(3, folder)
    file = rows_file(folder / "epoch-3")
    file.write_bytes(file.read_bytes()[:-100])


def without_a_file(folder: Path, chain: Trained, other: Trained) -> None:
    chain.publish(3, folder)
    rows_file(folder / "epoch-3").unlink()


def damaged_manifest(folder: Path, chain: Trained, other: Trained) -> None:
    chain.publish(3, folder)
    manifest = folder / "epoch-3" / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": ', b'"version": 1', 1))


def without_its_base(folder: Path, chain: Trained, other: Trained) -> None:
    chain.publish(4, folder)  # of epoch-3


def without_the_full_one(folder: Path, chain: Trained, other: Trained) -> None:
    chain.publish(3, folder)
    shutil.rmtree(folder / "epoch-1")


def of_another_run(folder: Path, chain: Trained, other: Trained) -> None:
    other.publish(3, folder)


def with_the_base_of_another_run(folder: Path, chain: Trained, other: Trained) -> None:
    shutil.rmtree(folder / "epoch-1")
    other.publish(1, folder)
    chain.publish(3, folder)


def in_another_order(folder: Path, chain: Trained, other: Trained) -> None:
    """epoch-3 under the name of its base, and its base under its name."""
    shutil.rmtree(folder / "epoch-2")
    shutil.copytree(chain.folder / "epoch-3", folder / "epoch-2")
    shutil.copytree(chain.folder / "epoch-2", folder / "epoch-3")
    (folder / "LATEST").write_text("epoch-2\n")


def named_and_not_there(folder: Path, chain: Trained, other: Trained) -> None:
    (folder / "LATEST").write_text("epoch-3\n")


@pytest.mark.parametrize(
    ("bad", "name", "why"),
    [
        (damaged_rows, "epoch-3", "was altered: the checksum (xxh3) of shard"),
        (of_a_damaged_base, "epoch-3", "was altered: the checksum (xxh3) of shard"),
        (truncated, "epoch-3", "was it truncated?"),
        (without_a_file, "epoch-3", "is missing from the checkpoint"),
        (damaged_manifest, "epoch-3", "was altered"),
        (without_its_base, "epoch-3", "was removed or moved"),
        (without_the_full_one, "epoch-1", "was removed or moved"),
        (of_another_run, "epoch-2", "was replaced by another"),
        (with_the_base_of_another_run, "epoch-1", "was replaced by another"),
        (in_another_order, "epoch-2", "was replaced by another"),
        (named_and_not_there, "epoch-3", "is not a checkpoint"),
    ],
)
def test_bad_delta_is_named_once_and_over_with_the_next_full_checkpoint(
    bad: Bad,
    name: str,
    why: str,
    served: ServedModel,
    trained: Trained,
    chain: Trained,
    other: Trained,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    require_epoch(served, trained, 2)
    bad(tmp_path, chain, other)

    assert not served.reload()
    assert not served.reload()

    refusals = [each for each in caplog.messages if "still serving version=epoch-2" in each]
    assert len(refusals) == served.counts.failed_reloads == 1
    assert name in refusals[0]
    assert why in refusals[0]
    require_epoch(served, trained, 2)
    chain.publish(5, tmp_path)
    assert served.reload()
    require_epoch(served, trained, 5)
    chain.publish(6, tmp_path)
    assert served.reload()
    require_epoch(served, trained, 6)


def test_delta_that_comes_twice_changes_nothing(
    served: ServedModel, trained: Trained, chain: Trained, tmp_path: Path
) -> None:
    """Under its own name, and under that of the next one."""
    for _ in range(2):
        shutil.rmtree(tmp_path / "epoch-2")
        chain.publish(2, tmp_path)
        assert not served.reload()
    shutil.copytree(chain.folder / "epoch-2", tmp_path / "epoch-3")
    (tmp_path / "LATEST").write_text("epoch-3\n")
    assert not served.reload()
    require_epoch(served, trained, 2)

    shutil.rmtree(tmp_path / "epoch-3")
    chain.publish(3, tmp_path)
    assert served.reload()
    require_epoch(served, trained, 3)


def test_older_checkpoint_that_latest_names_is_served_and_so_is_the_newer_one_again(
    served: ServedModel, trained: Trained, chain: Trained, tmp_path: Path
) -> None:
    """Whoever writes LATEST goes back on purpose."""
    chain.publish(3, tmp_path)
    assert served.reload()
    for epoch in (2, 3):
        (tmp_path / "LATEST").write_text(f"epoch-{epoch}\n")
        assert served.reload()
        require_epoch(served, trained, epoch)


def test_checkpoint_is_opened_once(
    trained: Trained, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    own = Checkpoint.open

    def noted(url: str | Path) -> Checkpoint:
        opened.append(str(url))
        return own(url)

    monkeypatch.setattr(Checkpoint, "open", noted)
    model = ServedModel(str(folder), name="ctr", max_rows=100, threads=1)
    trained.publish(2, folder)
    assert model.reload()
    model.close()

    assert opened == [f"{folder}/epoch-1", f"{folder}/epoch-2"]


@pytest.mark.parametrize("maps", [False, True])
def test_delta_costs_its_own_rows_and_not_those_of_its_bases(
    maps: bool,
    trained: Trained,
    chain: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    own_layer, verify_own = Checkpoint.own_layer, Checkpoint.verify_own

    def noted_layer(self: Checkpoint, *arguments: object, **options: object) -> object:
        read.append(self.name)
        return own_layer(self, *arguments, **options)  # type: ignore[arg-type]

    def noted_verify(self: Checkpoint, **options: bool) -> None:
        read.append(f"verify {self.name}")
        verify_own(self, **options)

    chain.publish(1, tmp_path)
    predictor = Predictor.load(tmp_path, verify=True, map=maps)
    monkeypatch.setattr(saved_model.Checkpoint, "own_layer", noted_layer)
    monkeypatch.setattr(saved_model.Checkpoint, "verify_own", noted_verify)
    for epoch in (2, 3, 4, 5):
        chain.publish(epoch, tmp_path)
        read.clear()
        predictor.switch_to(tmp_path)
        assert {*read} == {f"epoch-{epoch}", f"verify epoch-{epoch}"}
        expected = Predictor.load(trained.folder / f"epoch-{epoch}").predict_samples(
            trained.samples
        )
        assert np.array_equal(predictor.predict_samples(trained.samples), expected)

    predictor.roll_back()
    read.clear()
    predictor.switch_to(tmp_path / "epoch-4", verify=False)
    assert {*read} == {f"epoch-{epoch}" for epoch in (1, 2, 3, 4)}, "what was verified is not mixed"
    predictor.switch_to(tmp_path / "epoch-4", verify=True)
    assert "verify epoch-1" in read
