"""Looking at servers that ask for a token."""

from pathlib import Path

import pytest

from ctr_ps.protos.errors import UnknownCallerError
from ctr_ps.protos.store import ServerStatus
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.extras.watching.servers import Servers
from tests.support.cluster import cluster

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
