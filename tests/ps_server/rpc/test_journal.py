"""A server that keeps an update log: its snapshots, what waits for them, and what it recovers from."""

import threading
from pathlib import Path

import pytest

from protos.errors import CheckpointError, LogError
from protos.wire import calls, requests
from ps_server.durability.saved_log import read_log
from ps_server.durability.update_log import UpdateLog
from ps_server.rpc.handlers import Handlers
from ps_server.rpc.journal import UpdateJournal, state_records
from ps_server.rpc.recovery import recover
from ps_server.settings import LogSync
from ps_server.store import ParameterStore
from tests.support.stores import INCARNATION, member

LIMIT_S = 5.0


def test_calls_are_carried_out_while_the_log_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of minutes takes seconds to sync; only what comes meanwhile is synced while calls wait."""
    store = ParameterStore()
    head = state_records(store, {}, base="")
    log = UpdateLog.create(read_log(tmp_path), sync=LogSync.OS, head=head)
    journal = UpdateJournal(log, store, dict, wait_limit_s=LIMIT_S)
    carried_out = threading.Event()
    found: list[bool] = []

    def call() -> None:
        with journal.new_job():
            carried_out.set()

    thread = threading.Thread(target=call)

    def sync() -> None:
        if not found:
            thread.start()
            found.append(carried_out.wait(LIMIT_S))

    monkeypatch.setattr(log, "sync", sync)
    journal.snapshot(
        "token", lambda around, on_taken: store.snapshot("token", "", around, on_taken)
    )
    thread.join()
    log.close()

    assert found == [True]
    assert log.num_appended == 1


def test_snapshot_that_is_asked_for_twice_begins_one_segment(tmp_path: Path) -> None:
    """A second one would have pushes that came since, which the checkpoint has not."""
    store = ParameterStore()
    head = state_records(store, {}, base="")
    log = UpdateLog.create(read_log(tmp_path), sync=LogSync.OS, head=head)
    handlers = Handlers(store)
    handlers.keep_journal(UpdateJournal(log, store, dict, wait_limit_s=LIMIT_S))
    store.join(0, INCARNATION, terms={}).result()
    snapshot = requests.Snapshot(token="token", member=member())

    handlers.start(calls.SNAPSHOT, snapshot).result()
    handlers.start(calls.SNAPSHOT, snapshot).result()

    assert log.segment == 2
    log.close()


def test_call_that_fails_for_another_reason_ends_the_recovery(tmp_path: Path) -> None:
    """A server that went on without the checkpoint it had loaded would have fresh rows."""
    first = ParameterStore()
    head = state_records(first, {}, base="")
    log = UpdateLog.create(read_log(tmp_path / "log"), sync=LogSync.OS, head=head)
    handlers = Handlers(first)
    handlers.keep_journal(UpdateJournal(log, first, dict, wait_limit_s=LIMIT_S))
    handlers.start(calls.JOIN, requests.Join(member=member(), terms={})).result()
    load = requests.Load(url=f"{tmp_path}/away", member=member())
    with pytest.raises(CheckpointError):
        handlers.start(calls.LOAD, load)
    log.close()

    store = ParameterStore()
    replay = Handlers(store).replay
    with pytest.raises(
        LogError, match=r"Load of the update log cannot be carried out again: .*away"
    ):
        recover(store, read_log(tmp_path / "log"), replay=replay, restore_shrinks=lambda _: None)
