"""Where the port for metrics is, and who may read it."""

import base64
import http.client
import socket
import ssl
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.metrics.http_port import HttpPort
from ctr_ps.protos.metrics.metrics_port import (
    Status,
    metrics_address,
    open_metrics_port,
    parse_address,
)
from ctr_ps.protos.wire.security.credentials import Credentials
from tests.support.certificates import CertificateAuthority

TOKEN, READER, OTHER = "0123456789abcdef", "reader-0123456789", "fedcba9876543210"
STATUS = Status(title="me", figures={}, series=())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9187", ("127.0.0.1", 9187)),
        ("0.0.0.0:9187", ("0.0.0.0", 9187)),
        ("[::]:0", ("::", 0)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_address_without_a_host_is_loopback(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", ":", "host", "::1:80", "127.0.0.1:65536", "9187 9188", "-1"])
def test_other_text_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected \[HOST:\]PORT"):
        parse_address(text)


def test_option_comes_before_the_variable() -> None:
    environment = {"CTR_PS_METRICS": "1"}

    assert metrics_address("2", environment) == "2"
    assert metrics_address(None, environment) == "1"
    assert metrics_address(None, {}) == ""


def opened(credentials: Credentials, address: str = "127.0.0.1:0") -> HttpPort:
    answer = Gauge("answer", "Of all.", registry=None)
    answer.set(42)
    return open_metrics_port(address, answer, lambda: STATUS, credentials)


def get(
    port: HttpPort, authorization: str = "", tls: ssl.SSLContext | None = None, accept: str = ""
) -> tuple[int, str]:
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port.port, timeout=10)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", port.port, timeout=10, context=tls)
    headers = {"Authorization": authorization} if authorization else {}
    with closing(connection):
        connection.request("GET", "/metrics", headers={**headers, "Accept": accept})
        response = connection.getresponse()
        return response.status, response.read().decode()


def basic(token: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()


def test_address_that_others_reach_is_refused_without_protection() -> None:
    with pytest.raises(UsageError, match="is reachable from other machines"):
        opened(Credentials(), "0.0.0.0:0")


def test_format_is_the_one_that_is_asked_for() -> None:
    with opened(Credentials()) as port:
        status, plain = get(port)
        _, open_metrics = get(port, accept="application/openmetrics-text; version=1.0.0")
        assert get(port, accept="application/openmetrics-text; version=abc")[0] == 200

    assert status == 200
    assert "answer 42.0" in plain
    assert "answer" in [each.name for each in text_string_to_metric_families(open_metrics)]
    assert "process_cpu_seconds_total" in plain


@pytest.mark.parametrize(
    ("authorization", "why"),
    [
        (f"Bearer {TOKEN}", ""),
        (f"bearer {READER}", ""),
        (basic(READER), ""),
        ("", "needs a token"),
        ("Basic ????", "needs a token"),
        (f"Digest {TOKEN}", "needs a token"),
        (f"Bearer {OTHER}", "unknown token"),
        (basic(OTHER), "unknown token"),
        ("Bearer \xff\xfe-0123456789abcd", "unknown token"),
    ],
)
def test_whoever_shows_a_known_token_may_read(authorization: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"admin {TOKEN}\nreader {READER}\n")

    with opened(Credentials(token_file=str(file))) as port:
        status, text = get(port, authorization)

    assert status == (401 if why else 200)
    assert why in text
    assert ("answer" in text) is not why or not why


def client_context(authority: CertificateAuthority, own: Credentials | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.ca))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def test_certificate_says_the_access_where_there_are_no_tokens(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    reader = authority.credentials("reader", common_name="ctr-ps-reader.prometheus")
    stranger = authority.credentials("stranger", common_name="somebody")

    with opened(authority.credentials("server")) as port:
        assert port.url.startswith("https://")
        assert get(port, tls=client_context(authority, reader))[0] == 200
        status, why = get(port, tls=client_context(authority, stranger))
        assert (status, "names no access" in why) == (403, True)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            get(port, tls=client_context(authority, None))


def test_session_is_not_resumed_after_its_authority_is_gone(tmp_path: Path) -> None:
    """It would not be verified again; so with certificates of callers none is resumed."""
    authority = CertificateAuthority(tmp_path)
    reader = authority.credentials("reader", common_name="ctr-ps-reader.prometheus")
    context = client_context(authority, reader)

    def session_of(port: HttpPort, resumed: ssl.SSLSession | None) -> tuple[ssl.SSLSession, bool]:
        with (
            socket.create_connection(("127.0.0.1", port.port), timeout=10) as connection,
            context.wrap_socket(
                connection, server_hostname="127.0.0.1", session=resumed
            ) as encrypted,
        ):
            encrypted.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            while encrypted.recv(65536):
                pass
            assert encrypted.session is not None
            return encrypted.session, bool(encrypted.session_reused)

    with opened(authority.credentials("server")) as port:
        session, _ = session_of(port, None)
        assert session_of(port, session)[1] is False
