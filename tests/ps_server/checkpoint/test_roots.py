"""Roots: nothing is written or read outside of them, links included."""

import shutil
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint.files.manifest import LATEST
from ctr_ps.ps_server.checkpoint.reader import Roots
from tests.support.checkpoints import fake_counting_model

MODEL = fake_counting_model(1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a checkpoint in it, and a checkpoint outside."""
    for name in ("root/saved", "root-like/saved"):
        MODEL.save(tmp_path / name)
    return tmp_path / "root"


def test_without_roots_any_place_is_allowed(root: Path) -> None:
    Roots().require(["/etc", "s3://bucket/saved"])

    Roots().open(str(root / "saved")).verify()


def test_what_is_in_a_root_is_allowed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    roots = Roots([".", "s3://bucket/models/"])

    for url in (root, root / "saved", "saved", root / "x" / ".." / "y", f"file://{root}/saved"):
        roots.require([str(url)])
    roots.require(["s3://bucket/models", "s3://bucket/models/a", "S3://bucket/models/a/"])
    roots.open(str(root / "saved")).verify()


def test_whole_file_system_can_be_a_root() -> None:
    Roots(["/"]).require(["/etc"])


@pytest.mark.parametrize(
    "url",
    [
        "{root}/..",
        "{root}/../root-like/saved",
        "{root}-like/saved",
        "{root}/out/saved",
        "file://{root}/../root-like",
        "/",
        "/proc/self/root{root}-like",
        "s3://bucket/models-2/a",
        "s3://bucket",
        "s3://other/models",
        "s3a://bucket/models/a",
        "gs://bucket/models",
        "memory://bucket/models",
    ],
)
def test_what_is_outside_is_refused(root: Path, url: str) -> None:
    (root / "out").symlink_to(root.with_name("root-like"))
    roots = Roots([str(root), "s3://bucket/models"])

    with pytest.raises(CheckpointError, match=r"is outside of .*/root, s3://bucket/models: "):
        roots.require([url.format(root=root)])


@pytest.mark.parametrize("url", ["s3://bucket/models/../x", "s3://bucket/models/%2e%2E/x"])
def test_url_that_may_lead_out_is_refused(url: str) -> None:
    with pytest.raises(CheckpointError, match=r"must be without '\.\.'"):
        Roots(["s3://bucket/models"]).require([url])


def test_latest_that_leads_out_by_a_link_is_refused(root: Path) -> None:
    (root / "epoch-1").symlink_to(root.with_name("root-like") / "saved")
    (root / LATEST).write_text("epoch-1\n")

    with pytest.raises(CheckpointError, match=r"root-like/saved' is outside of"):
        Roots([str(root)]).open(str(root))


@pytest.mark.parametrize(
    "name", ["MANIFEST.json", "data-*", "data-*/table.exact.*", "data-*/attachments/job.toml"]
)
def test_part_of_a_checkpoint_that_is_a_link_out_is_refused(root: Path, name: str) -> None:
    part = next((root / "saved").glob(name))
    outside = root.with_name(part.name)
    shutil.move(part, outside)
    part.symlink_to(outside)

    with pytest.raises(CheckpointError, match=rf"{part.name}.*' is outside of"):
        Roots([str(root)]).open(str(root / "saved"))
    Roots().open(str(root / "saved")).verify()
