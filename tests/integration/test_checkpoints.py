"""Checkpoints of a cluster that are not what was saved."""

import itertools
import shutil
import threading
from pathlib import Path

import pytest

from ctr_ps.protos.errors import CheckpointError, ProtocolError
from ctr_ps.protos.store import Lease, SaveRequest, WorkerLoss
from ctr_ps.ps_server.checkpoint.files.manifest import Share
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import Folder
from ctr_ps.ps_server.checkpoint.writer import shared_folder
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.connect import connect
from tests.support.cluster import cluster
from tests.support.processes import environment_of, free_port, server_process
from tests.support.s3 import BUCKET
from tests.support.stores import INCARNATION, declare, in_process, push_id, random_gradients
from tests.support.training import (
    job,
    random_batches,
    small_model,
    together,
    train_worker,
    worker_run,
)


def test_altered_checkpoint_is_refused_before_any_server_has_loaded_its_part(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    with cluster(num_servers=3) as servers:
        store = servers.client()
        declare(store)
        store.push_grad(random_gradients(1), push_id()).result()
        store.save(SaveRequest(url=str(folder)))
        store.push_grad(random_gradients(2), push_id(sequence=1)).result()
        before = store.digest()
        altered = max(folder.glob("data-*/table.deep.*.arrow"))
        content = bytearray(altered.read_bytes())
        content[len(content) // 2] ^= 1
        altered.write_bytes(content)

        with pytest.raises(CheckpointError, match="deep"):
            store.load(str(folder))

        assert store.digest() == before


def test_checkpoint_that_is_replaced_while_it_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path / "model")
    verify = Checkpoint.verify

    def verify_and_replace(checkpoint: Checkpoint) -> None:
        verify(checkpoint)
        in_process().save(SaveRequest(url=folder))

    with cluster(num_servers=2) as servers:
        store = servers.client()
        declare(store)
        store.push_grad(random_gradients(1), push_id()).result()
        store.save(SaveRequest(url=folder))
        before = store.digest()
        monkeypatch.setattr(Checkpoint, "verify", verify_and_replace)

        with pytest.raises(CheckpointError, match="was replaced during the load"):
            store.load(folder)

        assert store.digest() == before


def test_model_is_saved_while_another_worker_trains(tmp_path) -> None:
    """Worker 0 alone, in the middle of asynchronous training: what was saved is whole, of its own digest."""
    settings = job("async")
    with cluster(num_servers=2, num_workers=2) as servers:
        client, other = servers.client(joins=False), servers.client(joins=False)
        is_saved = threading.Event()

        def train() -> None:
            batches = itertools.takewhile(
                lambda _: not is_saved.is_set(), itertools.cycle(random_batches(20, 8, seed=1))
            )
            train_worker(other, batches, settings, worker=1, num_workers=2, is_in_process=False)

        def save() -> None:
            with worker_run(
                client, small_model(), settings, worker=0, num_workers=2, is_in_process=False
            ) as worker:
                worker.start()
                try:
                    for number in range(5):
                        digest = worker.save(SaveRequest(url=str(tmp_path / str(number))))
                        loaded = ParameterStore()
                        loaded.load(str(tmp_path / str(number)))
                        assert loaded.digest() == digest
                finally:
                    is_saved.set()
                worker.barrier("end")

        together(train, save)


def test_cluster_keeps_its_checkpoints_in_an_object_store(s3: dict[str, str]) -> None:
    url = f"s3://{BUCKET}/cluster/model"
    with cluster(num_servers=3) as servers:
        store = servers.client()
        declare(store)
        store.push_grad(random_gradients(1), push_id()).result()
        digest = store.save(SaveRequest(url=url, attachments={"note": b"hello"}))
        assert digest == store.digest()
    with cluster(num_servers=2) as servers:
        store = servers.client()
        declare(store)
        store.load(url)

        assert store.digest() == digest
    assert Checkpoint.open(url).attachment("note") == b"hello"


def test_server_that_sees_other_storage_than_the_worker_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(url: str, token: str) -> Folder:
        return shared_folder(f"memory://elsewhere-{token}", token)

    monkeypatch.setattr("ctr_ps.ps_server.engine.engine.shared_folder", elsewhere)
    with cluster(num_servers=2) as servers:
        store = servers.client()
        declare(store)

        with pytest.raises(
            CheckpointError, match=r"127\.0\.0\.1:\d+: this server does not find the"
        ):
            store.save(SaveRequest(url=f"memory://{tmp_path.name}/model"))


def test_server_saves_and_loads_in_its_roots_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    outside = tmp_path / "outside"
    with free_port() as port:
        pass
    with (
        server_process(
            environment_of([port], 0), tmp_path / "log", f"--checkpoint-root={root}",
            "--checkpoint-root=s3://bucket/models",
        ),
        connect([f"127.0.0.1:{port}"], connect_timeout_s=60) as store,
    ):  # fmt: skip
        store.join(0, INCARNATION, terms={}).result()
        declare(store)
        store.push_grad(random_gradients(1), push_id()).result()
        store.save(SaveRequest(url=str(root / "model")))
        shutil.copytree(root / "model", outside)
        (root / "link").symlink_to(outside)
        before = store.digest()

        for url in (outside, root / "link", f"{root}/../outside"):
            with pytest.raises(CheckpointError, match=r"outside of .*root, s3://bucket/models"):
                store.save(SaveRequest(url=str(url)))
            with pytest.raises(CheckpointError, match=r"outside of .*root, s3://bucket/models"):
                store.require_writable(str(url))
            with pytest.raises(CheckpointError, match=r"outside of .*root, s3://bucket/models"):
                store.load(str(url))
        store.require_writable(str(root))
        assert store.digest() == before
        Checkpoint.open(outside).verify()
        store.load(str(root / "model"))


def test_what_a_failed_save_wrote_is_removed_when_no_server_writes_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed, has_ended = threading.Event(), threading.Event()

    def fail(folder: str, token: str, inference: object) -> Share:
        has_failed.set()
        raise CheckpointError("no space")

    with cluster(num_servers=2) as servers:
        store = servers.client()
        declare(store)
        save_share = servers.stores[1].engine.save_share

        def save_late(folder: str, token: str, inference: None) -> Share:
            has_failed.wait(10)
            threading.Event().wait(0.2)  # long enough for the client to hear of the other
            share = save_share(folder, token, inference)
            has_ended.set()
            return share

        monkeypatch.setattr(servers.stores[0].engine, "save_share", fail)
        monkeypatch.setattr(servers.stores[1].engine, "save_share", save_late)

        with pytest.raises(CheckpointError, match="no space"):
            store.save(SaveRequest(url=str(tmp_path / "model")))

        assert has_ended.is_set()
    assert not list(tmp_path.iterdir())


def test_process_without_its_place_publishes_nothing(tmp_path: Path) -> None:
    lease = Lease(seconds=60.0, on_worker_loss=WorkerLoss.WAIT)
    with cluster(num_servers=2) as servers:
        paused, successor = servers.client(joins=False), servers.client(joins=False)
        paused.join(0, 5, terms={}, lease=lease).result()
        declare(paused)
        paused.confirm_place(0)
        for store in servers.stores:
            store.engine.lose([0])
        # Saved while it has lost the place, and before another one has it: it is back.
        paused.save(SaveRequest(url=str(tmp_path / "epoch-1")))
        for store in servers.stores:
            store.engine.lose([0])
        successor.join(0, 6, terms={}, lease=lease).result()

        with pytest.raises(ProtocolError, match="another process has taken the place of"):
            paused.confirm_place(0)
        with pytest.raises(ProtocolError, match="another process has taken the place of"):
            paused.save(SaveRequest(url=str(tmp_path / "epoch-2")))

        declare(successor)
        successor.confirm_place = paused.confirm_place  # as if it lost the place while it saves
        with pytest.raises(ProtocolError, match="another process has taken the place of"):
            successor.save(SaveRequest(url=str(tmp_path / "epoch-2")))
    assert [path.parent.name for path in tmp_path.glob("*/MANIFEST.json")] == ["epoch-1"]
