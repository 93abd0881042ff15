"""The metrics port of a process: routes, address, TLS and access.

    /metrics        for Prometheus
    /               a page for people, which knows nothing of what it shows
    /status.json    `Status`, which the page asks for every two seconds

The page draws curves of what it has seen since it was opened: the process keeps no history for it.

Whoever may read parameters may read these, with a token of access `reader` or above, as `Authorization:
Bearer TOKEN` or as a browser's password, or with a certificate of such an access. Other machines reach the
port only if callers are known, or by an explicit setting.
"""

import base64
import binascii
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from email.message import Message
from importlib.resources import files
from typing import Any, Literal, Protocol

from prometheus_client import GC_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.metrics.http_port import HttpPort, Page, Route
from ctr_ps.protos.wire.security.access import Access, access_of_name, token_in
from ctr_ps.protos.wire.security.credentials import (
    TOKEN,
    TOKEN_FILE,
    Credentials,
    WatchedTokens,
    require_protection,
    tls_contexts,
)

logger = logging.getLogger(__name__)

METRICS = "CTR_PS_METRICS"
"""Variable with the address of the port: [HOST:]PORT."""

LOOPBACK = "127.0.0.1"


Value = str | float | None
"""None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A number whose curve is drawn: the number itself, or of one that grows, by how much a second."""

    name: str
    value: float
    kind: Literal["value", "rate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of values under the names of columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What there is to see of a process at one moment: single values by name, curves, and tables.

    `title` names the process, and `fault` says why the job has ended by an error; empty: it has not.
    """

    title: str
    figures: Mapping[str, Value]
    series: Sequence[Series]
    tables: Sequence[Table] = field(default=())
    fault: str = ""


class Headers(Protocol):
    """HTTP request headers, of any library."""

    def get(self, name: str, default: str, /) -> str:
        """Returns the value of a header; names are case-insensitive."""


_ADDRESS = re.compile(r"(?:(?P<host>[^:\[\]]+|\[[0-9a-fA-F:]+\]):)?(?P<port>[0-9]{1,5})")


def metrics_address(option: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Returns the address of the option, else of the variable; empty: no port."""
    return option or environment.get(METRICS, "")


def parse_address(text: str, named: str = f"{METRICS} or --metrics") -> tuple[str, int]:
    """Returns host, by default loopback, and port of "[HOST:]PORT", or raises UsageError with `named`."""
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"{named} is {text!r}, expected [HOST:]PORT, as 9187 or 0.0.0.0:9187")
    return (found["host"] or LOOPBACK).strip("[]"), int(found["port"])


def open_metrics_port(
    address: str, metrics: Collector, status: Callable[[], Status], credentials: Credentials
) -> HttpPort:
    """Serves metrics and the page of `status` at [HOST:]PORT, and logs the URL; port 0 takes a free one.

    Raises:
        UsageError: If the address is invalid or unprotected, or a file of the credentials cannot be used.
        BindError: If the address cannot be bound.
    """
    host, port = parse_address(address)
    require_protection(host, credentials, "see what the job does")
    opened = HttpPort(
        host,
        port,
        {"/metrics": _metrics_route(metrics), **status_routes(status)},
        refusal=Readers(credentials).refusal,
        tls=tls_contexts(credentials),
    )
    logger.info("metrics at %s/metrics, a status page at %s/", opened.url, opened.url)
    return opened


def _metrics_route(metrics: Collector) -> Route:
    registry = CollectorRegistry()
    for each in (PROCESS_COLLECTOR, GC_COLLECTOR, metrics):
        registry.register(each)

    def answer(headers: Message) -> Page:
        try:
            encode, content_type = choose_encoder(headers.get("Accept", ""))
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = choose_encoder("")
        return Page(content_type, encode(registry))

    return answer


def status_routes(status: Callable[[], Status]) -> dict[str, Route]:
    """Returns the routes of a page that shows what `status` returns."""
    page = Page("text/html; charset=utf-8", files(__package__).joinpath("page.html").read_bytes())

    def as_json(headers: Message) -> Page:
        text = json.dumps(_finite(asdict(status())), allow_nan=False)
        return Page("application/json", text.encode())

    return {"/": lambda headers: page, "/status.json": as_json}


def _finite(value: Any) -> Any:
    """Returns a value of JSON: numbers that are nan or infinite become null."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Readers:
    """Access checks of requests; raises UsageError if the tokens cannot be read."""

    def __init__(self, credentials: Credentials) -> None:
        self._tokens = WatchedTokens(credentials) if credentials.has_token else None
        self._has_certificates = bool(credentials.client_ca)

    def refusal(self, headers: Headers, certificate: Mapping[str, Any] | None) -> str:
        """Returns why a request is refused; empty: it is allowed. See `http_port.Refusal`."""
        if self._tokens is not None:
            token = _token_of(headers)
            if token is None:
                return (
                    "this process needs a token: send Authorization: Bearer TOKEN, or the "
                    "token as password"
                )
            if self._tokens.access_of(token) is None:
                return f"unknown token: compare it with {TOKEN_FILE} or {TOKEN} of this process"
            return ""
        common_names = [
            value
            for relative_name in (certificate or {}).get("subject", ())
            for name, value in relative_name
            if name == "commonName"
        ]
        if self._has_certificates and not any(map(access_of_name, common_names)):
            accesses = ", ".join(map(str, Access))
            return f"the common name of the certificate names no access, expected one of {accesses}"
        return ""


def _token_of(headers: Headers) -> str | None:
    shown = headers.get("Authorization", "")
    scheme, _, value = shown.partition(" ")
    if scheme.lower() != "basic":
        return token_in([("authorization", shown)])
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return None
