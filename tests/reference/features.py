"""The feature hash in Python's big integers, straight from docs/features.md."""

MASK = 2**64 - 1
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def mix64(word: int) -> int:
    word = ((word ^ (word >> 30)) * MULTIPLIERS[0]) & MASK
    word = ((word ^ (word >> 27)) * MULTIPLIERS[1]) & MASK
    return word ^ (word >> 31)


def key_of(slot: int, value: bytes) -> int:
    state = mix64((slot * 0x9E3779B97F4A7C15) & MASK)
    for start in range(0, len(value), 8):
        state = mix64(state ^ int.from_bytes(value[start : start + 8], "little"))
    return mix64(state ^ len(value))
