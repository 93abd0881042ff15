"""Checkpoints of a cluster that are not what was saved."""

from pathlib import Path

import pytest

from protos.errors import CheckpointError
from tests.contract.test_store import declare, random_gradients, stamp
from tests.support.cluster import cluster


def test_altered_checkpoint_is_refused_before_any_server_has_loaded_its_part(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    with cluster(num_servers=3) as servers:
        store = servers.client()
        declare(store)
        store.push_grad(random_gradients(1), stamp()).result()
        store.save(str(folder), {})
        store.push_grad(random_gradients(2), stamp(sequence=1)).result()
        before = store.digest()
        altered = max(folder.glob("table.deep.*.arrow"))
        content = bytearray(altered.read_bytes())
        content[len(content) // 2] ^= 1
        altered.write_bytes(content)

        with pytest.raises(CheckpointError, match="deep"):
            store.load(str(folder))

        assert store.digest() == before
