"""`ps-top`: what it shows of real servers, and in a terminal."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ctr_ps.protos.errors import TransportError, UnknownCallerError
from ctr_ps.protos.gradients import Gradients, SparseGrad
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import (
    PushId,
    SaveRequest,
    SaveStatus,
    ServerStatus,
    Staleness,
    StoreStatus,
    WorkerProgress,
)
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.cluster.client import ClusterClient
from ctr_ps.ps_worker.data.streams.stream_data import StreamPosition
from ctr_ps.ps_worker.extras.watching.top import SERVERS, Look, Servers, drawn, main
from tests.support.cluster import cluster
from tests.support.commands import Done, in_this_process
from tests.support.processes import heeded
from tests.support.stores import push_id

TOP = Path(sys.executable).parent / "ps-top"
TOKEN = "reader-0123456789"
ROOT = Path(__file__).parents[4]
PICTURES = ROOT / ".cache/pictures"
"""Kept to be looked at."""


def text_of(endpoints: list[str], looks: list[Look]) -> str:
    console = Console(width=140, file=io.StringIO())
    with console.capture() as capture:
        console.print(drawn(endpoints, looks))
    return capture.get()


def status(examples: int, **changes: object) -> ServerStatus:
    store = StoreStatus(
        **{
            "version": 1,
            "tables": {},
            "examples": {0: examples},
            "left": frozenset(),
            "staleness": Staleness(),
            "progress": {},
            **changes,
        }
    )
    return ServerStatus(store, 0, 1)


def test_rates_are_drawn_as_bars_and_leave_out_looks_without_an_answer() -> None:
    away = TransportError("gone")
    looks = [
        Look(0.0, [status(0)]),
        Look(2.0, [status(100)]),
        Look(4.0, [away]),
        Look(6.0, [status(900)]),
    ]

    shown = text_of(["ps-0:1"], looks)

    assert "examples/s ▃█ 200" in shown  # 50 and 200
    assert "1 of 1 servers answer" in shown


def test_server_that_is_away_is_shown_with_the_reason() -> None:
    shown = text_of(["ps-0:1", "ps-1:1"], [Look(0.0, [status(5), TransportError("it is gone")])])

    assert "1 of 2 servers answer" in shown
    assert re.search(r"ps-1:1\s+it is gone", shown)


def test_job_that_has_more_servers_than_were_named_is_told() -> None:
    found = replace(status(5), num_servers=2)

    shown = text_of(["ps-0:1"], [Look(0.0, [found])])

    assert "1 of 1 servers answer (the job has 2 servers, 1 are named)" in shown


def test_workers_are_shown_by_state() -> None:
    found = status(5, left=frozenset({1}), lost=frozenset({2}), silent_s={0: 1.25, 2: 33.0})

    shown = text_of(["ps-0:1"], [Look(0.0, [found])])

    assert re.search(r"^0\s+present\s+5\s+1\.2", shown, re.MULTILINE)
    assert re.search(r"^1\s+has left", shown, re.MULTILINE)
    assert re.search(r"^2\s+lost\s+0\s+33\.0", shown, re.MULTILINE)


def test_workers_are_shown_with_their_steps_and_how_far_they_are_behind() -> None:
    steps = {
        worker: WorkerProgress(incarnation=1, sequence=0, step=step, position="")
        for worker, step in enumerate((1_250, 1_200))
    }
    found = status(5, progress=steps, silent_s={0: 0.0, 1: 0.0})

    shown = text_of(["ps-0:1"], [Look(0.0, [found])])

    assert re.search(r"^0\s+present\s+1,250\s+0\s", shown, re.MULTILINE)
    assert re.search(r"^1\s+present\s+1,200\s+50\s", shown, re.MULTILINE)


def test_workers_on_a_stream_are_shown_with_the_age_of_their_newest_row() -> None:
    of_files = WorkerProgress(incarnation=1, sequence=0, step=1, position="part-0:7")
    a_minute_ago = int(1000 * (time.time() - 63.0))
    position = StreamPosition(epoch=1, rows=3, time_ms=a_minute_ago, partitions={"clicks/0": "9"})
    of_stream = replace(of_files, position=position.to_json(), partitions=position.partitions)

    files = status(5, progress={0: of_files})
    both = status(5, progress={0: of_files, 1: of_stream}, silent_s={0: 1.0, 1: 2.0})

    without = text_of(["ps-0:1"], [Look(0.0, [files])])
    shown = text_of(["ps-0:1"], [Look(0.0, [both])])

    assert "newest row" not in without
    assert "silent, s  newest row, s ago\n" in shown
    assert re.search(r"^0\s+present\s+1\s+0\s+5\s+1\.0\s*$", shown, re.MULTILINE)
    assert re.search(r"^1\s+present\s+1\s+0\s+0\s+2\.0\s+63\s*$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        (None, "none"),
        (
            SaveStatus(pause_s=0.0125, duration_s=2.5, is_over=True, number=3),
            "3: 2.5 s, pause 12 ms",
        ),
        (SaveStatus(pause_s=0.0125, duration_s=0.0, is_over=False), "1 is being written"),
    ],
)
def test_last_save_is_shown_with_its_cost(save: SaveStatus | None, expected: str) -> None:
    shown = text_of(["ps-0:1"], [Look(0.0, [status(5, last_save=save)])])

    assert re.search(rf"^ps-0:1 .* {expected}\s*$", shown, re.MULTILINE)


def pushed(client: ClusterClient, num_keys: int, push: PushId) -> None:
    keys = np.arange(num_keys, dtype=np.uint64)
    grad = SparseGrad(keys, np.ones((num_keys, 2), np.float32), 1)
    client.push_grad(Gradients(sparse={"embedding": grad}), push).result()


def declared(client: ClusterClient) -> None:
    client.create_table(
        TableSpec(
            name="embedding",
            dim=2,
            initializer=InitializerSpec(),
            optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
        )
    )


def test_once_prints_the_status_of_real_servers(tmp_path: Path, top: Callable[..., Done]) -> None:
    with cluster(num_servers=2) as servers:
        client = servers.client()
        declared(client)
        pushed(client, 1000, push_id(examples=7))
        client.save(SaveRequest(url=str(tmp_path / "model")))

        done = top("--once", ",".join(servers.endpoints))

    assert done.code == 0, done.err
    first = done.out.splitlines()[0]
    assert first.startswith("2 of 2 servers answer  version 1  batches 1  examples 7  staleness")
    assert first.endswith("largest 0"), "a pipe has no columns at which lines are wrapped"
    assert re.search(r"embedding\s+1,000", done.out)
    for endpoint in servers.endpoints:
        assert re.search(rf"{endpoint}\s+1\s+\d+.*1: \d+\.\d s", done.out)


@pytest.fixture
def top(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Calls the entry point, where output is no terminal."""
    monkeypatch.delenv(SERVERS, raising=False)
    return in_this_process("ps-top", main, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ((), 2, "no servers: name them"),
        (("--once", "127.0.0.1:1"), 4, "none of 127.0.0.1:1 answers"),
        (("--once", "127.0.0.1"), 2, "has '127.0.0.1', expected host:port"),
        (("--once", "127.0.0.1:1,127.0.0.1:1"), 2, "has 127.0.0.1:1 more than once"),
        (("127.0.0.1:1",), 2, "not a terminal: use --once"),
    ],
)
def test_without_servers_it_says_why(
    arguments: tuple[str, ...], code: int, why: str, top: Callable[..., Done]
) -> None:
    done = top(*arguments)

    assert (done.code, why in done.err) == (code, True), done.err


