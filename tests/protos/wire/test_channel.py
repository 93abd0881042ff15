"""Options of channels: the library ignores those that it does not have, without a word."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from ctr_ps.protos.wire.channel import CHANNEL_OPTIONS, SERVER_OPTIONS, server_options

NAMES = {name for name, _ in [*CHANNEL_OPTIONS, *SERVER_OPTIONS]}


@pytest.fixture(scope="module")
def library() -> bytes:
    """The bytes of gRPC's compiled library, which has the names of all options that it reads."""
    return Path(cygrpc.__file__).read_bytes()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_library_reads_every_option(library: bytes, name: str) -> None:
    assert name.encode() + b"\0" in library


def test_callers_who_have_gone_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    server_options()
    for error in (cygrpc.ExecuteBatchError("SendMessage"), ValueError("a fault of ours")):
        try:
            raise error
        except Exception:
            logging.getLogger(cygrpc.__name__).exception("raised by servicer method")

    assert [each.exc_info[1] for each in caplog.records if each.exc_info] == [error]


def test_compressed_message_is_refused_before_it_is_one() -> None:
    """Also of callers who are known."""
    asked = []
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    method = grpc.unary_unary_rpc_method_handler(lambda request, _: asked.append(request) or b"")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", {"C": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/a.B/C")
            call(b"plain", timeout=20)
            with pytest.raises(grpc.RpcError) as refused:
                call(bytes(2**20), timeout=20, compression=grpc.Compression.Gzip)
    finally:
        server.stop(None).wait(20)

    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    assert asked == [b"plain"]


def test_ports_of_a_process_share_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctr_ps.protos.wire.channel.connection_limit", lambda: 900)

    for ports, connections in ((1, 900), (2, 450)):
        assert (
            dict(server_options(ports=ports))["grpc.max_allowed_incoming_connections"]
            == connections
        )
