"""`ps-serve` as a process, asked by a client that is not ours: Triton's, in a process of its own.

Its generated code has the names of ours, so both do not fit into one process.
"""

import asyncio
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import redis
from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ctr_ps.protos.v1 import open_inference_pb2
from ctr_ps.ps_worker.extras.inference_server import cli
from ctr_ps.ps_worker.predict.predictor import Predictor
from tests.ps_worker.extras.inference_server.conftest import (
    NUM_EPOCHS,
    NUM_ROWS,
    Trained,
    grpc_request,
    json_request,
)
from tests.support.certificates import CertificateAuthority
from tests.support.commands import Done, in_this_process
from tests.support.processes import started
from tests.support.waiting import wait_until

PS_SERVE = Path(sys.executable).parent / "ps-serve"
CLIENT = Path(__file__).parent / "triton_client.py"
TOKEN = "reader-0123456789"
LIMIT_S = 120.0


class Serving:
    """A process that serves, and where."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.http = self.said(r"HTTP at (\S+)")
        self.grpc = next(
            found[1] for each in self.log if (found := re.search(r"gRPC at (\S+)", each))
        )
        self.metrics = next(
            found[1] for each in self.log if (found := re.search(r"metrics at (\S+),", each))
        )

    def said(self, pattern: str) -> str:
        """Waits for a line of the log; returns its first group."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found[found.lastindex or 0]
        raise AssertionError(f"it ended: {''.join(self.log)}")

    def scraped(self) -> str:
        request = urllib.request.Request(
            f"{self.metrics}", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.read().decode())

    def wait_for_figure(self, name: str, value: float) -> None:
        end = time.monotonic() + LIMIT_S
        while f"\n{name} {float(value)}\n" not in self.scraped():
            assert time.monotonic() < end

    def figures(self) -> tuple[str, int]:
        """Returns the version that answers now, and the rows predicted so far."""
        text = self.scraped()
        (version,) = re.findall(r'ctr_serve_model_info\{.*version="([^"]*)"\}', text)
        (rows,) = re.findall(r"^ctr_serve_rows_total (\S+)$", text, re.MULTILINE)
        return str(version), int(float(rows))

    def wait_for(self, version: str, rows: int) -> None:
        end = time.monotonic() + LIMIT_S
        while True:
            now, predicted = self.figures()
            if now == version and predicted >= rows:
                return
            assert time.monotonic() < end


