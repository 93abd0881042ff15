"""Options of channels and servers, each with its reason. The two sides' limits must match."""

import logging
from typing import Any

from ctr_ps.protos.limits import MAX_CHUNKS, MAX_MESSAGE_BYTES
from ctr_ps.protos.runtime.environment import connection_limit

_COMMON = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The default of 16 KiB cuts a pull into a hundred frames; 4 MiB moved up to 50 % more bytes/s.
    ("grpc.http2.max_frame_size", 4 * 2**20),
]

CHANNEL_OPTIONS = [
    *_COMMON,
    # Servers are neighbours: a proxy that the environment names (http_proxy) is for the world outside.
    ("grpc.enable_http_proxy", 0),
    # A dead server's machine answers nothing at all: without pings a call would wait for its deadline.
    ("grpc.keepalive_time_ms", 30_000),
    # How long a ping may go unanswered, 60 s unless told; gRPC heeds grpc.keepalive_timeout_ms no more.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # A worker should see servers that start, or are started again, soon after they are up.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A server that came back may have another address: look its name up after a second, not thirty.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A call that waits for other workers carries no data for long: pings go on all the same.
    ("grpc.http2.max_pings_without_data", 0),
    # Clients of one process would otherwise share one connection, and its one stream of bytes.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS = [
    *_COMMON,
    # With it on (the default) two servers share a port without an error, and each gets half the calls.
    ("grpc.so_reuseport", 0),
    # Let clients ping as often as CHANNEL_OPTIONS say, also between calls.
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # No client of ours compresses, and 16 KiB of gzip would be a message of 16 MiB.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # What nobody reads, as of a caller who is refused, takes this much memory and no more: with probes, the
    # default, gRPC lets 4 MiB and more come. A message that is awaited has room for all of itself as soon as
    # it begins, before 512 KiB are sent where a round trip takes 0.4 ms at 10 Gbit/s.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 512 * 2**10),
    # Room for the chunks of a worker's largest push, and for all of its other calls.
    ("grpc.max_concurrent_streams", 4 * MAX_CHUNKS),
    # A connection has this long for TLS and for HTTP/2's first frames, and the next for a first call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
]


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def server_options(*, ports: int = 1) -> list[tuple[str, Any]]:
    """Returns the options of one of `ports` servers that share this process's connections.

    Connections above the limit are closed at once, so that the process can always open files.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)
    return [*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", connection_limit() // ports)]
