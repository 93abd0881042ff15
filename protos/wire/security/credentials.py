"""Credentials of a process, from its environment, and the channels and ports that use them.

    CTR_PS_TOKEN, CTR_PS_TOKEN_FILE    a token to show to servers; a server's file may have several
    CTR_PS_TLS_CA                      of a caller: certificates that sign those of servers, PEM
    CTR_PS_TLS_CLIENT_CA               of a server: certificates that sign those of callers, PEM
    CTR_PS_TLS_CERT, CTR_PS_TLS_KEY    own certificate with its chain, and its private key, PEM
    CTR_PS_TLS_NAME                    the name in servers' certificates, where it is not the endpoint's host
    CTR_PS_INSECURE                    1: serve other machines without any of these

A server with a certificate speaks TLS, with CTR_PS_TLS_CLIENT_CA mutual TLS. A caller with CTR_PS_TLS_CA
speaks TLS, and shows its certificate if it has one. Changed files are read again: by a server at the next
connection or call, by a caller after a failed call.
"""

import contextlib
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from ctr_ps.protos.errors import BindError, UsageError
from ctr_ps.protos.role import is_loopback
from ctr_ps.protos.wire.channel import CHANNEL_OPTIONS
from ctr_ps.protos.wire.security.access import Access, Tokens, metadata_of_token, own_token

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOKEN, TOKEN_FILE = "CTR_PS_TOKEN", "CTR_PS_TOKEN_FILE"
TLS_CA, TLS_CERT, TLS_KEY = "CTR_PS_TLS_CA", "CTR_PS_TLS_CERT", "CTR_PS_TLS_KEY"
TLS_CLIENT_CA, TLS_NAME = "CTR_PS_TLS_CLIENT_CA", "CTR_PS_TLS_NAME"
INSECURE = "CTR_PS_INSECURE"

