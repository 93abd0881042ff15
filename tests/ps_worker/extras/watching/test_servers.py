"""Looking at servers, also those that ask for a token, and their versions as lines."""

import io
import sys
from pathlib import Path

import pytest

from ctr_ps.protos.errors import UnknownCallerError
from ctr_ps.protos.store import ServerStatus
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.watching.servers import Servers, main, versions_of
from tests.support.cluster import cluster
from tests.support.processes import free_port

FIRST, SECOND = "first-0123456789", "second-0123456789"
ANSWER_S = 20.0


def test_token_is_shown_also_after_it_was_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctr_ps.protos.wire.security.credentials.LOOK_S", 0.0)
    known, shown = tmp_path / "known", tmp_path / "shown"
    known.write_text(f"reader {FIRST}\n")
    shown.write_text(FIRST)
    monkeypatch.setenv("CTR_PS_TOKEN_FILE", str(shown))
    with cluster(num_servers=0) as servers:
        servers.start_server(ParameterStore(), credentials=Credentials(token_file=str(known)))
        with Servers(servers.endpoints) as watched:
            found = watched.look(ANSWER_S)
            known.write_text(f"reader {SECOND}\n")
            found += watched.look(ANSWER_S)
            shown.write_text(SECOND)
            found += watched.look(ANSWER_S)

    assert [type(each) for each in found] == [ServerStatus, UnknownCallerError, ServerStatus]


def test_versions_are_those_of_all_servers_and_none_of_one_that_is_away() -> None:
    with cluster(num_servers=2) as servers, free_port() as port:
        endpoints = [*servers.endpoints, f"127.0.0.1:{port}"]
        servers.client().resume(7, {})

        with Servers(endpoints) as watched:
            assert versions_of(watched, ANSWER_S) == [7, 7, None]


def test_watching_ends_when_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe(io.StringIO):
        def flush(self) -> None:
            if self.getvalue().count("\n") == 2:
                raise BrokenPipeError

    pipe = Pipe()
    monkeypatch.setattr(sys, "stdout", pipe)
    with free_port() as port:
        monkeypatch.setattr(sys, "argv", ["servers", f"127.0.0.1:{port}"])
        main()

    assert pipe.getvalue() == "[null]\n[null]\n"