def test_server_that_has_two_names_is_refused(top: Callable[..., Done]) -> None:
    with cluster(num_servers=1) as servers:
        (endpoint,) = servers.endpoints
        other = endpoint.replace("127.0.0.1", "localhost")

        done = top("--once", f"{endpoint},{other}")

    assert done.code == 2
    assert f"{endpoint} and {other} are both server 0" in done.err


def test_spares_are_named_as_that(top: Callable[..., Done]) -> None:
    with cluster(num_servers=1) as servers:
        spares = [servers.start_spare() for _ in range(2)]

        done = top("--once", ",".join([*servers.endpoints, *spares]))

    assert done.code == 0, done.err
    assert re.findall(r"(\S+) \(spare\)", done.out) == spares


def test_caller_that_every_server_refuses_is_told_so(
    top: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CTR_PS_TOKEN", "another-0123456789")
    with cluster(num_servers=0) as servers:
        for index in range(2):
            store = ParameterStore(num_workers=1, server_index=index, num_servers=2)
            servers.start_server(store, credentials=Credentials(token=TOKEN))
        done = top("--once", ",".join(servers.endpoints))

    assert done.code == 15
    assert "refuse this caller" in done.err.splitlines()[-1]


def read_from(terminal: int) -> str:
    """Returns what is there; nothing after the last process has closed its side."""
    with suppress(OSError):
        if select.select([terminal], [], [], 0.02)[0]:
            return os.read(terminal, 65536).decode(errors="replace")
    return ""


def test_token_is_shown_also_after_it_was_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctr_ps.protos.wire.security.credentials.LOOK_S", 0.0)
    first, second = "first-0123456789", "second-0123456789"
    known, shown = tmp_path / "known", tmp_path / "shown"
    known.write_text(f"reader {first}\n")
    shown.write_text(first)
    monkeypatch.setenv("CTR_PS_TOKEN_FILE", str(shown))
    with cluster(num_servers=0) as servers:
        servers.start_server(ParameterStore(), credentials=Credentials(token_file=str(known)))
        with Servers(servers.endpoints) as watched:
            found = watched.look(20.0)
            known.write_text(f"reader {second}\n")
            found += watched.look(20.0)
            shown.write_text(second)
            found += watched.look(20.0)

    assert [type(each) for each in found] == [ServerStatus, UnknownCallerError, ServerStatus]


def test_terminal_shows_a_curve_that_moves_until_ctrl_c() -> None:
    with cluster(num_servers=1) as servers:
        client = servers.client()
        declared(client)
        ours, theirs = pty.openpty()
        with heeded(signal.SIGINT):  # also where these tests run in the background of a shell
            started = subprocess.Popen(
                [TOP, "--every", "0.2", *servers.endpoints],
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
                env={**os.environ, "COLUMNS": "140", "LINES": "40", "TERM": "xterm-256color"},
            )
        with started as process:
            os.close(theirs)
            try:
                seen, end = "", time.monotonic() + 60
                # Bars of several heights: some looks saw more pushes than others.
                while len(set(re.findall("[▂-█]", seen))) < 2 and time.monotonic() < end:
                    pushed(client, 10, push_id(examples=1 + len(seen) % 977))
                    seen += read_from(ours)
                process.send_signal(signal.SIGINT)
                while process.poll() is None and time.monotonic() < end:
                    seen += read_from(ours)
                _, error = process.communicate(timeout=60)
            finally:
                process.kill()
                os.close(ours)

    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / "ps-top.txt").write_text(seen)
    assert len(set(re.findall("[▂-█]", seen))) >= 2
    assert (process.returncode, error) == (0, b"")
