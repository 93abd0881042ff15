"""Frames of the stream: what a server and a client make of each other's bytes, and of strangers'."""

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.protos.errors import CtrPsError, OverloadedError, ProtocolError
from ctr_ps.protos.wire.grpc_status import details_of, error_of, metadata_of, status_of
from ctr_ps.protos.wire.stream import (
    HEAD,
    KINDS,
    STREAMED,
    FailedCallError,
    Failure,
    body_of,
    failure_of,
    hello_of,
    metadata_of_hello,
)

KEY = 2**64 - 5
TOKEN = (("authorization", "Bearer token-of-sixteen"),)


def test_kinds_are_the_places_of_methods_in_the_proto_file_and_do_not_change():
    assert {call.name: kind for kind, call in STREAMED.items()} == {
        "PullSparse": 5,
        "PullDense": 8,
        "PullChanged": 6,
        "PushGrad": 7,
        "PushPull": 9,
        "PullState": 10,
        "PushState": 11,
        "Post": 12,
        "TakeMoved": 31,
        "PutMoved": 32,
    }
    assert KINDS["/ctr_ps.v1.ParameterServer/PushGrad"] == 7


@pytest.mark.parametrize("metadata", [(), TOKEN], ids=["nobody", "token"])
def test_hello_says_who_calls(metadata):
    frame = hello_of(KEY, metadata)
    length, kind, _, number = HEAD.unpack(frame[: HEAD.size])

    assert (length, kind, number) == (len(frame) - HEAD.size, 0, 0)
    assert metadata_of_hello(frame[HEAD.size :], KEY) == metadata


def test_hello_for_the_server_that_had_the_port_before_is_refused():
    with pytest.raises(ProtocolError, match="server that had this port before"):
        metadata_of_hello(hello_of(KEY - 1, TOKEN)[HEAD.size :], KEY)


@given(st.binary(max_size=100) | st.binary(max_size=60).map(lambda tail: bytes(8) + b"[" + tail))
def test_other_bytes_are_no_hello(body):
    with pytest.raises(ProtocolError):
        metadata_of_hello(body, KEY)


@pytest.mark.parametrize("depth", [10, 100_000])
def test_hello_that_is_nested_deeply_is_refused(depth):
    with pytest.raises(ProtocolError):
        metadata_of_hello(KEY.to_bytes(8, "little") + b"[" * depth, KEY)


@pytest.mark.parametrize(
    "error",
    [ProtocolError("step 3 came before step 2 €"), OverloadedError("full", retry_after_s=1.5)],
)
def test_failure_raises_what_the_server_raised(error: CtrPsError):
    sent = Failure(status_of(error), details_of(error), metadata_of(error))

    failure = failure_of(sent.code.value[0], body_of(sent))

    assert failure == sent
    raised = error_of(FailedCallError(failure), "server:1", "PushGrad")
    assert type(raised) is type(error)
    assert str(error) in str(raised)
    assert getattr(raised, "retry_after_s", None) == getattr(error, "retry_after_s", None)


@given(st.integers(1, 2**16 - 1), st.binary(max_size=60))
def test_failure_that_cannot_be_read_is_an_internal_error(code, body):
    assert isinstance(failure_of(code, body).code, grpc.StatusCode)
