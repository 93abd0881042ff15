"""The manifest: both ways through JSON, and what it refuses."""

import pytest

from protos.errors import CheckpointError
from ps_server.checkpoint.manifest import (
    DenseEntry,
    ShardBatch,
    TableEntry,
    entries_from_json,
    entries_to_json,
)

WIDE = TableEntry(
    file="table.wide.server-0.arrow",
    size_bytes=4096,
    table="wide",
    state_width=2,
    batches=(ShardBatch(shard=0, rows=3, sha256="ab" * 32),),
)
MLP = DenseEntry(
    file="dense.mlp.server-0.arrow",
    size_bytes=512,
    block="mlp",
    start=0,
    length=10,
    num_states=2,
    scalars=(0.8999999761581421, 1e-45),
    sha256="cd" * 32,
)


def test_entries_survive_json() -> None:
    assert entries_from_json(entries_to_json([WIDE, MLP])) == [WIDE, MLP]


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"file": "x"}]'])
def test_other_text_is_no_list_of_entries(text: str) -> None:
    with pytest.raises(CheckpointError, match="not a list of entries"):
        entries_from_json(text)
