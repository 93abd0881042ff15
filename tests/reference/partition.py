"""Where a key lives, in Python's big integers; and hashes turned back into keys."""

MASK = 2**64 - 1
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix64(key: int) -> int:
    hashed = (key ^ (key >> 30)) * MULTIPLIERS[0] & MASK
    hashed = (hashed ^ (hashed >> 27)) * MULTIPLIERS[1] & MASK
    return hashed ^ (hashed >> 31)


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
    return shard_of(key, num_shards) % num_servers


def server_of_element(element: int, length: int, num_servers: int) -> int:
    """Returns the last server whose piece begins at or before an element of a dense block."""
    return max(server for server in range(num_servers) if length * server // num_servers <= element)
