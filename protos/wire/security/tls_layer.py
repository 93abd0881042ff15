"""TLS without a socket: what arrives goes in, what is to be sent comes out."""

import ssl
from collections.abc import Mapping
from typing import Any

PIECE_BYTES = 64 * 2**10
"""Of what goes in at once: OpenSSL keeps buffers as large as the largest piece, for each connection."""


class TlsLayer:
    """TLS of one connection, over bytes that its owner receives and sends.

    Its calls never wait. Not thread-safe: not even reading beside writing.
    """

    def __init__(self, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """Begins a connection: of a client if it has the name that the server's certificate must have."""
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arrived,
            self._leaving,
            server_side=server_name is None,
            server_hostname=server_name,
        )

    def shakes_hands(self) -> bool:
        """Goes on with the handshake; False: it is done. What leaves is to be sent in any case.

        Raises:
            ssl.SSLError: If it fails, as of a certificate that is not trusted.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return True
        return False

    def arrived(self, data: bytes | memoryview) -> None:
        """Takes bytes that arrived."""
        self._arrived.write(data)

    def leaving(self) -> bytes:
        """Returns what is to be sent, and forgets it."""
        return self._leaving.read()

    def read_into(self, view: memoryview) -> int:
        """Reads into `view`, and returns how many bytes; 0: more must arrive first.

        Raises:
            ssl.SSLError: If it is no TLS.
            ConnectionResetError: If the peer has ended it.
        """
        try:
            return self._tls.read(len(view), view)  # type: ignore[return-value]
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLZeroReturnError:
            raise ConnectionResetError("the peer has ended it") from None

    def write(self, head: bytes, body: bytes) -> bytes:
        """Returns what is to be sent for a frame."""
        if len(head) + len(body) <= PIECE_BYTES:
            self._tls.write(head + body)
            return self.leaving()
        self._tls.write(head)
        leaving = [self.leaving()]
        rest = memoryview(body)
        while rest:
            self._tls.write(rest[:PIECE_BYTES])
            leaving.append(self.leaving())
            rest = rest[PIECE_BYTES:]
        return b"".join(leaving)

    def peer(self) -> Mapping[str, list[bytes]]:
        """Returns the common names of the peer's certificate, as gRPC's `auth_context` does."""
        certificate: Mapping[str, Any] = self._tls.getpeercert() or {}
        return {
            "x509_common_name": [
                value.encode()
                for part in certificate.get("subject", ())
                for name, value in part
                if name == "commonName"
            ]
        }
