"""`ps-server` processes: how they start, what they say and how they end.

What does not come to serve runs in this process.
"""

import json
import signal
import socket

import numpy as np
import pytest

from ctr_ps.protos.errors import UnknownCallerError
from ctr_ps.protos.spec import InitializerSpec, OptimizerSpec, TableSpec
from ctr_ps.protos.store import Missing, SaveRequest
from ctr_ps.protos.wire.security.credentials import Credentials
from ctr_ps.ps_server.cli import app as ps_server
from ctr_ps.ps_worker.cluster.connect import connect, wait_for_servers
from ctr_ps.ps_worker.cluster.grpc_transport import GrpcTransport
from tests.support.certificates import CertificateAuthority
from tests.support.commands import invoked
from tests.support.processes import environment_of, free_port, server_process
from tests.support.waiting import wait_until

TABLE = TableSpec(
    name="t",
    dim=2,
    initializer=InitializerSpec(scale=0.1),
    optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 0.1}),
)


@pytest.fixture
def port():
    with free_port() as port:
        pass
    return port


@pytest.fixture
def log(tmp_path):
    return tmp_path / "server.log"


def test_server_ends_when_its_workers_are_done(port, log):
    with (
        server_process(environment_of([port], 0), log) as server,
        connect([f"127.0.0.1:{port}"], connect_timeout_s=60) as client,
    ):
        client.join(0, 1, terms={}).result()
        client.create_table(TABLE)
        client.barrier("end", 0, step=0).result()
        client.leave(0, step=0)

        assert server.wait() == 0
    for event in (
        f"serving server=0 servers=127.0.0.1:{port} workers=1 heter_trainers=0 bind=127.0.0.1 port={port}",
        "table created table=t dim=2",
        "worker 0 joins",
        "worker 0 left step=0",
        "ended reason='all workers have left'",
    ):
        assert event in server.log


@pytest.mark.parametrize("is_listed", [True, False])
def test_server_that_may_be_a_spare_says_whether_it_is_one(port, log, is_listed):
    own, listed = f"127.0.0.1:{port}", port if is_listed else 9
    environment = {**environment_of([listed], 0), "PADDLE_PORT": str(port)}
    with server_process(environment, log, "--spare") as server:
        wait_until(lambda: "serving server=" in server.log, 60)
        server.process.terminate()
        assert server.wait() == 0

    assert f"serving server={0 if is_listed else 'spare'} servers={own} workers=1" in server.log
    assert ("no spare: its address is in PADDLE_PSERVERS" in server.log) == is_listed


def test_log_and_error_are_json_if_asked_for(port, log):
    with server_process(
        environment_of([port], 0), log, "--log-format", "json", "--metrics", "nowhere"
    ) as server:
        assert server.wait() == 2

    (event,) = [json.loads(line) for line in server.log.splitlines()]
    assert (event["level"], event["role"], event["index"]) == ("ERROR", "server", 0)
    assert "'nowhere', expected [HOST:]PORT" in event["message"]


def test_failed_handshake_leaves_a_log_of_json(port, log, tmp_path, monkeypatch):
    monkeypatch.delenv(
        "GRPC_VERBOSITY", raising=False
    )  # which these tests have set by importing `protos`
    authority = CertificateAuthority(tmp_path)
    own = authority.credentials("server", mutual=False)
    tls = {"CTR_PS_TLS_CERT": own.certificate, "CTR_PS_TLS_KEY": own.key}
    environment = {**environment_of([port], 0), **tls}

    with server_process(environment, log, "--log-format", "json") as server:
        transport = GrpcTransport(
            [f"127.0.0.1:{port}"], credentials=Credentials(ca=str(authority.ca))
        )
        wait_for_servers(transport, 60)
        transport.close()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.recv(1024):  # until the server has hung up
                pass

    assert [json.loads(line)["level"] for line in server.log.splitlines()]


def test_address_of_all_interfaces_is_bound_for_callers_with_a_token_alone(port, log):
    environment = environment_of([port], 0)
    refused = invoked(ps_server, "--bind", "0.0.0.0", environment=environment)
    assert refused.exit_code == 2
    assert "0.0.0.0 is reachable from other machines" in refused.stderr

    token = "0123456789abcdef"
    with server_process({**environment, "CTR_PS_TOKEN": token}, log, "--bind", "0.0.0.0") as server:
        endpoint = f"127.0.0.1:{port}"
        transport = GrpcTransport([endpoint], credentials=Credentials(token=token))
        wait_for_servers(transport, 60)
        transport.close()
        with pytest.raises(UnknownCallerError, match="has no token"):
            connect([endpoint], connect_timeout_s=60)
    assert "tokens are sent over 0.0.0.0 without TLS" in server.log


