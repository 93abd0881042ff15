"""The manifest: round trips through JSON, and errors."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.limits import MAX_TABLES, MAX_TOTAL_SHARDS
from ctr_ps.protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    InitializerSpec,
    OptimizerSpec,
    ScheduleSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.protos.store import WorkerProgress
from ctr_ps.ps_server.checkpoint.files.manifest import (
    Attachment,
    CountersEntry,
    DenseEntry,
    Entry,
    Manifest,
    ShardBatch,
    Share,
    TableEntry,
    manifest_from_json,
    manifest_to_json,
    require_whole,
    shard_digests,
    share_from_json,
    share_to_json,
)
from tests.support.checkpoints import signed

WIDE = TableEntry(
    file="table.wide.server-0.arrow",
    size_bytes=4096,
    table="wide",
    state_width=2,
    batches=(ShardBatch(shard=0, rows=3, xxh3="ab" * 16),),
)
MLP = DenseEntry(
    file="dense.mlp.server-0.arrow",
    size_bytes=512,
    block="mlp",
    start=0,
    length=10,
    num_states=2,
    scalars=(0.8999999761581421, 1e-45),
    xxh3="cd" * 16,
)


CANDIDATES = replace(
    WIDE,
    kind="candidates",
    file="candidates.wide.server-0.arrow",
    state_width=0,
    statistics_width=4,
    batches=(ShardBatch(shard=0, rows=3, xxh3="ab" * 16, statistics_xxh3="ba" * 16),),
)
COUNTERS = CountersEntry(
    file="counters.wide.server-0.arrow",
    size_bytes=100,
    table="wide",
    batches=(ShardBatch(shard=0, rows=64, xxh3="ac" * 16),),
)
WORKERS = {
    2: WorkerProgress(incarnation=2**63, sequence=7, step=9, position='{"file": "a"}'),
    10: WorkerProgress(incarnation=1, sequence=0, step=1, position=""),
}


def test_share_survives_json() -> None:
    share = Share(entries=(WIDE, MLP, CANDIDATES, COUNTERS), version=9, workers=WORKERS)

    assert share_from_json(share_to_json(share)) == share


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '{"entries": [{"file": "x"}]}'])
def test_other_text_is_no_share(text: str) -> None:
    with pytest.raises(CheckpointError, match="do all servers run the same release"):
        share_from_json(text)


MANIFEST = Manifest(
    data_folder="data-" + "0f" * 16,
    created=1.5e9,
    version=9,
    workers=WORKERS,
    model_digest="ef" * 32,
    tables=(
        TableSpec(
            name="wide",
            dim=1,
            initializer=InitializerSpec(),
            optimizer=OptimizerSpec(name="ftrl", params={"learning_rate": 0.1, "beta": 1e-3}),
            seed=2**64 - 1,
            num_shards=1,
        ),
    ),
    blocks=(
        DenseSpec(
            name="mlp",
            segments=(
                DenseSegment(length=4, initializer=InitializerSpec(kind="normal", scale=0.1)),
                DenseSegment(length=6, initializer=InitializerSpec()),
            ),
            optimizer=OptimizerSpec(name="adam"),
        ),
    ),
    entries=(WIDE, MLP),
    attachments={"job.toml": Attachment(size_bytes=3, sha256="01" * 32)},
)


def test_manifest_written_by_an_earlier_release_still_reads() -> None:
    """`manifest.v3.json` has the bytes of format version 3."""
    text = (Path(__file__).parent / "manifest.v3.json").read_bytes()
    removed = replace(
        WIDE, kind="removed", file="removed.wide.server-0.arrow", state_width=0, passes=2
    )
    delta = replace(
        MANIFEST,
        kind="delta",
        base="epoch-1",
        base_sha256="23" * 32,
        model_digest="",
        entries=(WIDE, replace(CANDIDATES, state_width=2), COUNTERS, MLP, removed),
        tables=(
            replace(
                MANIFEST.tables[0],
                optimizer=OptimizerSpec(name="ftrl", params={"alpha": 0.1, "beta": 1e-30}),
            ),
        ),
    )

    assert manifest_from_json(text, "x") == delta
    before, again = json.loads(text), json.loads(manifest_to_json(delta))
    # Added since:
    assert [block.pop("values_digest") for block in again["blocks"]] == [0]
    assert [table.pop("is_bfloat16") for table in again["tables"]] == [False]
    assert again.pop("batches") == 0
    for progress in again["workers"].values():
        of_streams = ("partitions", "sent", "sent_partitions")
        assert [progress.pop(name) for name in of_streams] == [{}, 0, {}]
    for spec in (*again["tables"], *again["blocks"]):
        assert spec["optimizer"].pop("schedule") is None
    for block in again["blocks"]:
        for each in block["segments"]:
            assert [each.pop(name) for name in ("name", "shape", "values")] == ["", [], []]
    del before["sha256"], again["sha256"]
    assert again == before


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ".", ""])
@pytest.mark.parametrize("place", ["entry", "attachment", "data", "base"])
def test_name_that_leads_out_of_the_folder_is_refused(place: str, name: str) -> None:
    changes = {
        "entry": {"entries": (replace(WIDE, file=name), MLP)},
        "attachment": {"attachments": {name: MANIFEST.attachments["job.toml"]}},
        "data": {"data_folder": f"data-{name}"},
        "base": {"base": name},
    }
    text = manifest_to_json(replace(MANIFEST, **changes[place]))

    with pytest.raises(CheckpointError, match=r"saved/M\.json is not a manifest: .* match pattern"):
        manifest_from_json(text.encode(), "saved/M.json")


def test_formatting_of_the_manifest_means_nothing() -> None:
    document = json.loads(manifest_to_json(MANIFEST))

    text = json.dumps(dict(reversed(document.items())), indent=4)

    assert manifest_from_json(text.encode(), "x") == MANIFEST


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        pytest.param('"seed": 0', '"seed": 1', "altered.*does not match its sha256", id="number"),
        pytest.param('"ftrl"', '"sgd"', "altered.*does not match its sha256", id="text"),
        pytest.param(
            '"sha256": "', '"sha256": "0', "altered.*does not match its sha256", id="checksum"
        ),
        pytest.param('"seed": 0', '"seed": 0, "extra": 0', "altered", id="additional"),
        pytest.param('"format_version": 3', '"format_version": 1', "version 1; .*3", id="version"),
        pytest.param('"format_version"', '"version"', "version None", id="no-version"),
        pytest.param("{", "", "is not JSON, was it truncated", id="syntax"),
        pytest.param("wide", "wide\\", "is not JSON", id="escape"),
    ],
)
def test_altered_manifest_is_refused_by_name(old: str, new: str, message: str) -> None:
    text = manifest_to_json(MANIFEST)
    assert old in text

    with pytest.raises(CheckpointError, match=f"^saved/M.json .*{message}"):
        manifest_from_json(text.replace(old, new).encode(), "saved/M.json")


@pytest.mark.parametrize("text", [b"", b"[]", b"1", b"\xff", b"null"])
def test_other_text_is_no_manifest(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^saved/M\.json is not"):
        manifest_from_json(text, "saved/M.json")


def test_manifest_that_lacks_a_field_says_which() -> None:
    document = json.loads(manifest_to_json(MANIFEST))
    del document["entries"][0]["state_width"]

    with pytest.raises(
        CheckpointError, match=r"saved/M\.json is not a manifest: entries\.0\..*state_w"
    ):
        manifest_from_json(signed(document), "saved/M.json")


def test_shard_digests_are_those_of_all_files() -> None:
    second = replace(WIDE, table="deep", batches=(ShardBatch(shard=7, rows=1, xxh3="12" * 16),))

    found = shard_digests([WIDE, MLP, CANDIDATES, COUNTERS, second])

    assert found == {("wide", 0): b"\xab" * 16, ("deep", 7): b"\x12" * 16}


def piece(start: int, stop: int) -> DenseEntry:
    return replace(MLP, start=start, length=stop - start)


@pytest.mark.parametrize("bounds", [[0, 10], [0, 3, 10], [0, 0, 1, 10, 10]])
def test_pieces_that_cover_a_block_in_any_order_are_whole(bounds: list[int]) -> None:
    pieces = [piece(start, stop) for start, stop in pairwise(bounds)]

    require_whole(replace(MANIFEST, entries=(*reversed(pieces), WIDE)), "x")


def test_block_without_elements_is_whole_with_its_file() -> None:
    empty = replace(MANIFEST, blocks=(replace(MANIFEST.blocks[0], segments=()),))

    require_whole(replace(empty, entries=(piece(0, 0), WIDE)), "x")
    with pytest.raises(CheckpointError, match="'mlp' has 0 elements"):
        require_whole(replace(empty, entries=(WIDE,)), "x")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        pytest.param((WIDE,), "'mlp' has 10 elements.*hold the ranges []", id="no-piece"),
        pytest.param((WIDE, piece(0, 9)), "hold the ranges [(0, 9)]", id="end-missing"),
        pytest.param((WIDE, piece(1, 10)), "hold the ranges [(1, 10)]", id="start-missing"),
        pytest.param((WIDE, piece(0, 4), piece(5, 10)), "(0, 4), (5, 10)", id="gap"),
        pytest.param((WIDE, piece(0, 6), piece(5, 10)), "(0, 6), (5, 10)", id="overlap"),
        pytest.param((WIDE, MLP, MLP), "(0, 10), (0, 10)", id="piece-twice"),
        pytest.param((MLP,), "'wide' needs each of its 1 shards.*hold shards []", id="no-shard"),
        pytest.param((WIDE, WIDE, MLP), "hold shards [0, 0]", id="shard-twice"),
        pytest.param(
            (WIDE, MLP, replace(WIDE, table="deep", file="deep.arrow")),
            "['deep.arrow'] belong to tables or dense blocks that the manifest does not declare",
            id="undeclared-table",
        ),
        pytest.param(
            (WIDE, MLP, replace(MLP, block="wide", file="odd.arrow")),
            "['odd.arrow'] belong to tables or dense blocks that the manifest does not declare",
            id="undeclared-block",
        ),
        pytest.param(
            (WIDE, replace(WIDE, batches=(), state_width=3), MLP),
            "rows of table 'wide' in table.wide.server-0.arrow have state and statistics of widths (3, 0), "
            "expected (2, 0) for optimizer 'ftrl' and dim 1",
            id="state-widths",
        ),
        pytest.param(
            (WIDE, replace(WIDE, batches=(), statistics_width=4), MLP),
            "have state and statistics of widths (2, 4), expected (2, 0)",
            id="statistics-widths",
        ),
        pytest.param(
            (WIDE, MLP, replace(CANDIDATES, statistics_width=5)),
            "candidates of table 'wide' in candidates.wide.server-0.arrow have "
            "state and statistics of widths (0, 5), expected (0, 4)",
            id="widths-of-candidates",
        ),
        pytest.param(
            (replace(WIDE, dtype="float16"), MLP),
            "weights of float16, expected float32",
            id="dtype",
        ),
        pytest.param(
            (replace(WIDE, batches=(ShardBatch(shard=0, rows=2**40, xxh3="ab" * 16),)), MLP),
            "too few for 21990232555520 bytes",
            id="more-rows-than-bytes",
        ),
        pytest.param(
            (WIDE, MLP, replace(COUNTERS, batches=(replace(COUNTERS.batches[0], rows=101),))),
            "too few for 101 bytes",
            id="more-counters-than-bytes",
        ),
        pytest.param(
            (WIDE, replace(MLP, size_bytes=119)),
            "dense.mlp.server-0.arrow has 119 bytes, too few for 120",
            id="more-elements-than-bytes",
        ),
        pytest.param(
            (WIDE, MLP, replace(COUNTERS, batches=())), "hold shards []", id="no-counters"
        ),
        pytest.param(
            (WIDE, MLP, replace(COUNTERS, table="deep", file="odd.arrow")),
            "['odd.arrow'] belong to tables or dense blocks that the manifest does not declare",
            id="undeclared-counters",
        ),
        pytest.param(
            (WIDE, piece(0, 5), replace(piece(5, 10), scalars=())),
            "has 2 state values per element and 0 scalars, expected (2, 2) for optimizer 'adam' of dense "
            "block 'mlp'",
            id="scalars",
        ),
    ],
)
def test_entries_that_are_not_whole_are_refused(entries: tuple[Entry, ...], message: str) -> None:
    pattern = "^saved/M.json: .*" + re.escape(message).replace(r"\.\*", ".*")

    with pytest.raises(CheckpointError, match=pattern):
        require_whole(replace(MANIFEST, entries=entries), "saved/M.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"num_shards": 10**9}, "has 1000000000 shards", id="shards-without-end"),
        pytest.param(
            {"optimizer": OptimizerSpec(name="magic")}, "unknown optimizer 'magic'", id="optimizer"
        ),
        pytest.param(
            {
                "optimizer": OptimizerSpec(
                    name="sgd", params={"learning_rate": 0.1}, schedule=ScheduleSpec(kind="step")
                )
            },
            "step_size of schedule 'step' is 0",
            id="schedule",
        ),
        pytest.param(
            {
                "statistics": StatisticsSpec(),
                "admission": AdmissionSpec(table="gone", policy="score"),
            },
            "by the score of table 'gone', which is not declared",
            id="admission",
        ),
    ],
)
def test_spec_that_no_job_could_declare_is_refused(changes: dict[str, Any], message: str) -> None:
    manifest = replace(MANIFEST, tables=(replace(MANIFEST.tables[0], **changes),))

    with pytest.raises(CheckpointError, match=f"^saved/M.json: .*{message}"):
        require_whole(manifest, "saved/M.json")


def test_block_that_no_job_could_declare_is_refused() -> None:
    (block,) = MANIFEST.blocks
    shrunk = (*block.segments, replace(block.segments[0], length=-4), block.segments[0])
    for changed, message in [
        (replace(block, segments=shrunk), "tensor '' with -4 elements"),
        (replace(block, optimizer=OptimizerSpec(name="adagrad_row")), "which is for tables only"),
        (replace(block, name="wide"), "tables and dense blocks have equal names"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            require_whole(replace(MANIFEST, blocks=(changed,)), "x")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created", math.nan),
        ("created", 1e300),
        ("created", -1.0),
        ("version", -1),
        ("batches", 2**63),
        ("entries.0.state_width", -1),
        ("entries.0.size_bytes", -1),
        ("entries.0.batches.0.rows", -3),
        ("entries.0.batches.0.shard", 2**63),
        ("entries.0.batches.0.xxh3", "no hexadecimal"),
        ("entries.0.passes", 10**12),
        ("entries.1.start", -1),
    ],
)
def test_number_out_of_its_range_is_refused(field: str, value: object) -> None:
    document = json.loads(manifest_to_json(MANIFEST))
    *path, last = (int(part) if part.isdigit() else part for part in field.split("."))
    place = document
    for part in path:
        place = place[part]
    place[last] = value

    with pytest.raises(CheckpointError, match=rf"^saved/M\.json is not a manifest: .*{last}"):
        manifest_from_json(signed(document), "saved/M.json")


@pytest.mark.parametrize("depth", [500, 10**6])
def test_manifest_that_is_nested_without_end_is_damaged(depth: int) -> None:
    text = b'{"x": ' + b"[" * depth + b"]" * depth + b"}"

    with pytest.raises(CheckpointError, match=r"^saved/M\.json"):
        manifest_from_json(text, "saved/M.json")


def test_progress_out_of_its_range_is_refused() -> None:
    workers = {0: WorkerProgress(incarnation=1, sequence=0, step=-1, position="")}

    with pytest.raises(CheckpointError, match="progress of worker 0"):
        require_whole(replace(MANIFEST, workers=workers), "x")


@pytest.mark.parametrize(
    ("number", "num_shards", "message"),
    [
        (MAX_TOTAL_SHARDS // 4096 + 1, 4096, r"its tables have 69632 shards, more than 65536"),
        (2 * MAX_TABLES, 1, r"it has 513 tables and dense blocks, more than 512"),
    ],
)
def test_tables_that_are_too_many_together_are_refused(
    number: int, num_shards: int, message: str
) -> None:
    (table,) = MANIFEST.tables
    tables = tuple(
        replace(table, name=f"table-{index}", num_shards=num_shards) for index in range(number)
    )

    with pytest.raises(CheckpointError, match=message):
        require_whole(replace(MANIFEST, tables=tables), "x")