LOOK_S = 1.0
"""How often a server looks whether tokens that it knows were taken away."""

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Values of this module's variables; empty: not set. Raises UsageError if they contradict each other."""

    token: str = field(default="", repr=False)
    token_file: str = ""
    ca: str = ""
    client_ca: str = ""
    certificate: str = ""
    key: str = ""
    server_name: str = ""
    is_insecure: bool = False

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise UsageError(f"{TOKEN} and {TOKEN_FILE} are set: unset one of them")
        if bool(self.certificate) != bool(self.key):
            missing = TLS_KEY if self.certificate else TLS_CERT
            raise UsageError(
                f"{missing} is not set: a certificate and its private key are set together"
            )
        if self.client_ca and not self.certificate:
            raise UsageError(
                f"{TLS_CLIENT_CA} is set, but {TLS_CERT} is not: a server needs a certificate of its own "
                "for TLS"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Reads the variables; raises UsageError if they contradict each other."""
        return cls(
            token=environment.get(TOKEN, ""),
            token_file=environment.get(TOKEN_FILE, ""),
            ca=environment.get(TLS_CA, ""),
            client_ca=environment.get(TLS_CLIENT_CA, ""),
            certificate=environment.get(TLS_CERT, ""),
            key=environment.get(TLS_KEY, ""),
            server_name=environment.get(TLS_NAME, ""),
            is_insecure=_is_true(environment.get(INSECURE, "")),
        )

    @property
    def has_token(self) -> bool:
        """Whether a token is set."""
        return bool(self.token or self.token_file)

    @property
    def tell_callers_apart(self) -> bool:
        """Whether a server with these refuses unknown callers."""
        return self.has_token or bool(self.client_ca)

    def tokens(self) -> Tokens:
        """Returns the tokens that a server accepts; raises UsageError if it has none."""
        return Tokens.parse(*self._token_text())

    def metadata(self) -> Metadata:
        """Returns the metadata of a caller's calls; raises UsageError if its token cannot be read."""
        return metadata_of_token(own_token(*self._token_text())) if self.has_token else ()

    def _token_text(self) -> tuple[str, str]:
        if self.token:
            return self.token, TOKEN
        _warn_of_readers(self.token_file)
        return _read(self.token_file, TOKEN_FILE).decode("utf-8", "replace"), self.token_file

    def files(self) -> tuple[str, ...]:
        """Returns the paths of the files."""
        named = (self.token_file, self.ca, self.client_ca, self.certificate, self.key)
        return tuple(path for path in named if path)


class WatchedFiles:
    """Change detection for files; create it before they are first read. Thread-safe."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._read = self._told = self._look()

    def read_again(self, what: str, read: Callable[[], T]) -> T | None:
        """Returns `read()` if a file has changed since the last success, else None.

        None, too, where `read` raises UsageError, as between the writing of two files: the next call tries
        again. `what` names the files in the log.
        """
        with self._lock:
            found = self._look()
            if found == self._read:
                return None
            try:
                result = read()
            except UsageError as error:
                if found != self._told:
                    logger.warning(
                        "%s have changed but cannot be used, the old ones stay in use: %s",
                        what,
                        error,
                    )
                self._told = found
                return None
            self._read = self._told = found
        logger.info("%s have changed and were read again", what)
        return result

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_identity(path) for path in self._paths]


def open_channel(endpoint: str, credentials: Credentials) -> grpc.Channel:
    """Returns a channel to a server, for calls with `credentials.metadata()`.

    Raises UsageError if a file of the credentials cannot be read.
    """
    if not credentials.ca:
        if credentials.certificate or credentials.server_name:
            raise UsageError(
                f"{TLS_CA} is not set: to call servers over TLS, set it to the certificates of the "
                "authorities that sign the servers' certificates"
            )
        return grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
    own = _pair(credentials) if credentials.certificate else ()
    authorities = _authorities(credentials.ca, TLS_CA)
    options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS]
    if credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return grpc.secure_channel(
        endpoint, grpc.ssl_channel_credentials(authorities, *own), options=options
    )


def caller_context(credentials: Credentials) -> ssl.SSLContext | None:
    """Returns a caller's TLS context for connections without gRPC; None: no TLS.

    Raises UsageError as `open_channel` does.
    """
    if not credentials.ca:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the server's name and certificate
    _trust(context, credentials.ca, TLS_CA)
    if credentials.certificate:
        _load_pair(context, credentials)
    return context


def require_protection(
    host: str, credentials: Credentials, could: str = "read, change and save the model"
) -> None:
    """Raises UsageError if strangers could reach this process at `host`, unless it is insecure on purpose.

    `could` says what they could do, for the message.
    """
    if is_loopback(host) or credentials.tell_callers_apart:
        if credentials.has_token and not credentials.certificate and not is_loopback(host):
            logger.warning(
                "tokens are sent over %s without TLS: anybody on that network can read them", host
            )
        return
    if not credentials.is_insecure:
        raise UsageError(
            f"{host} is reachable from other machines, where anybody could {could}: set {TOKEN_FILE} for "
            f"all processes, or {TLS_CERT}, {TLS_KEY} and {TLS_CLIENT_CA} for mutual TLS, or bind a "
            f"loopback address; on a closed network, {INSECURE}=1 allows it"
        )
    logger.warning("anybody who reaches %s can %s: insecure", host, could)


def bind(server: Any, address: str, credentials: Credentials) -> int:
    """Lets a gRPC server listen at "host:port", with TLS if it has a certificate; returns the port.

    Raises:
        BindError: If the address cannot be bound.
        UsageError: If a file of the credentials cannot be read, or the key does not fit the certificate.
    """
    try:
        if credentials.certificate:
            port: int = server.add_secure_port(address, _server_credentials(credentials))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise BindError(
            f"cannot bind {address}: the port is in use by another process, or the address is not of this "
            f"machine"
        ) from error
    return port


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Returns TLS credentials that are reloaded, before a handshake, when their files have changed."""
    watched = WatchedFiles(credentials.files())

    def configuration() -> grpc.ServerCertificateConfiguration:
        authorities = None
        if credentials.client_ca:
            authorities = _authorities(credentials.client_ca, TLS_CLIENT_CA)
        return grpc.ssl_server_certificate_configuration(
            [_pair(credentials)], root_certificates=authorities
        )

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        lambda: watched.read_again("certificates", configuration),
        require_client_authentication=bool(credentials.client_ca),
    )


