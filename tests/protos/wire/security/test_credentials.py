"""Credentials from the environment, and their files."""

import ssl
from contextlib import suppress
from pathlib import Path

import pytest
import trustme

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.wire.security.credentials import (
    LOOK_S,
    Credentials,
    WatchedFiles,
    WatchedTokens,
    caller_context,
    open_channel,
    require_protection,
    server_context,
    tls_contexts,
)
from tests.support.certificates import CertificateAuthority

TOKEN = "0123456789abcdef"


def test_environment_names_token_and_files() -> None:
    variables = {
        "CTR_PS_TOKEN_FILE": "tokens",
        "CTR_PS_TLS_CA": "ca",
        "CTR_PS_TLS_CLIENT_CA": "client-ca",
        "CTR_PS_TLS_CERT": "crt",
        "CTR_PS_TLS_KEY": "key",
        "CTR_PS_TLS_NAME": "ps",
        "CTR_PS_INSECURE": "1",
    }

    assert Credentials.from_environment(variables) == Credentials(
        token_file="tokens",
        ca="ca",
        client_ca="client-ca",
        certificate="crt",
        key="key",
        server_name="ps",
        is_insecure=True,
    )
    assert Credentials.from_environment({}) == Credentials()


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"CTR_PS_TOKEN": TOKEN, "CTR_PS_TOKEN_FILE": "x"}, "unset one of them"),
        ({"CTR_PS_TLS_CERT": "x"}, "CTR_PS_TLS_KEY is not set"),
        ({"CTR_PS_TLS_KEY": "x"}, "CTR_PS_TLS_CERT is not set"),
        ({"CTR_PS_TLS_CLIENT_CA": "x"}, "CTR_PS_TLS_CERT is not: a server needs a certificate"),
        ({"CTR_PS_INSECURE": "maybe"}, "CTR_PS_INSECURE is 'maybe', expected 1 or 0"),
    ],
)
def test_contradictions_are_errors(variables: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Credentials.from_environment(variables)


@pytest.mark.parametrize(
    ("host", "credentials", "is_refused"),
    [
        ("127.0.0.1", Credentials(), False),
        ("localhost", Credentials(), False),
        ("::1", Credentials(), False),
        ("[::1]", Credentials(), False),
        ("::ffff:127.0.0.1", Credentials(), False),
        ("0.0.0.0", Credentials(), True),
        ("::", Credentials(), True),
        ("10.0.0.7", Credentials(), True),
        ("ps-0.ps", Credentials(), True),
        ("0.0.0.0", Credentials(token=TOKEN), False),
        ("0.0.0.0", Credentials(token_file="tokens"), False),
        ("0.0.0.0", Credentials(certificate="c", key="k"), True),  # encrypted, for anybody
        ("0.0.0.0", Credentials(certificate="c", key="k", ca="a"), True),
        ("0.0.0.0", Credentials(certificate="c", key="k", client_ca="a"), False),
        ("0.0.0.0", Credentials(is_insecure=True), False),
    ],
)
def test_other_machines_are_not_served_without_tokens_or_certificates(
    host: str, credentials: Credentials, is_refused: bool
) -> None:
    if is_refused:
        with pytest.raises(UsageError, match="is reachable from other machines"):
            require_protection(host, credentials)
    else:
        require_protection(host, credentials)


def test_file_that_cannot_be_read_names_the_variable(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(UsageError, match=f"CTR_PS_TLS_CA is '{missing}', which cannot be read"):
        open_channel("127.0.0.1:1", Credentials(ca=missing))
    with pytest.raises(UsageError, match=f"CTR_PS_TOKEN_FILE is '{missing}'"):
        Credentials(token_file=missing).metadata()


def test_file_of_tokens_that_others_can_read_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, mode in enumerate([0o600, 0o640, 0o604, 0o400]):
        file = tmp_path / f"token-{number}"
        file.write_text(TOKEN)
        file.chmod(mode)
        for _ in range(2):
            Credentials(token_file=str(file)).tokens()

    assert [each.split(" has mode ")[1] for each in caplog.messages] == [
        f"{mode}, so other users of this machine can read its tokens: chmod 600 it"
        for mode in (640, 604)
    ]


def test_certificate_with_another_key_is_an_error(tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    one, other = authority.credentials("one"), authority.credentials("other")
    mixed = Credentials(ca=one.ca, certificate=one.certificate, key=other.key)

    with pytest.raises(UsageError, match=r"are not a PEM certificate and its private key"):
        open_channel("127.0.0.1:1", mixed)
    with pytest.raises(UsageError, match="CTR_PS_TLS_CA is not set"):
        open_channel("127.0.0.1:1", Credentials(certificate=one.certificate, key=one.key))


def test_file_without_certificates_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("nothing")

    with pytest.raises(UsageError, match=r"CTR_PS_TLS_CA is .* a file without PEM certificates"):
        open_channel("127.0.0.1:1", Credentials(ca=str(tmp_path / "ca")))


def test_token_is_not_shown_with_other_credentials() -> None:
    assert TOKEN not in repr(Credentials(token=TOKEN))


def test_files_that_are_replaced_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    watched = WatchedFiles([str(path)])

    def read() -> str | None:
        return watched.read_again("tokens", path.read_text)

    assert read() is None
    path.write_text("1")
    assert read() == "1"
    assert read() is None
    (tmp_path / "next").write_text("2")
    (tmp_path / "next").replace(path)
    assert read() == "2"


def test_files_that_cannot_be_used_are_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the rights of a file are given after it was replaced, or its pair comes later."""
    path, problems = tmp_path / "tokens", ["1st", "2nd"]
    watched = WatchedFiles([str(path)])

    def read() -> str:
        if problems:
            raise UsageError(problems.pop(0))
        return path.read_text()

    path.write_text("1")
    assert watched.read_again("tokens", read) is None
    assert watched.read_again("tokens", read) is None
    assert watched.read_again("tokens", read) == "1"
    assert [each for each in caplog.messages if "cannot be used" in each] == [
        "tokens have changed but cannot be used, the old ones stay in use: 1st"
    ]


def test_tokens_are_read_again_and_stay_while_they_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    now = [0.0]
    tokens = WatchedTokens(Credentials(token_file=str(path)), clock=lambda: now[0])

    def knows(token: str) -> bool:
        return tokens.access_of(token) is not None

    path.write_text("x")
    now[0] += LOOK_S
    assert knows(TOKEN), "what is there now is no token"
    path.write_text(f"{TOKEN}-2")
    assert knows(TOKEN), "it looks once a second"
    assert knows(f"{TOKEN}-2"), "and where it does not know one"
    assert not knows(TOKEN)
    path.write_text(TOKEN)
    now[0] += LOOK_S
    assert not knows(f"{TOKEN}-2")


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Makes a handshake in memory, of a client that names no host; raises what an end of it raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for end in 2 * ends:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert ends[0].version() is not None


def test_authority_between_root_and_certificate_may_be_trusted_alone(tmp_path: Path) -> None:
    """As over gRPC."""
    between = trustme.CA().create_child_ca()
    issued = between.issue_cert("127.0.0.1")
    ca, certificate, key = (tmp_path / name for name in ("ca", "certificate", "key"))
    between.cert_pem.write_to_path(ca)
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    both = Credentials(ca=str(ca), client_ca=str(ca), certificate=str(certificate), key=str(key))

    contexts, client = tls_contexts(both), caller_context(both)

    assert contexts is not None
    assert client is not None
    shake_hands(contexts(), client)


def test_one_context_of_a_server_shows_the_newest_certificate(tmp_path: Path) -> None:
    old, new = CertificateAuthority(tmp_path, "old"), CertificateAuthority(tmp_path, "new")
    of_old, of_new = (ssl.create_default_context(cafile=str(each.ca)) for each in (old, new))
    server = server_context(old.credentials("server", mutual=False))
    assert server is not None

    shake_hands(server, of_old)
    new.credentials("server", mutual=False)  # replaces the files

    shake_hands(server, of_new)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, of_old)
    assert server_context(Credentials()) is None
