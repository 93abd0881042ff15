"""Tokens and what they give access to."""

import pytest

from ctr_ps.protos.errors import AccessError, UnknownCallerError, UsageError
from ctr_ps.protos.wire.calls import CALLS
from ctr_ps.protos.wire.security.access import (
    Access,
    Tokens,
    access_of_name,
    metadata_of_token,
    own_token,
    token_in,
)
from ctr_ps.protos.wire.security.authorization import Authority
from ctr_ps.protos.wire.security.credentials import Credentials

LONG = "0123456789abcdef"
FILE = f"""# tokens of the ranking team

{LONG}-of-all
reader  {LONG}-of-readers
trainer {LONG}-of-trainers
"""


def test_file_has_a_token_a_line_with_its_access() -> None:
    tokens = Tokens.parse(FILE, "tokens")

    found = [tokens.access_of(f"{LONG}-of-{name}") for name in ("all", "readers", "trainers", "us")]

    assert found == [Access.ADMIN, Access.READER, Access.TRAINER, None]


def test_token_of_a_caller_is_the_first_of_its_file() -> None:
    assert own_token(FILE, "tokens") == f"{LONG}-of-all"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "tokens has no token"),
        ("# none\n", "tokens has no token"),
        ("short\n", "tokens:1: the token has 5 characters, expected at least 16"),
        (f"\nboss {LONG}\n", "tokens:2: expected a token, or one of reader, trainer, admin and a"),
        (f"{LONG} {LONG} {LONG}\n", "tokens:1: expected a token"),
        (f"{LONG}\N{BULLET}\n", "tokens:1: .* of ASCII"),
        (f"reader {LONG}\nadmin {LONG}\n", "tokens:2: this token is already in"),
    ],
)
def test_file_that_is_none_names_the_line_and_no_token(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        Tokens.parse(text, "tokens")
    assert LONG not in str(raised.value)


def test_token_travels_in_metadata() -> None:
    metadata = (("user-agent", "x"), *metadata_of_token(LONG))

    assert token_in(metadata) == LONG
    assert token_in((("authorization", f"bearer {LONG}"),)) == LONG
    assert token_in((("authorization", "Basic x"),)) is None
    assert token_in(()) is None


@pytest.mark.parametrize(
    ("name", "access"),
    [
        ("ctr-ps-trainer", Access.TRAINER),
        ("ctr-ps-trainer.worker-3", Access.TRAINER),
        ("ctr-ps-admin.example.com", Access.ADMIN),
        ("ctr-ps-reader", Access.READER),
        ("ctr-ps-trainers", None),
        ("admin.example.com", None),
        ("trainer", None),
        ("worker.ctr-ps-trainer", None),
        ("ctr-ps-", None),
        ("", None),
    ],
)
def test_common_name_says_the_access_before_its_dot(name: str, access: Access | None) -> None:
    assert access_of_name(name) == access


def test_greater_access_includes_smaller() -> None:
    authority = Authority(Credentials(), CALLS.values())
    trainer = {"x509_common_name": [b"ctr-ps-trainer"]}

    assert authority.refusal_of_peer(CALLS["GetStatus"], trainer) is None

    refusal = authority.refusal_of_peer(CALLS["Save"], trainer)
    assert type(refusal) is AccessError
    assert str(refusal) == "Save needs the access 'admin', but this caller has 'trainer'"

    refusal = authority.refusal_of_peer(CALLS["GetStatus"], {})
    assert type(refusal) is UnknownCallerError
    assert str(refusal).startswith(
        "GetStatus is refused: the common name of the caller's certificate"
    )


def test_calls_that_change_nothing_are_for_readers_and_those_on_files_for_admins() -> None:
    by_access = {
        access: {name for name, c in CALLS.items() if c.access is access} for access in Access
    }

    assert by_access[Access.READER] == {
        *("GetDigest", "GetMap", "GetStatus", "PullDense", "PullSparse"),
    }
    assert by_access[Access.ADMIN] == {
        *("BeginMove", "GetJobState", "HoldMove", "PrepareMove", "PutMoved", "TakeMoved"),
        "CheckFolder",
        "Load",
        "Resume",
        "Save",
        "Shrink",
        "Snapshot",
    }
