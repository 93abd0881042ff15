"""Exceptions to gRPC status and back."""

import grpc
import pytest

from ctr_ps.protos import errors
from ctr_ps.protos.wire.grpc_status import (
    METADATA_KEY,
    RETRY_AFTER_KEY,
    details_of,
    error_of,
    metadata_of,
    status_of,
)
from tests.protos.test_errors import tree


class Failure(grpc.RpcError):
    """A failed call, as a client sees it."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] | None
    ) -> None:
        super().__init__(details)
        self._answers = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._answers[0]

    def details(self) -> str:
        return self._answers[1]

    def trailing_metadata(self) -> tuple[tuple[str, str], ...] | None:
        return self._answers[2]


@pytest.mark.parametrize("error_class", list(tree(errors.CtrPsError)), ids=lambda c: c.__name__)
def test_each_class_survives_the_trip(error_class: type[errors.CtrPsError]) -> None:
    error = error_class("table 'wide' is too wide")
    metadata = (*metadata_of(error), ("other", "thing"))

    raised = error_of(
        Failure(status_of(error), details_of(error), metadata), "ps-1:7164", "PushGrad"
    )

    assert type(raised) is error_class
    assert str(raised) == "ps-1:7164: table 'wide' is too wide"


@pytest.mark.parametrize(
    ("sent_s", "seen_s"), [(None, None), (0.0, 0.0), (0.25, 0.25), (0.0001, 0.001), (90.0, 90.0)]
)
def test_delay_of_an_overloaded_server_survives_the_trip(
    sent_s: float | None, seen_s: float | None
) -> None:
    error = errors.OverloadedError("no room", retry_after_s=sent_s)

    raised = error_of(
        Failure(status_of(error), "no room", metadata_of(error)), "ps-1:7164", "PushGrad"
    )

    assert isinstance(raised, errors.OverloadedError)
    assert raised.retry_after_s == seen_s


@pytest.mark.parametrize("value", ["", "soon", "-5", "1.5"])
def test_delay_that_is_no_number_is_none(value: str) -> None:
    metadata = ((METADATA_KEY, "OverloadedError"), (RETRY_AFTER_KEY, value))

    raised = error_of(
        Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "", metadata), "ps-1:7164", "PushGrad"
    )

    assert isinstance(raised, errors.OverloadedError)
    assert raised.retry_after_s is None


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(None, id="no-metadata"),
        pytest.param(((METADATA_KEY, "SystemExit"),), id="a-class-that-is-not-ours"),
        pytest.param(((METADATA_KEY, "ErrorOfALaterRelease"),), id="a-class-of-a-later-release"),
    ],
)
def test_other_failures_name_endpoint_and_call(
    metadata: tuple[tuple[str, str], ...] | None,
) -> None:
    failure = Failure(grpc.StatusCode.UNAVAILABLE, "connection refused", metadata)

    raised = error_of(failure, "ps-1:7164", "PushGrad")

    assert type(raised) is errors.TransportError
    assert str(raised).startswith(
        "PushGrad to server ps-1:7164 failed: UNAVAILABLE: connection refused"
    )


def test_no_error_is_sent_as_success() -> None:
    codes = {status_of(error_class("")) for error_class in tree(errors.CtrPsError)}

    assert grpc.StatusCode.OK not in codes


def test_subclass_without_a_code_has_that_of_its_base() -> None:
    assert status_of(errors.WrongServerError("")) is grpc.StatusCode.FAILED_PRECONDITION
    assert status_of(errors.UnknownTableError("")) is grpc.StatusCode.NOT_FOUND


def test_message_too_long_for_a_header_is_cut() -> None:
    details = details_of(errors.GradientError("x" * 100_000))

    assert len(details) < 2_100
    assert details.endswith("[cut]")
