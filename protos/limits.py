"""Sizes of messages, for both sides of the wire. Imports nothing: health checks load it."""

MAX_MESSAGE_BYTES = 16 * 2**20
"""No message is larger; requests and answers are split well below it."""

CHUNK_BYTES = 4 * 2**20
"""Size of a chunk: messages of 7 MB were measured slower a byte than of 4 MB."""

HEADERS_BYTES = 64 * 2**10
"""Room in a message beside its numbers: ample."""

MAX_CHUNKS = 1024
"""Chunks of one push to one server: 4 GiB."""
