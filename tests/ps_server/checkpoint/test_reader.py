"""Reading: on any number of servers, detection of damage, and nothing outside of the roots."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.files.digest import shard_digest
from ctr_ps.ps_server.checkpoint.files.format import (
    read_table_file,
    write_dense_file,
    write_table_file,
)
from ctr_ps.ps_server.checkpoint.files.manifest import (
    LATEST,
    Share,
    manifest_from_json,
    manifest_to_json,
)
from ctr_ps.ps_server.checkpoint.reader import Checkpoint, Roots
from ctr_ps.ps_server.checkpoint.storage.folders import LocalFolder
from ctr_ps.ps_server.checkpoint.writer import save_checkpoint, shared_folder
from ctr_ps.ps_server.store import ParameterStore
from tests.support.checkpoints import (
    ATTACHMENTS,
    FakeModel,
    content,
    exchange_table,
    fake_block,
    fake_counting_model,
    fake_model,
    fake_table,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of few bytes, so that each can be altered."""
    fake_counting_model().save(tmp_path / "saved")
    return tmp_path / "saved"


def path_of(folder: Path, name: str) -> Path:
    return folder / name if name == "MANIFEST.json" else next(folder.glob("data-*")) / name


servers = st.integers(1, 6)


@settings(deadline=None, max_examples=30)
@given(
    savers=servers, loaders=servers, seed=st.integers(0, 2**32), state_width=st.sampled_from([0, 3])
)
def test_any_number_of_servers_loads_what_any_other_number_saved(
    savers: int,
    loaders: int,
    seed: int,
    state_width: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    table = fake_table("wide", seed, state_width=state_width)
    block = fake_block("mlp", seed)
    folder = tmp_path_factory.mktemp("checkpoint")
    FakeModel({"wide": table}, {"mlp": block}).save(folder, savers)

    checkpoint = Checkpoint.open(folder)
    for server_index in range(loaders):
        shards = ShardMap.of(loaders).shards_of(server_index, table.spec.num_shards)
        found = dict(checkpoint.read_shards("wide", shards))
        assert set(shards) == found.keys()
        for shard, rows in found.items():
            assert shard_digest(table.rows[shard]) == shard_digest(rows)
        part = ShardMap.of(loaders).piece_of(server_index, block.spec.length)
        piece = checkpoint.read_dense("mlp", part)
        assert part.start == piece.start
        np.testing.assert_array_equal(piece.weights, block.piece.weights[part])
        np.testing.assert_array_equal(piece.element_state, block.piece.element_state[:, part])
        np.testing.assert_array_equal(piece.scalars, block.piece.scalars)


def test_specs_and_attachments_come_back(tmp_path: Path) -> None:
    model = fake_model()
    model.save(tmp_path / "saved")

    checkpoint = Checkpoint.open(tmp_path / "saved")

    assert {name: table.spec for name, table in model.tables.items()} == checkpoint.tables
    assert {name: block.spec for name, block in model.blocks.items()} == checkpoint.blocks
    found = {name: checkpoint.attachment(name) for name in checkpoint.attachments}
    assert found == ATTACHMENTS
    checkpoint.verify()


def test_scalars_are_those_of_the_piece_that_the_part_begins_in(tmp_path: Path) -> None:
    """Servers of an asynchronous run may differ in them; each gets its own back."""
    block = fake_block("mlp", length=9)

    def write_shares(url: str, token: str) -> list[Share]:
        folder = shared_folder(url, token)
        shares = [block.share(server_index, 3) for server_index in range(3)]
        own = [np.full(2, server_index, np.float32) for server_index in range(3)]
        written = [
            write_dense_file(folder, index, "mlp", replace(share.piece, scalars=own[index]))
            for index, share in enumerate(shares)
        ]
        return [Share(entries=(entry,)) for entry in written]

    save_checkpoint(
        tmp_path / "saved",
        write_shares=write_shares,
        tables={},
        blocks={"mlp": block.spec},
        attachments={},
    )

    checkpoint = Checkpoint.open(tmp_path / "saved")
    for start, expected in [(0, 0), (2, 0), (3, 1), (8, 2), (9, 2)]:
        assert [expected] * 2 == checkpoint.read_dense("mlp", slice(start, 9)).scalars.tolist()


def test_unknown_names_are_refused_with_the_known_ones(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)

    with pytest.raises(CheckpointError, match=r"no table 'deep', only \['bloom', 'exact'\]"):
        next(checkpoint.read_shards("deep", [0]))
    with pytest.raises(CheckpointError, match=r"no dense block 'exact', only \['mlp'\]"):
        checkpoint.read_dense("exact", slice(0, 1))
    with pytest.raises(CheckpointError, match=r"no attachment 'x', only \['empty', 'job.toml'\]"):
        checkpoint.attachment("x")


def test_what_lies_outside_a_table_or_block_is_refused(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)

    with pytest.raises(CheckpointError, match=r"'exact' has 2 shards, not \[1, 2\]"):
        next(checkpoint.read_shards("exact", [1, 2]))
    for part in (slice(-1, 2), slice(2, 1), slice(0, 4)):
        with pytest.raises(CheckpointError, match="'mlp' has 3 elements, not"):
            checkpoint.read_dense("mlp", part)


FILES = [
    "MANIFEST.json",
    "table.exact.server-0.arrow",
    "candidates.exact.server-0.arrow",
    "counters.bloom.server-0.arrow",
    "dense.mlp.server-0.arrow",
    "attachments/job.toml",
]
ARROW_FILES = FILES[1:5]


@pytest.mark.parametrize("name", FILES)
def test_altered_byte_is_refused_by_name_or_means_nothing(folder: Path, name: str) -> None:
    """Changes in padding and in the second copy of the schema leave every value as saved."""
    whole = content(Checkpoint.open(folder))
    path = path_of(folder, name)
    original = path.read_bytes()
    refusals = []
    for position in range(0, len(original), 3):
        altered = bytearray(original)
        altered[position] ^= 1 << position % 8
        path.write_bytes(altered)

        try:
            found = content(Checkpoint.open(folder))
        except CheckpointError as error:
            refusals.append(str(error))
        else:
            assert whole == found, f"byte {position} was altered without notice"
    assert len(refusals) > len(original) / 12
    assert [message for message in refusals if name not in message] == []


@pytest.mark.parametrize("name", FILES)
def test_cut_file_is_refused_by_name(folder: Path, name: str) -> None:
    path = path_of(folder, name)
    original = path.read_bytes()
    for length in range(0, len(original.rstrip(b"\n")), 29):
        path.write_bytes(original[:length])

        with pytest.raises(CheckpointError, match=name):
            Checkpoint.open(folder)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_refused_by_name(folder: Path, name: str) -> None:
    path_of(folder, name).unlink()

    with pytest.raises(CheckpointError, match=name):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ARROW_FILES)
