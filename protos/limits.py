"""Limits of requests and answers, for both sides of the wire. Imports nothing: health checks load it."""

MAX_MESSAGE_BYTES = 16 * 2**20
"""No message is larger; requests and answers are split well below it."""

CHUNK_BYTES = 4 * 2**20
"""Size of a chunk: messages of 7 MB were measured slower a byte than of 4 MB."""

HEADERS_BYTES = 64 * 2**10  # room in a message beside its numbers: ample

MAX_NUMBERS_BYTES = MAX_MESSAGE_BYTES - HEADERS_BYTES
"""Most bytes of numbers in a message."""

MAX_CHUNKS = 1024
"""Chunks of one push to one server: 4 GiB."""

MAX_NAME_CHARACTERS = 100
"""Of a table, a dense block, a barrier or an exchange."""

MAX_TABLES = 256
"""Tables of a server; it has as many dense blocks at most."""

MAX_SEGMENTS = 4096
"""Tensors of a dense block."""

MAX_TOTAL_SHARDS = 2**16
"""Shards of all tables of a server: their digests, of up to 150 bytes each with the name, fit a message."""

MAX_EXCHANGES = 4
"""Exchanges with messages for one receiver. It takes from one, and fast workers may post to the next."""

MAX_MESSAGES = 2**16
"""Messages for one receiver in an exchange, beside the limit of their bytes: empty ones cost memory, too."""

MAX_BARRIERS = 8
"""Barriers at which one worker waits. It waits at one, but a call that was cancelled waits on."""
