"""Python's `hash()` of text in a user's code: each process has other values, and so other keys.

Two workers would train different rows for the same value, and a server of predictions would find none. So a
generator is asked twice for the samples of its first lines, as by two processes:

    in this process   copies of it, with hash() of text as it is, and salted otherwise, in this thread alone
    a command         by two processes (command_probe.py)

Samples that differ, while the first ones come again, are an error. Code that gives other samples each time,
as with random negatives, is left alone, and so is a PYTHONHASHSEED that the user has set. It imports little,
as data_generator.py does.
"""

import builtins
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protos.errors import DataError

MAX_LINES = 5
"""Lines that are asked for twice."""

ADVICE = (
    "hash() of text, or the order of a set of texts, which Python salts in each process: others would have "
    "other keys for the same values. Yield the text itself, in a sample or by a "
    "MultiSlotStringDataGenerator, whose values are hashed alike everywhere, or take "
    "ctr_model.features.key_of(slot, text)"
)
"""What is wrong, and what to do."""

_lock = threading.Lock()  # builtins are of the whole process


def is_salted() -> bool:
    """Whether processes have different values of `hash()`, as nobody has set PYTHONHASHSEED."""
    return os.environ.get("PYTHONHASHSEED") in (None, "", "random")


def require_stable_samples(produce: Callable[[], object], what: str = "generate_sample") -> None:
    """Refuses code of the user's whose samples follow from `hash()` of text.

    Args:
        produce: Returns the same samples anew each time, by the user's code.
        what: Name of that code, for the error.

    Raises:
        DataError: If they do.
    """
    if not is_salted():
        return
    with _lock, _counting_hashes() as hashes:
        first = _outcome(produce)
        if not hashes.num_texts:
            return
        with hashes.salted():
            other = _outcome(produce)
        if other != first and _outcome(produce) == first:
            raise DataError(f"{what} uses {ADVICE}")


class _Hashes:
    """`hash()` in the thread that made it, which counts texts and may salt them; as ever in all others."""

    def __init__(self) -> None:
        self._hash = builtins.hash
        self._thread = threading.get_ident()
        self._is_salted = False
        self.num_texts = 0

    @contextmanager
    def salted(self) -> Iterator[None]:
        self._is_salted = True
        yield
        self._is_salted = False

    def __call__(self, value: object) -> int:
        found = self._hash(value)
        if threading.get_ident() != self._thread or not _has_text(value):
            return found
        self.num_texts += 1
        return self._hash((found, "salt")) if self._is_salted else found


@contextmanager
def _counting_hashes() -> Iterator[_Hashes]:
    hashes, original = _Hashes(), builtins.hash
    builtins.hash = hashes
    try:
        yield hashes
    finally:
        builtins.hash = original


def _has_text(value: object) -> bool:
    if isinstance(value, tuple | frozenset):
        return any(map(_has_text, value))
    return isinstance(value, str | bytes)


def _outcome(produce: Callable[[], object]) -> object:
    try:
        return produce()
    except DataError as error:
        return str(error)  # it is raised with its place when the line is read