@pytest.mark.parametrize("length", [0, 100, 600])
def test_file_that_is_cut_after_opening_is_refused(folder: Path, name: str, length: int) -> None:
    checkpoint = Checkpoint.open(folder)
    path = path_of(folder, name)
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(CheckpointError, match=name):
        checkpoint.verify()


def test_attachment_that_vanishes_after_opening_is_refused(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    path_of(folder, "attachments/job.toml").unlink()

    with pytest.raises(CheckpointError, match=r"job\.toml"):
        checkpoint.attachment("job.toml")


def test_file_of_another_table_is_refused_by_name(tmp_path: Path) -> None:
    """With the same values, so that only its schema differs."""
    tables = {name: fake_table(name) for name in ("left", "rite")}
    FakeModel(tables, {}).save(tmp_path / "saved")
    left, right = (path_of(tmp_path / "saved", f"table.{side}.server-0.arrow") for side in tables)

    shutil.copy(right, left)

    with pytest.raises(CheckpointError, match=r"table\.left.*was altered or is another file"):
        Checkpoint.open(tmp_path / "saved").verify()


def test_manifest_of_another_model_is_noticed_by_its_digest(folder: Path) -> None:
    """A manifest with a wrong digest, otherwise consistent."""
    path = folder / "MANIFEST.json"
    manifest = manifest_from_json(path.read_bytes(), str(path))
    path.write_text(manifest_to_json(replace(manifest, model_digest="0" * 64)))

    with pytest.raises(CheckpointError, match=r"the model digest in .*MANIFEST\.json is 000"):
        Checkpoint.open(folder).verify()


@pytest.mark.parametrize("num_batches", [1, 3])
def test_wrong_number_of_record_batches_is_refused(tmp_path: Path, num_batches: int) -> None:
    table = fake_table("wide", num_shards=num_batches)
    entry = write_table_file(LocalFolder(tmp_path), 0, table)
    batches = (*entry.batches, *entry.batches)[:2]

    with pytest.raises(CheckpointError, match=f"has {num_batches} record batches.* says 2"):
        next(
            read_table_file(LocalFolder(tmp_path), replace(entry, batches=batches), table.spec, {0})
        )


def test_wrong_number_of_rows_is_refused(tmp_path: Path) -> None:
    table = fake_table("wide", num_shards=1)
    entry = write_table_file(LocalFolder(tmp_path), 0, table)
    batch = replace(entry.batches[0], rows=99)

    with pytest.raises(CheckpointError, match=r"table\.wide.* rows, the manifest says 99"):
        next(
            read_table_file(
                LocalFolder(tmp_path), replace(entry, batches=(batch,)), table.spec, {0}
            )
        )


@pytest.mark.parametrize("width", [0, 2, 4, 1000])
def test_rows_of_another_width_than_the_table_are_refused_by_all_who_open(
    tmp_path: Path, width: int
) -> None:
    """With right checksums; wider rows were written over others, and narrower ones filled with zeros."""
    FakeModel({"deep": fake_table("deep")}, {}).save(tmp_path)
    table = fake_table("deep")
    rows = {
        shard: replace(rows, state=np.full((rows.keys.size, width), 1234.5, np.float32))
        for shard, rows in table.rows.items()
    }
    exchange_table(tmp_path, replace(table, state_width=width, rows=rows))

    widths = rf"state and statistics of widths \({width}, 0\), expected \(3, 0\)"
    message = rf"{widths} for optimizer 'adagrad' and dim 3"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        ParameterStore().load(str(tmp_path))


@pytest.mark.parametrize("text", [b"0", b'""', b"[]", b"{", b"[" * 10**6])
def test_attachment_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    ParameterStore().save(SaveRequest(url=str(tmp_path / "saved"), attachments={"x.json": text}))

    with pytest.raises(CheckpointError, match=r"attachments/x\.json is"):
        Checkpoint.open(tmp_path / "saved").json_attachment("x.json")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a checkpoint in it, and a checkpoint outside."""
    for name in ("root/saved", "root-like/saved"):
        fake_counting_model(1).save(tmp_path / name)
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
    with pytest.raises(CheckpointError, match=r"cannot be the URL of a checkpoint"):
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
