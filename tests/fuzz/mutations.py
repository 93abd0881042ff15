"""Other bytes, text and JSON documents of given ones."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

Place = tuple[Any, ...]

NUMBERS = [0, 1, -1, 2, 3, 4, 7, 64, 4096, 2**31, 2**32, 2**63, 2**64, 10**30, 0.5, 1e300]
VALUES = [
    *NUMBERS,
    float("nan"),
    None,
    True,
    "",
    "0",
    "wide",
    "../x",
    "ab" * 16,
    "adam",
    "adam_row",
    "float16",
    "delta",
    "inference",
    "removed",
    "\ud800",
    [],
    {},
    [[]],
]
WORDS = [0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def places_of(document: Any, path: Place = ()) -> Iterator[Place]:
    """Yields the places of all values within a document."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        yield (*path, key)
        yield from places_of(value, (*path, key))


def mutate_document(document: Any, rng: random.Random) -> None:
    """Gives some values of a document another value, or removes them."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = list(places_of(document))
        if not places:
            return
        *parents, last = rng.choice(places)
        place = document
        for part in parents:
            place = place[part]
        value = place[last]
        if rng.random() < 0.1:
            del place[last]
        elif isinstance(value, list) and value and rng.random() < 0.5:
            place[last] = rng.choice([value[:-1], value[::-1], value * 2])
        else:
            place[last] = deepcopy(rng.choice(VALUES))  # it may be changed in turn


def mutated_json(text: bytes, rng: random.Random) -> bytes:
    """Returns a document with other values, seldom with other bytes."""
    document = json.loads(text)
    mutate_document(document, rng)
    text = json.dumps(document).encode()
    return mutated(text, rng) if rng.random() < 0.1 else text


def mutated(content: bytes, rng: random.Random, words: Sequence[bytes] = ()) -> bytes:
    """Returns bytes with some others in between, in place of them, or without some; none in one of ten.

    Args:
        content: The bytes.
        rng: Draws.
        words: What the format has a meaning for.
    """
    data = bytearray(content)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 4, 8, 16, 1])):
        at = rng.randrange(len(data) + 1)
        rng.choice(_CHANGES)(data, at, rng, words)
    return bytes(data)


def _flip(data: bytearray, at: int, rng: random.Random, words: Sequence[bytes]) -> None:
    if at < len(data):
        data[at] ^= 1 << rng.randrange(8)


def _set(data: bytearray, at: int, rng: random.Random, words: Sequence[bytes]) -> None:
    if at < len(data):
        data[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])


def _write(data: bytearray, at: int, rng: random.Random, words: Sequence[bytes]) -> None:
    size = rng.choice([2, 4, 8])
    at = min(at, max(0, len(data) - size))
    data[at : at + size] = (rng.choice(WORDS) % 2 ** (8 * size)).to_bytes(size, "little")


def _remove(data: bytearray, at: int, rng: random.Random, words: Sequence[bytes]) -> None:
    del data[at : at + rng.choice([1, 1, 2, 4, 8, 100])]


def _repeat(data: bytearray, at: int, rng: random.Random, words: Sequence[bytes]) -> None:
    data[at:at] = data[at : at + rng.randrange(1, 40)] * rng.choice([1, 1, 2, 30])


def _insert(data: bytearray, at: int, rng: random.Random, words: Sequence[bytes]) -> None:
    data[at:at] = rng.randbytes(rng.randrange(1, 9))


def _insert_word(data: bytearray, at: int, rng: random.Random, words: Sequence[bytes]) -> None:
    if words:
        data[at:at] = rng.choice(words) * rng.choice([1, 1, 1, 2, 30])


def _truncate(data: bytearray, at: int, rng: random.Random, words: Sequence[bytes]) -> None:
    if rng.random() < 0.2:
        del data[at:]


_CHANGES: Sequence[Callable[[bytearray, int, random.Random, Sequence[bytes]], None]] = (
    _flip,
    _flip,
    _set,
    _write,
    _remove,
    _repeat,
    _insert,
    _insert_word,
    _insert_word,
    _truncate,
)