def test_insecure_server_serves_anybody_and_says_so(port, log):
    with (
        server_process(environment_of([port], 0), log, "--bind", "0.0.0.0", "--insecure") as server,
        connect([f"127.0.0.1:{port}"], connect_timeout_s=60),
    ):
        pass
    assert "anybody who reaches 0.0.0.0 can read, change and save the model" in server.log


@pytest.mark.parametrize(
    ("number", "exit_code", "options"),
    [
        (signal.SIGTERM, 0, ("--stream-port", "-1")),
        (signal.SIGTERM, 143, ("--sigterm-exit-code", "143")),
        (signal.SIGINT, 130, ("--sigterm-exit-code", "143")),
    ],
    ids=["term", "term as set", "int"],
)
def test_signal_ends_a_server_that_stays(port, log, number, exit_code, options):
    with (
        server_process(environment_of([port], 0), log, "--stay", *options) as server,
        connect([f"127.0.0.1:{port}"], connect_timeout_s=60) as client,
    ):
        client.join(0, 1, terms={}).result()
        client.leave(0, step=0)
        client.create_table(TABLE)

        server.process.send_signal(number)

        assert server.wait() == exit_code
    assert f"ended reason='{number.name}'" in server.log
    assert "waiting for the next job" in server.log
    assert ("stream open" in server.log) == ("--stream-port" not in options)


def test_server_without_workers_ends_with_exit_code_9(port, log):
    with server_process(environment_of([port], 0), log, "--idle-limit", "0.1") as server:
        assert server.wait() == 9
    assert server.log.splitlines()[-1].startswith("error: no worker called for 0.1 s")


def test_port_in_use_ends_with_exit_code_3():
    with free_port() as port:
        ended = invoked(ps_server, environment=environment_of([port], 0))
    assert ended.exit_code == 3
    assert f"error: cannot bind 127.0.0.1:{port}: the port is in use" in ended.stderr


def test_port_in_use_of_the_stream_ends_with_exit_code_3(port):
    with free_port() as used:
        ended = invoked(ps_server, "--stream-port", used, environment=environment_of([port], 0))
    assert ended.exit_code == 3
    assert (
        f"error: cannot bind 127.0.0.1:{used} for the stream: Address already in use"
        in ended.stderr
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}, "a server needs PSERVER"),
        ({"PADDLE_TRAINERS_NUM": "none"}, "PADDLE_TRAINERS_NUM is 'none'"),
    ],
    ids=["trainer", "no-number"],
)
def test_wrong_environment_ends_with_exit_code_2(port, changes, message):
    ended = invoked(ps_server, environment={**environment_of([port], 0), **changes})

    assert ended.exit_code == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr


def test_checkpoint_that_is_none_ends_with_exit_code_5(port, tmp_path):
    folder = str(tmp_path / "nowhere")
    ended = invoked(ps_server, "--load", folder, environment=environment_of([port], 0))

    assert ended.exit_code == 5
    assert f"error: no checkpoint {folder}" in ended.stderr


def test_check_says_whether_a_server_serves(port, log, tmp_path):
    environment = environment_of([port], 0)
    checked = invoked(ps_server, "--check", environment=environment)
    assert checked.exit_code == 1
    assert f"no server serves at 127.0.0.1:{port}: UNAVAILABLE: " in checked.stderr
    with (
        server_process(environment, log),
        connect([f"127.0.0.1:{port}"], connect_timeout_s=60),
        server_process(environment, tmp_path / "check.log", "--check") as check,
    ):
        assert check.wait() == 0


def test_saved_parameters_are_those_a_server_begins_with(port, log, tmp_path):
    folder = str(tmp_path / "model")
    keys = np.arange(10, dtype=np.uint64)
    with (
        server_process(environment_of([port], 0), log),
        connect([f"127.0.0.1:{port}"], connect_timeout_s=60) as client,
    ):
        client.join(0, 1, terms={}).result()
        client.create_table(TABLE)
        digest = client.save(SaveRequest(url=folder))
        client.leave(0, step=0)
    with (
        server_process(environment_of([port], 0), log, "--load", folder) as server,
        connect([f"127.0.0.1:{port}"], connect_timeout_s=60) as client,
    ):
        client.join(0, 1, terms={}).result()
        client.create_table(TABLE)
        assert client.digest() == digest
        client.pull_sparse({"t": keys}, missing=Missing.INITIAL).result()
        client.leave(0, step=0)
        assert server.wait() == 0
    assert f"loaded folder={folder}" in server.log
