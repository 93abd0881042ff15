"""The port for metrics and pages: what it answers, to whom, and to how many."""

import http.client
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from email.message import Message
from http import HTTPStatus

import pytest

from ctr_ps.protos.errors import BindError
from ctr_ps.protos.metrics import http_port
from ctr_ps.protos.metrics.http_port import HttpPort, Page

HOST = "127.0.0.1"


def fails(headers: Message) -> Page:
    raise ZeroDivisionError("a secret")


def echo(headers: Message) -> Page:
    return Page("text/plain", headers.get("Accept", "").encode())


def get(port: HttpPort, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(HOST, port.port, timeout=10)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


@pytest.fixture
def port() -> Iterator[HttpPort]:
    with HttpPort(HOST, 0, {"/echo": echo, "/fails": fails}) as opened:
        yield opened


def test_route_answers_a_request_by_its_headers(port: HttpPort) -> None:
    response = get(port, "/echo?a=1", Accept="text/css")

    assert (response.status, response.read()) == (HTTPStatus.OK, b"text/css")
    assert response.headers["Content-Type"] == "text/plain"
    assert port.url == f"http://127.0.0.1:{port.port}"


def test_head_has_the_length_and_no_content(port: HttpPort) -> None:
    response = get(port, "/echo", "HEAD", Accept="text/css")

    assert (response.headers["Content-Length"], response.read()) == ("8", b"")


def test_path_without_a_route_is_told_which_there_are(port: HttpPort) -> None:
    response = get(port, "/")

    assert (response.status, response.read()) == (404, b"not found; pages are /echo, /fails\n")


def test_nothing_can_be_sent(port: HttpPort) -> None:
    assert get(port, "/echo", "POST").status == HTTPStatus.NOT_IMPLEMENTED


def test_fault_of_a_route_is_logged_and_not_told(
    port: HttpPort, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        response = get(port, "/fails")

    assert response.status == HTTPStatus.INTERNAL_SERVER_ERROR
    assert b"secret" not in response.read()
    assert "ZeroDivisionError: a secret" in caplog.text


def test_refused_caller_reaches_no_route() -> None:
    def refusal(headers: Message, certificate: object) -> str:
        return "" if headers["X-Name"] == "me" else "not you"

    with HttpPort(HOST, 0, {"/echo": echo}, refusal=refusal) as port:
        refused = get(port, "/echo")
        assert (refused.status, refused.read()) == (401, b"not you\n")
        assert refused.headers["WWW-Authenticate"].startswith("Basic")
        assert get(port, "/echo", **{"X-Name": "me"}).status == HTTPStatus.OK


def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "MAX_REQUESTS", 2)
    entered, leave = threading.Semaphore(0), threading.Event()

    def slow(headers: Message) -> Page:
        entered.release()
        leave.wait(20)
        return Page("text/plain", b"done")

    answers: list[bytes] = []
    with HttpPort(HOST, 0, {"/slow": slow}) as port:
        threads = [
            threading.Thread(target=lambda: answers.append(get(port, "/slow").read()))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert entered.acquire(timeout=20)
        with pytest.raises(ConnectionError):  # closed, before or after it has sent its request
            get(port, "/slow")
        leave.set()
        for thread in threads:
            thread.join(20)

    assert answers == [b"done", b"done"]


def test_place_is_free_again_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "MAX_REQUESTS", 1)
    with HttpPort(HOST, 0, {"/echo": echo}) as port:
        assert get(port, "/echo").status == HTTPStatus.OK
        end, status = time.monotonic() + 20, 0
        while not status and time.monotonic() < end:
            with suppress(ConnectionError):  # the place is given back a little after the answer
                status = get(port, "/echo").status

    assert status == HTTPStatus.OK


def test_closed_port_is_free_again() -> None:
    with HttpPort(HOST, 0, {}) as port:
        number = port.port

    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect((HOST, number))


def test_port_in_use_is_named() -> None:
    with (
        HttpPort(HOST, 0, {}) as port,
        pytest.raises(BindError, match=f"cannot bind 127.0.0.1:{port.port} for metrics"),
    ):
        HttpPort(HOST, port.port, {})


def test_silent_connections_keep_nobody_out(port: HttpPort) -> None:
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((HOST, port.port), timeout=20))
            for _ in range(2 * http_port.MAX_REQUESTS)
        ]
        silent[-1].sendall(b"GET /echo HTTP/1.1\r\nAccept: ")

        assert get(port, "/echo").status == HTTPStatus.OK

        silent[-1].sendall(b"text/css\r\n\r\n")
        assert silent[-1].recv(15) == b"HTTP/1.0 200 OK"
        assert silent[0].recv(1) == b"", "the oldest has given way"


def test_connection_that_takes_no_answer_is_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "REQUEST_LIMIT_S", 0.2)
    leave = threading.Event()

    def slow(headers: Message) -> Page:
        leave.wait(20)
        return Page("text/plain", b"done")

    with HttpPort(HOST, 0, {"/slow": slow}) as port, pytest.raises(ConnectionError):
        get(port, "/slow")
    leave.set()


def test_connection_that_dribbles_is_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "HEADERS_LIMIT_S", 0.2)
    with (
        HttpPort(HOST, 0, {}) as port,
        socket.create_connection((HOST, port.port), timeout=20) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.0\r\nX: ")

        assert connection.recv(1) == b""


def test_no_name_is_looked_up_for_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(host: str = "") -> str:
        raise AssertionError(f"the name of {host!r} was asked for")

    monkeypatch.setattr(socket, "getfqdn", asked)
    with HttpPort(HOST, 0, {"/echo": echo}) as port:
        assert get(port, "/echo").status == HTTPStatus.OK


def test_port_is_open_after_a_thread_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(http_port, "MAX_REQUESTS", 1)
    with HttpPort(HOST, 0, {"/echo": echo}) as port:
        with monkeypatch.context() as without:
            without.setattr(socketserver.ThreadingMixIn, "process_request", no_thread)
            with pytest.raises(ConnectionError):
                get(port, "/echo")
        assert get(port, "/echo").status == HTTPStatus.OK
