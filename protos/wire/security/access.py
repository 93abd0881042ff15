"""Access: what callers of a server may do, and how they are identified.

    reader     looks at parameters and status: predictions, dashboards
    trainer    takes part in a job: joins, pushes, waits for others
    admin      saves, loads and shrinks, too, as worker 0 of a job does

Each includes those above it; protos/wire/calls.py has the access that a call needs. A caller shows a token
or, over mutual TLS, a certificate with a common name such as ctr-ps-trainer or ctr-ps-trainer.worker-3.
"""

import enum
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from ctr_ps.protos.errors import UsageError

TOKEN_KEY = "authorization"
"""Key of the metadata of a call; its value is `Bearer TOKEN`."""

MIN_TOKEN_CHARACTERS = 16

NAME_PREFIX = "ctr-ps-"
"""Of common names that give access: no host has one by chance."""

_SCHEME = "Bearer "


class Access(enum.IntEnum):
    """What a caller may do, in ascending order."""

    READER = 1
    TRAINER = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Returns the access of a lower-case name, or None."""
        return next((each for each in cls if each.name.lower() == name), None)

    def __str__(self) -> str:
        """The name in lower case."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A method of a server, by the full name of its service, and the access that its caller needs."""

    service: str
    name: str
    access: Access = Access.READER

    @property
    def path(self) -> str:
        """Its path on the wire."""
        return f"/{self.service}/{self.name}"


class Tokens:
    """The tokens that a server accepts, stored as hashes. Thread-safe: immutable."""

    def __init__(self, access: Mapping[str, Access]) -> None:
        self._access = {_hash(token): of for token, of in access.items()}

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Parses a file with one token a line: `TOKEN`, for all calls, or `ACCESS TOKEN`.

        Empty lines and those that begin with # are ignored. UsageError, with `source` and without any token,
        if a line is invalid, a token is too short or repeated, or there is none.
        """
        access: dict[str, Access] = {}
        for number, line in _lines(text):
            token, of = _line(line, f"{source}:{number}")
            if token in access:
                raise UsageError(
                    f"{source}:{number}: this token is already in an earlier line: remove one of the lines"
                )
            access[token] = of
        if not access:
            raise UsageError(
                f"{source} has no token: write one of at least {MIN_TOKEN_CHARACTERS} characters"
            )
        return cls(access)

    def access_of(self, token: str) -> Access | None:
        """Returns the access of a token, or None if unknown, in the same time for any token."""
        shown, found = _hash(token), None
        for known, access in self._access.items():
            if hmac.compare_digest(shown, known):
                found = access
        return found


def own_token(text: str, source: str) -> str:
    """Returns the token that a caller shows, the first of its file; raises UsageError if there is none."""
    for number, line in _lines(text):
        return _line(line, f"{source}:{number}")[0]
    raise UsageError(f"{source} has no token")


def metadata_of_token(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a call with a token."""
    return ((TOKEN_KEY, f"{_SCHEME}{token}"),)


def token_in(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Returns the token in a call's metadata, or None."""
    for key, value in metadata:
        if key == TOKEN_KEY and isinstance(value, str):
            is_token = value[: len(_SCHEME)].lower() == _SCHEME.lower()  # as HTTP compares schemes
            return value[len(_SCHEME) :] if is_token else None
    return None


def access_of_name(common_name: str) -> Access | None:
    """Returns the access in a certificate's common name, or None."""
    name = common_name.partition(".")[0]
    return Access.named(name.removeprefix(NAME_PREFIX)) if name.startswith(NAME_PREFIX) else None


def _hash(token: str) -> bytes:
    # Headers of HTTP may have bytes that are not UTF-8.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _lines(text: str) -> Iterable[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield number, stripped


def _line(line: str, place: str) -> tuple[str, Access]:
    match line.split():
        case [token]:
            access: Access | None = Access.ADMIN
        case [name, token]:
            access = Access.named(name)
        case _:
            access, token = None, ""
    if access is None:
        names = ", ".join(map(str, Access))
        raise UsageError(f"{place}: expected a token, or one of {names} and a token")
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise UsageError(
            f"{place}: the token has {len(token)} characters, expected at least {MIN_TOKEN_CHARACTERS} of "
            "ASCII; to make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return token, access
