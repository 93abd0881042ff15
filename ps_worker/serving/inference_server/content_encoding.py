"""The body of a request, as it was before its Content-Encoding.

Read here and not by aiohttp, whose parser answers a fault in text, logs a traceback, and takes a body that
was cut short.
"""

import zlib

from aiohttp import web

from protos.errors import DataError, counted
from protos.limits import MAX_MESSAGE_BYTES

_GZIP = 16 + zlib.MAX_WBITS
_ENCODINGS = ("gzip", "deflate")
_NONE = ("", "identity")

MAX_MEMBERS = 1024
"""Of a body in gzip: one of blocks, as bgzip makes it, of 16 MiB has 257."""

_PIECE_BYTES = 64 * 2**10
"""What a member leaves over is copied, so a body is read in pieces."""


def decoded(body: bytes, encoding: str) -> bytes:
    """Returns the content of a body.

    Args:
        body: As it came.
        encoding: What its Content-Encoding says; empty: nothing.

    Raises:
        DataError: If the encoding is none that is known, or the body is not in it.
        HTTPRequestEntityTooLarge: If the content is larger than a request may be.
    """
    encoding = encoding.strip().lower().removeprefix("x-")
    if encoding in _NONE:
        return body
    if encoding not in _ENCODINGS:
        raise DataError(
            f"Content-Encoding is {encoding[:100]!r}, expected {' or '.join(_ENCODINGS)}"
        )
    window_bits = _GZIP if encoding == "gzip" else _window_bits(body)
    try:
        return _decompressed(body, window_bits, MAX_MEMBERS if encoding == "gzip" else 1)
    except (zlib.error, EOFError) as error:
        raise DataError(
            f"Content-Encoding says {encoding}, but the body is not: {error}"
        ) from error


def _decompressed(body: bytes, window_bits: int, max_members: int) -> bytes:
    """Returns the content of members, one behind the other (RFC 1952); takes time for the bytes alone.

    Raises:
        zlib.error: If a member is none.
        EOFError: If the last one is not whole, or there are too many.
        HTTPRequestEntityTooLarge: If the content is larger than a request may be.
    """
    content, num_members = bytearray(), 1
    stream = zlib.decompressobj(window_bits)
    for start in range(0, len(body), _PIECE_BYTES):
        piece = body[start : start + _PIECE_BYTES]
        while piece:
            if stream.eof:
                num_members += 1
                if num_members > max_members:
                    raise EOFError(f"it has more than {counted(max_members, 'stream')}")
                stream = zlib.decompressobj(window_bits)
            content += stream.decompress(piece, MAX_MESSAGE_BYTES + 1 - len(content))
            if len(content) > MAX_MESSAGE_BYTES:
                raise web.HTTPRequestEntityTooLarge(MAX_MESSAGE_BYTES, len(content))
            piece = stream.unused_data
    if not stream.eof:
        raise EOFError("it ends before its stream does")
    return bytes(content)


def _window_bits(body: bytes) -> int:
    """Returns how a body of deflate is read: with zlib's header, or as some clients send it, without."""
    has_header = bool(body) and body[0] & 0x0F == zlib.DEFLATED
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
