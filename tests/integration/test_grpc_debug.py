"""gRPC's reflection and channelz of a server: what they tell on request, and to whom."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from ctr_ps.protos.wire.calls import CALLS
from ctr_ps.protos.wire.security.access import Access
from ctr_ps.protos.wire.security.credentials import Credentials, open_channel
from ctr_ps.ps_server.rpc.health import SERVICE
from ctr_ps.ps_server.store import ParameterStore
from tests.support.certificates import CertificateAuthority
from tests.support.cluster import cluster

LIMIT_S = 10.0
READER = "reader-0123456789"


@contextmanager
def channel_to_server(
    server: Credentials | None = None, caller: Credentials | None = None, **settings: Any
) -> Iterator[grpc.Channel]:
    with cluster(num_servers=0) as servers:
        endpoint = servers.start_server(
            ParameterStore(num_workers=1, wait_limit_s=LIMIT_S), credentials=server, **settings
        )
        with open_channel(endpoint, caller or Credentials()) as channel:
            yield channel


def code_of_reflection(channel: grpc.Channel, credentials: Credentials) -> grpc.StatusCode:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([request]), timeout=LIMIT_S, metadata=credentials.metadata()
    )
    try:
        list(answers)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def code_of_channelz(channel: grpc.Channel, credentials: Credentials) -> grpc.StatusCode:
    try:
        channelz_pb2_grpc.ChannelzStub(channel).GetServers(
            channelz_pb2.GetServersRequest(), timeout=LIMIT_S, metadata=credentials.metadata()
        )
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def codes(channel: grpc.Channel, credentials: Credentials) -> set[grpc.StatusCode]:
    return {code_of_reflection(channel, credentials), code_of_channelz(channel, credentials)}


def test_reflection_describes_each_call() -> None:
    with channel_to_server(grpc_debug=True) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        (service,) = database.FindFileContainingSymbol(SERVICE).service
        assert {method.name for method in service.method} == set(CALLS)


def test_channelz_counts_the_calls_of_a_server() -> None:
    with channel_to_server(grpc_debug=True) as channel:
        stub = channelz_pb2_grpc.ChannelzStub(channel)
        counts = []
        for _ in range(2):
            answer = stub.GetServers(channelz_pb2.GetServersRequest(), timeout=LIMIT_S)
            counts.append(sum(server.data.calls_started for server in answer.server))
        assert counts[1] > counts[0] > 0


def test_nothing_of_it_is_answered_unless_asked_for() -> None:
    with channel_to_server() as channel:
        assert codes(channel, Credentials()) == {grpc.StatusCode.UNIMPLEMENTED}


def test_it_needs_a_token_of_a_reader(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"reader {READER}\nadmin 0123456789abcdef-admin\n")
    with channel_to_server(Credentials(token_file=str(tokens)), grpc_debug=True) as channel:
        assert codes(channel, Credentials()) == {grpc.StatusCode.UNAUTHENTICATED}
        assert codes(channel, Credentials(token=READER[::-1])) == {grpc.StatusCode.UNAUTHENTICATED}
        assert codes(channel, Credentials(token=READER)) == {grpc.StatusCode.OK}


@pytest.mark.parametrize("name", ["guest", *(f"ctr-ps-{access}" for access in Access)])
def test_it_needs_a_certificate_of_a_reader(name: str, tmp_path: Path) -> None:
    authority = CertificateAuthority(tmp_path)
    server = authority.credentials("server")
    caller = authority.credentials("caller", common_name=name)
    with channel_to_server(server, caller, grpc_debug=True) as channel:
        expected = grpc.StatusCode.UNAUTHENTICATED if name == "guest" else grpc.StatusCode.OK
        assert codes(channel, caller) == {expected}