def tls_contexts(credentials: Credentials) -> Callable[[], ssl.SSLContext] | None:
    """Returns a function for the TLS context of the next connection without gRPC; None: no TLS.

    The context is renewed when a file has changed. Raises UsageError as `bind` does.
    """
    if not credentials.certificate:
        return None
    watched = WatchedFiles(credentials.files())

    def context() -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_pair(made, credentials)
        if credentials.client_ca:
            _trust(made, credentials.client_ca, TLS_CLIENT_CA)
            made.verify_mode = ssl.CERT_REQUIRED
            # A session that is resumed is not verified again, though its authority may be gone by now.
            made.minimum_version = ssl.TLSVersion.TLSv1_3
            made.num_tickets = 0
        return made

    current = context()

    def newest() -> ssl.SSLContext:
        nonlocal current
        current = watched.read_again("certificates", context) or current
        return current

    return newest


def server_context(credentials: Credentials) -> ssl.SSLContext | None:
    """Returns a TLS context that takes the newest certificate at each handshake; None: no TLS.

    For servers with one context for all connections. Raises UsageError as `bind` does.
    """
    newest = tls_contexts(credentials)
    if newest is None:
        return None
    context = newest()

    def exchange(connection: ssl.SSLObject, name: str | None, before: ssl.SSLContext) -> None:
        connection.context = newest()

    context.sni_callback = exchange  # called at each handshake, also of callers that name no host
    return context


class WatchedTokens:
    """The tokens of a server, reloaded when their file changes. Thread-safe. UsageError if it has none."""

    def __init__(
        self, credentials: Credentials, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._credentials = credentials
        self._clock = clock
        self._watched = WatchedFiles([credentials.token_file] if credentials.token_file else [])
        self._tokens = credentials.tokens()
        self._looked = clock()

    def access_of(self, token: str) -> Access | None:
        """Returns the access of a token; while their file cannot be read, the tokens before it count.

        The file is checked for an unknown token, which may be new, and every `LOOK_S`, for revoked ones.
        """
        now = self._clock()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look()
        found = self._tokens.access_of(token)
        if found is None and self._look():
            found = self._tokens.access_of(token)
        return found

    def _look(self) -> bool:
        if (tokens := self._watched.read_again("tokens", self._credentials.tokens)) is None:
            return False
        self._tokens = tokens
        return True


def _pair(credentials: Credentials) -> tuple[bytes, bytes]:
    key, chain = _read(credentials.key, TLS_KEY), _read(credentials.certificate, TLS_CERT)
    # gRPC says nothing of a key of another certificate but in its log, at each handshake.
    _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), credentials)
    return key, chain


def _load_pair(context: ssl.SSLContext, credentials: Credentials) -> None:
    try:
        # A password would be asked for at the terminal.
        context.load_cert_chain(credentials.certificate, credentials.key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"{TLS_CERT} {credentials.certificate!r} and {TLS_KEY} {credentials.key!r} are not a PEM "
            f"certificate and its private key: {error}"
        ) from error


def _authorities(path: str, variable: str) -> bytes:
    # gRPC takes a file without one, and then believes nobody.
    return _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), path, variable)


def _trust(context: ssl.SSLContext, path: str, variable: str) -> bytes:
    """Trusts the authorities of a file, and returns the file."""
    found = _read(path, variable)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: also authorities in between
    try:
        context.load_verify_locations(cadata=found.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{variable} is {path!r}, a file without PEM certificates: {error}"
        ) from error
    return found


def _read(path: str, variable: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{variable} is {path!r}, which cannot be read: {error.strerror}"
        ) from error


@cache
def _warn_of_readers(path: str) -> None:
    """Warns once of a token file that its group or others may read."""
    with contextlib.suppress(OSError):  # reading it says why
        status = Path(path).stat()
        # A file of another owner, as of a Secret of Kubernetes, is read by its group.
        readers = 0o044 if status.st_uid == os.getuid() else 0o004
        if status.st_mode & readers:
            logger.warning(
                "%s %r has mode %o, so other users of this machine can read its tokens: chmod 600 it",
                TOKEN_FILE,
                path,
                status.st_mode & 0o777,
            )


def _is_true(text: str) -> bool:
    if text.lower() not in ("", "0", "1", "false", "true"):
        raise UsageError(f"{INSECURE} is {text!r}, expected 1 or 0")
    return text.lower() in ("1", "true")


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    # The time of a change, too: of rights that a file was given.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
