"""Checkpoints of a cluster that are not what was saved."""

import itertools
import threading
from pathlib import Path

import pytest

from protos.errors import CheckpointError
from ps_server.store import ParameterStore
from ps_worker.worker import Worker
from tests.contract.test_store import declare, random_gradients, stamp
from tests.support.cluster import cluster
from tests.support.training import job, random_batches, small_model, together, train_worker


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
        altered = max(folder.glob("data-*/table.deep.*.arrow"))
        content = bytearray(altered.read_bytes())
        content[len(content) // 2] ^= 1
        altered.write_bytes(content)

        with pytest.raises(CheckpointError, match="deep"):
            store.load(str(folder))

        assert store.digest() == before


def test_model_is_saved_while_another_worker_trains(tmp_path) -> None:
    """Worker 0 alone, in the middle of asynchronous training: what was saved is whole, of its own digest."""
    settings = job("async")
    with cluster(num_servers=2, num_workers=2) as servers:
        client, other = servers.client(), servers.client()
        is_saved = threading.Event()

        def train() -> None:
            batches = itertools.takewhile(
                lambda _: not is_saved.is_set(), itertools.cycle(random_batches(20, 8, seed=1))
            )
            train_worker(other, batches, settings, worker=1, num_workers=2, is_embedded=False)

        def save() -> None:
            with Worker(
                client, small_model(), settings, index=0, num_workers=2, is_embedded=False
            ) as worker:
                try:
                    for number in range(5):
                        digest = worker.save(str(tmp_path / str(number)), {})
                        loaded = ParameterStore()
                        loaded.load(str(tmp_path / str(number)))
                        assert loaded.digest() == digest
                finally:
                    is_saved.set()
                worker.meet("end")

        together(train, save)
