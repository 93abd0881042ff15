"""Formats of neighbours: what a server of this release makes of processes and logs of others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import LogError, ProtocolError
from ctr_ps.protos.format import FORMAT
from ctr_ps.protos.gradients import SparseGrad
from ctr_ps.protos.placement import FIRST_EPOCH
from ctr_ps.protos.wire import calls, requests
from ctr_ps.ps_server.durability.segments import Record
from ctr_ps.ps_server.engine.journal import NO_JOURNAL
from ctr_ps.ps_server.rpc import journal
from ctr_ps.ps_server.rpc.handlers import Handlers
from ctr_ps.ps_server.rpc.server import Server
from ctr_ps.ps_server.settings import ServerSettings
from ctr_ps.ps_server.store import ParameterStore
from tests.support.releases import RELEASES, ROOT, changed
from tests.support.stores import DEEP, KEYS, in_process, member, push_id
from tests.support.update_logs import (
    append_all,
    begun_log,
    new_log,
    read_head,
    read_records,
    recovered,
    resumed_log,
)

NEIGHBOURS = [FORMAT - 1, FORMAT, FORMAT + 1]


@contextmanager
def written_as(format: int, version: str = "9.9.9") -> Iterator[None]:
    """What a server writes to its log is of another format, and another version of the package."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ctr_ps.ps_server.rpc.journal.FORMAT", format)
        patched.setattr("ctr_ps.ps_server.rpc.journal.own_version", lambda: version)
        yield


def log_of(folder: Path, format: int) -> ParameterStore:
    """Returns a store after a push, whose log another release has written."""
    store = in_process()
    with written_as(format):
        handlers, log = begun_log(folder, store)
    join(handlers)
    gradients = SparseGrad(KEYS, np.ones((KEYS.size, DEEP.dim), np.float32), 1)
    push = requests.PushGrad(
        chunk=PushChunk([("deep", gradients)], []),
        push_id=push_id(sequence=0),
        shard_map_epoch=FIRST_EPOCH,
    )
    handlers.start(calls.PUSH_GRAD, push).result()
    log.close()
    store.engine.journal = NO_JOURNAL
    return store


def join(handlers: Handlers, format: int = FORMAT, worker: int = 0) -> None:
    request = requests.Join(member=member(worker), terms={}, format=format)
    handlers.start(calls.JOIN, request).result()


def altered_head(folder: Path, target: Path, change: Any) -> None:
    """Writes a log whose state is that of another one after a change of its JSON."""
    first, *others = read_head(folder, 1)
    state = json.loads(first.payload)
    change(state)
    head = [Record(first.kind, json.dumps(state).encode()), *others]
    with new_log(target, head=head) as log:
        append_all(log, read_records(folder))


async def serve_once(folder: Path) -> None:
    """A server of this release takes over a log, and ends."""
    store = ParameterStore(num_workers=1, has_update_log=True)
    settings = ServerSettings(update_log=str(folder))
    server = Server(store.engine, settings, address="127.0.0.1:0")
    await server.start()
    try:
        await server.recover()
    finally:
        await server.stop()


@pytest.mark.parametrize("format", NEIGHBOURS)
def test_log_of_a_neighbour_is_recovered(format: int, tmp_path: Path) -> None:
    before = log_of(tmp_path, format)

    after = ParameterStore()
    recovered(tmp_path, after)

    assert after.digest() == before.digest()


@pytest.mark.parametrize("format", [FORMAT - 2, FORMAT + 2])
def test_log_of_a_format_two_apart_is_refused_by_name(format: int, tmp_path: Path) -> None:
    log_of(tmp_path, format)

    told = (
        rf"by ctr-ps 9\.9\.9, has format {format} of .* but this process has format {FORMAT}, and"
    )
    with pytest.raises(LogError, match=told):
        recovered(tmp_path, ParameterStore())


def test_log_without_a_format_is_of_the_one_before_the_first(tmp_path: Path) -> None:
    before = log_of(tmp_path / "log", FORMAT)
    altered_head(tmp_path / "log", tmp_path / "old", lambda state: state.pop("format"))
    after = ParameterStore()

    if FORMAT > 1:
        with pytest.raises(LogError, match="has format 0 of"):
            recovered(tmp_path / "old", after)
    else:
        recovered(tmp_path / "old", after)
        assert after.digest() == before.digest()


