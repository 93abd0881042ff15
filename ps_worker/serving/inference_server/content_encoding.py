"""The body of a request, as it was before its Content-Encoding.

Read here and not by aiohttp, whose parser answers a fault in text, logs a traceback, and takes a body that
was cut short.
"""

import zlib

from aiohttp import web

from protos.errors import DataError
from protos.limits import MAX_MESSAGE_BYTES

_GZIP = 16 + zlib.MAX_WBITS
_ENCODINGS = ("gzip", "deflate")
_NONE = ("", "identity")


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
    content, rest = b"", body
    while True:  # gzip may have several members, one behind the other (RFC 1952)
        stream = zlib.decompressobj(_GZIP if encoding == "gzip" else _window_bits(rest))
        try:
            content += stream.decompress(rest, MAX_MESSAGE_BYTES + 1 - len(content))
        except zlib.error as error:
            raise DataError(
                f"Content-Encoding says {encoding}, but the body is not: {error}"
            ) from error
        if len(content) > MAX_MESSAGE_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_MESSAGE_BYTES, len(content))
        rest = stream.unused_data
        if not stream.eof or (rest and encoding != "gzip"):
            raise DataError(f"the body is not one whole stream of {encoding}")
        if not rest:
            return content


def _window_bits(body: bytes) -> int:
    """Returns how a body of deflate is read: with zlib's header, or as some clients send it, without."""
    has_header = bool(body) and body[0] & 0x0F == zlib.DEFLATED
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
