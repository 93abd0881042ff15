"""Where a key lives, in Python's big integers; and hashes turned back into keys."""

from tests.reference.features import MASK, MULTIPLIERS, mix64


def unmix64(hashed: int) -> int:
    key = _unshift(hashed, 31) * pow(MULTIPLIERS[1], -1, 2**64) & MASK
    key = _unshift(key, 27) * pow(MULTIPLIERS[0], -1, 2**64) & MASK
    return _unshift(key, 30)


def _unshift(mixed: int, shift: int) -> int:
    """Solves `mixed = x ^ (x >> shift)`: each round makes `shift` more of the high bits right."""
    x = mixed
    for _ in range(64 // shift):
        x = mixed ^ (x >> shift)
    return x


def shard_of(key: int, num_shards: int) -> int:
    return mix64(key) * num_shards >> 64


def server_of(key: int, num_shards: int, num_servers: int) -> int:
    return shard_of(key, num_shards) % 1024 % num_servers


def server_of_element(element: int, length: int, num_servers: int) -> int:
    """Returns the last server whose piece begins at or before an element of a dense block."""
    return max(server for server in range(num_servers) if length * server // num_servers <= element)