def test_records_that_a_format_two_apart_has_added_are_refused(tmp_path: Path) -> None:
    """The head is of the release between: its server ended, and a newer one went on with the log."""
    log_of(tmp_path, FORMAT + 1)
    with written_as(FORMAT + 2), resumed_log(tmp_path) as log:
        append_all(log, [journal.resumed_record()])

    with pytest.raises(LogError, match=rf"by ctr-ps 9\.9\.9, has format {FORMAT + 2} of"):
        recovered(tmp_path, ParameterStore())


@pytest.mark.parametrize("format", NEIGHBOURS)
async def test_server_says_where_its_records_begin(format: int, tmp_path: Path) -> None:
    log_of(tmp_path, format)

    for _ in range(2):
        await serve_once(tmp_path)

    said = [each for each in read_records(tmp_path) if each.kind == journal.RESUMED]
    assert said == ([] if format == FORMAT else [journal.resumed_record()])


def test_state_has_fields_that_this_release_does_not_know(tmp_path: Path) -> None:
    before = log_of(tmp_path / "log", FORMAT)

    def add(state: dict[str, Any]) -> None:
        for part in (state, state["owner"], state["job"], state["job"]["members"]):
            part["new"] = {"of": 1}

    altered_head(tmp_path / "log", tmp_path / "new", add)
    after = ParameterStore()
    recovered(tmp_path / "new", after)

    assert after.digest() == before.digest()
    assert after.engine.state().job == before.engine.state().job


def test_state_that_lacks_a_field_is_refused_by_name(tmp_path: Path) -> None:
    """As after a release that writes a new name alone, and so cannot be gone back from."""
    log_of(tmp_path / "log", FORMAT + 1)
    altered_head(tmp_path / "log", tmp_path / "new", lambda state: state["job"].pop("version"))

    told = (
        rf"by ctr-ps 9\.9\.9, has a state of format {FORMAT + 1} that this release, of format {FORMAT}, "
        r"cannot read: start 9\.9\.9 to resume$"
    )
    with pytest.raises(LogError, match=told):
        recovered(tmp_path / "new", ParameterStore())


@pytest.mark.parametrize("in_new_segment", [False, True])
def test_log_with_a_member_two_apart_is_refused(in_new_segment: bool, tmp_path: Path) -> None:
    """It goes on to call: nothing would tell it that the server has been replaced by such a release."""
    store = in_process(num_workers=2)
    handlers, log = begun_log(tmp_path, store)
    join(handlers)
    with pytest.MonkeyPatch.context() as patched:  # the server before was of the release between
        patched.setattr("ctr_ps.ps_server.rpc.handlers.require_format", lambda *_, **__: None)
        patched.setattr(
            "ctr_ps.ps_server.coordination.membership.require_format", lambda *_, **__: None
        )
        join(handlers, FORMAT + 2, worker=1)
        if in_new_segment:
            state = store.engine.state()
            log.begin_segment(journal.state_records(state, handlers.completed(), base=""))
        log.close()

        with pytest.raises(LogError, match=f"^worker 1 has format {FORMAT + 2} of"):
            recovered(tmp_path, in_process(num_workers=2))


@pytest.mark.parametrize("only_asks", [False, True])
def test_process_of_a_format_two_further_does_not_join(only_asks: bool) -> None:
    store = in_process(num_workers=2)
    handlers = Handlers(store.engine)
    join(handlers, FORMAT + 1)
    before = store.engine.state()
    request = requests.Join(
        member=member(1), terms={"mode": "geo"}, format=FORMAT + 2, only_asks=only_asks
    )

    told = f"^worker 1 has format {FORMAT + 2} of .* but this process has format {FORMAT}, "
    with pytest.raises(ProtocolError, match=told):
        handlers.start(calls.JOIN, request)

    assert store.engine.state().job == before.job
    join(handlers, FORMAT, worker=1)
    assert store.engine.job.formats() == {0: FORMAT + 1, 1: FORMAT}


def test_server_says_its_format() -> None:
    handlers = Handlers(in_process().engine)

    assert handlers.start(calls.GET_STATUS, None).result().format == FORMAT


@pytest.mark.parametrize("release", RELEASES)
def test_later_releases_of_the_tests_fit_the_sources(release: str) -> None:
    for file in RELEASES[release]:
        assert changed(release, file, (ROOT / file).read_text()) != (ROOT / file).read_text()