@contextmanager
def served(folder: Path, *options: str, **variables: str) -> Iterator[Serving]:
    command = [PS_SERVE, folder, "--http", "0", "--grpc", "0", "--metrics", "0", *options]
    with started(command, {**os.environ, **variables}) as process:
        yield Serving(process)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Calls the entry point, for what does not come to serve."""
    return in_this_process("ps-serve", cli.main, monkeypatch, capsys)


@pytest.fixture
def request_file(trained: Trained, tmp_path: Path) -> Path:
    """Rows to ask for, and what the predictor says of them by each checkpoint."""
    expected = {
        f"epoch-{epoch}": Predictor.load(trained.folder / f"epoch-{epoch}")
        .predict_samples(trained.samples)
        .tolist()
        for epoch in range(1, NUM_EPOCHS + 1)
    }
    path = tmp_path / "request.json"
    path.write_text(
        json.dumps(
            {
                "samples": [each[1:] for each in trained.samples],
                "expected": expected,
                "token": TOKEN,
            }
        )
    )
    return path


def asked(serving: Serving, request: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, CLIENT, serving.http, serving.grpc, request],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_client_of_the_protocol_gets_what_the_predictor_says(
    folder: Path, request_file: Path
) -> None:
    with served(folder, CTR_PS_TOKEN=TOKEN) as serving:
        assert asked(serving, request_file) == {
            "is_ready": [True] * 6,
            "num_inputs": [39, 39],
            "equal": {"http binary": True, "http json": True, "http 2-D": True, "grpc": True},
            "without_token": ["401", "StatusCode.UNAUTHENTICATED"],
        }
        assert status_of(serving.metrics) == 401
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(LIMIT_S) == 0


def test_requests_in_flight_are_answered_after_sigterm(trained: Trained) -> None:
    body = json.dumps(json_request(trained)).encode()
    is_ending = threading.Event()

    def messages() -> Iterator[Any]:
        """The message of a call, once the server has been told to end."""
        assert is_ending.wait(LIMIT_S)
        yield grpc_request(trained)

    with (
        served(trained.folder, "--max-rows", str(NUM_ROWS)) as serving,
        grpc.insecure_channel(serving.grpc) as channel,
    ):
        too_many = json.dumps(json_request(trained, NUM_ROWS + 1)).encode()
        assert status_of(f"http://{serving.http}/v2/models/ctr/infer", too_many) == 400
        http = HTTPConnection(serving.http, timeout=LIMIT_S)
        http.putrequest("POST", "/v2/models/ctr/infer")
        http.putheader("Content-Length", str(len(body)))
        http.endheaders(body[:100])
        answering = channel.stream_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=open_inference_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=open_inference_pb2.ModelInferResponse.FromString,
        ).future(messages(), timeout=LIMIT_S)
        # On the same connection: when this is answered, the call before has arrived.
        health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=LIMIT_S, wait_for_ready=True
        )
        serving.wait_for_figure("ctr_serve_waiting_requests", 1)
        serving.process.send_signal(signal.SIGTERM)
        serving.said("finishing the requests in flight")
        is_ending.set()
        http.send(body[100:])
        by_http = json.loads(http.getresponse().read())["outputs"][0]["data"]
        by_grpc = answering.result(LIMIT_S).raw_output_contents[0]
        assert serving.process.wait(LIMIT_S) == 0

    expected = Predictor.load(trained.folder).predict_samples(trained.samples[:NUM_ROWS])
    assert np.array_equal(np.array(by_http, np.float32), expected)
    assert np.array_equal(np.frombuffer(by_grpc, "<f4"), expected)


def test_one_that_is_told_to_end_answers_for_a_while_and_is_not_ready(
    folder: Path, tmp_path: Path
) -> None:
    authority = CertificateAuthority(tmp_path)
    own = authority.credentials("server", mutual=False)
    tls = {"CTR_PS_TLS_CERT": own.certificate, "CTR_PS_TLS_KEY": own.key}
    context = ssl.create_default_context(cafile=str(authority.ca))
    with served(folder, "--drain", str(LIMIT_S), **tls) as serving:
        ready = partial(status_of, f"https://{serving.http}/v2/health/ready", context=context)
        assert ready() == 200
        serving.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ready() == 503, LIMIT_S / 2)
        assert status_of(f"https://{serving.http}/v2/models/ctr", context=context) == 200


def status_of(url: str, content: bytes | None = None, context: ssl.SSLContext | None = None) -> int:
    try:
        with urllib.request.urlopen(url, content, timeout=10, context=context) as response:
            return int(response.status)
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code


@pytest.mark.slow
def test_none_of_ten_thousand_requests_fails_while_the_model_is_exchanged(
    trained: Trained, folder: Path, request_file: Path
) -> None:
    with served(folder, "--reload-every", "0.05", CTR_PS_TOKEN=TOKEN) as serving:
        command = [
            sys.executable,
            CLIENT,
            serving.http,
            serving.grpc,
            request_file,
            "--load",
            "10000",
        ]
        with started(command) as client:
            for epoch in range(2, NUM_EPOCHS + 1):
                serving.wait_for(f"epoch-{epoch - 1}", 450 * (epoch - 1))
                trained.publish(epoch, folder)
            serving.wait_for(f"epoch-{NUM_EPOCHS}", 450 * NUM_EPOCHS)
            said, error = client.communicate("stop\n", timeout=LIMIT_S)

    assert client.returncode == 0, error
    found = json.loads(said)
    assert found["requests"] >= 10_000
    assert (found["failed"], found["wrong"]) == (0, 0)
    assert len(found["versions"]) == NUM_EPOCHS, "each has answered"


def test_message_has_it_look_at_once_and_it_still_ends_at_once(
    trained: Trained, folder: Path, redis_port: int
) -> None:
    client, url = redis.Redis(port=redis_port), f"redis://127.0.0.1:{redis_port}/models"
    with served(folder, "--reload-every", "3600", "--notify", url) as serving:
        wait_until(lambda: client.pubsub_numsub("models")[0][1] == 1, LIMIT_S)
        for epoch in (2, 3):
            trained.publish(epoch, folder)
            client.publish("models", "../../a path of nobody's")
            serving.wait_for(f"epoch-{epoch}", 0)
        start = time.monotonic()
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(LIMIT_S) == 0
    assert time.monotonic() - start < LIMIT_S / 4
    assert not [line for line in serving.log if "WARNING" in line or "ERROR" in line]


def test_messages_have_the_fields_of_the_protocol() -> None:
    done = subprocess.run(
        [sys.executable, CLIENT, "--fields"], capture_output=True, check=True, timeout=LIMIT_S
    )
    standard = json.loads(done.stdout)

    def compare(message: Descriptor) -> None:
        ours = {each.name: [each.number, each.type] for each in message.fields}
        assert ours.items() <= standard[message.full_name].items(), message.full_name
        for nested in message.nested_types:
            compare(nested)

    messages = open_inference_pb2.DESCRIPTOR.message_types_by_name
    assert len(messages) == 14
    for message in messages.values():
        compare(message)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--http", "", "--grpc", ""], "are both empty: give at least one address"),
        (["--name", "a/b"], "--name is 'a/b'"),
        (["--notify", "kafka://b/c"], "kafka://b/c is no channel"),
        (["--http", "somewhere"], "--http is 'somewhere', expected [HOST:]PORT"),
        (["--grpc", "foo:bar"], "--grpc is 'foo:bar', expected [HOST:]PORT"),
        (["--metrics", "foo:bar"], "CTR_PS_METRICS or --metrics is 'foo:bar'"),
        (["--http", "0.0.0.0:0"], "is reachable from other machines"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], why: str, trained: Trained, command: Callable[..., Done]
) -> None:
    done = command(trained.folder, *options)

    assert (done.code, why in done.err) == (2, True), done.err


def test_folder_without_a_checkpoint_is_named(tmp_path: Path, command: Callable[..., Done]) -> None:
    done = command(tmp_path, "--http", "0", "--grpc", "0", "--wait", "0")

    assert (done.code, str(tmp_path) in done.err) == (5, True)


@pytest.mark.parametrize("is_told_to_end", [False, True])
async def test_first_checkpoint_is_waited_for(
    is_told_to_end: bool,
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cli, "LOOK_S", LIMIT_S if is_told_to_end else 0.01)
    served, ended = tmp_path / "served", asyncio.Event()
    waiting = asyncio.create_task(cli._first_checkpoint(str(served), LIMIT_S, ended))
    while "waiting 120 s for a first checkpoint: no checkpoint" not in caplog.text:
        await asyncio.sleep(0.005)
    assert not waiting.done()

    if is_told_to_end:
        ended.set()
    else:
        trained.publish(1, served)

    await asyncio.wait_for(waiting, LIMIT_S / 4)


def test_rows_of_the_request_are_not_all_alike(trained: Trained) -> None:
    """Else equal answers would say little."""
    predictions = Predictor.load(trained.folder / "epoch-1").predict_samples(trained.samples)

    assert np.unique(predictions).size > len(trained.samples) // 2
