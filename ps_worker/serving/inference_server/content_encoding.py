"""The body of a request, as it was before its Content-Encoding.

Read here and not by aiohttp, whose parser answers a fault in text, logs a traceback, and takes a body that
was cut short.
"""

import zlib

from aiohttp import web

from protos.errors import DataError
from protos.limits import MAX_MESSAGE_BYTES

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
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
    encoding = encoding.strip().lower()
    if encoding in _NONE:
        return body
    if encoding not in _WINDOW_BITS:
        raise DataError(
            f"Content-Encoding is {encoding[:100]!r}, expected {' or '.join(_WINDOW_BITS)}"
        )
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        content = stream.decompress(body, MAX_MESSAGE_BYTES + 1)
    except zlib.error as error:
        raise DataError(
            f"Content-Encoding says {encoding}, but the body is not: {error}"
        ) from error
    if len(content) > MAX_MESSAGE_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_MESSAGE_BYTES, len(content))
    if not stream.eof or stream.unused_data:
        raise DataError(f"the body is not one whole stream of {encoding}")
    return content
