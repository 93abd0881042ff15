"""TLS without a socket: its owner receives and sends the bytes."""

import ssl
from collections.abc import Mapping
from typing import Any

PIECE_BYTES = 64 * 2**10
"""Of what goes in at once: OpenSSL keeps buffers as large as the largest piece, for each connection."""

_MAX_REPLIES_BYTES = 4 * 2**10
"""Of TLS itself, such as to a change of keys; they leave with the next frame."""


class TlsLayer:
    """TLS of one connection.

    Its calls never wait. Not thread-safe: not even reading beside writing.
    """

    def __init__(self, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """Prepares one side: with `server_name`, which the server's certificate must have, the client's."""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )

    def do_handshake(self) -> bool:
        """Continues the handshake, and returns whether it is done; there may be data to send in any case.

        Raises:
            ssl.SSLError: If it fails, as of a certificate that is not trusted.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def receive_data(self, data: bytes | memoryview) -> None:
        """Takes bytes from the peer."""
        self._incoming.write(data)

    def data_to_send(self) -> bytes:
        """Returns the bytes for the peer since the last call."""
        return self._outgoing.read()

    def read_into(self, view: memoryview) -> int:
        """Reads into `view`, and returns how many bytes; 0: more must be received first.

        Raises:
            ssl.SSLError: If it is no TLS.
            ConnectionResetError: If the peer has ended it.
        """
        try:
            count: int = self._tls.read(len(view), view)  # type: ignore[assignment]
        except ssl.SSLWantReadError:
            if self._outgoing.pending > _MAX_REPLIES_BYTES:
                raise ConnectionResetError("the peer only sends what TLS replies to") from None
            return 0
        if not count:
            raise ConnectionResetError("the peer has ended it")
        return count

    def has_unread(self) -> bool:
        """Whether there are bytes from the peer that were not read."""
        return bool(self._incoming.pending or self._tls.pending())

    def write(self, head: bytes, body: bytes) -> bytes:
        """Returns the bytes for the peer of a frame."""
        if len(head) + len(body) <= PIECE_BYTES:
            self._tls.write(head + body)
            return self.data_to_send()
        self._tls.write(head)
        sent = [self.data_to_send()]
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            self._tls.write(view[start : start + PIECE_BYTES])
            sent.append(self.data_to_send())
        return b"".join(sent)

    def auth_context(self) -> Mapping[str, list[bytes]]:
        """Returns the common names in the peer's certificate, as gRPC's contexts do."""
        certificate: Mapping[str, Any] = self._tls.getpeercert() or {}
        return {
            "x509_common_name": [
                value.encode()
                for part in certificate.get("subject", ())
                for name, value in part
                if name == "commonName"
            ]
        }
