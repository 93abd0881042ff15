"""Rows of the next batch, requested while this one is computed, by the training process.

async  announce(next keys) --> pull -----------.   this batch's step() is not in them
sync   announce(next keys)                     |
       step() --> pull at the version after it |   exactly what a lookup would read
                                               '--> lookups of the next batch
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.keys import Keys, unique_keys
from ctr_ps.protos.store import Future, Pulled

B = TypeVar("B")
KeysOfBatch = Callable[[B], Mapping[str, Tensor]]


def keys_of(tensor: Tensor) -> Keys:
    """Returns the keys of a tensor of any shape and device as uint64[L]; int64 is read as its 64 bits.

    Raises UsageError for another dtype.
    """
    if tensor.dtype == torch.int32:
        tensor = tensor.long()
    if tensor.dtype not in (torch.int64, torch.uint64):
        raise UsageError(
            f"keys are {tensor.dtype}, expected torch.int64, torch.uint64 or torch.int32: convert them with "
            ".long()"
        )
    return np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(-1).view(np.uint64)


class _Asked:
    def __init__(self, keys: Mapping[str, Keys], answer: Future[Pulled], num_pushes: int) -> None:
        self.num_pushes = num_pushes
        self._keys = keys
        self._answer = answer
        self._received: Pulled | None = None
        self._order: dict[str, np.ndarray[Any, Any]] = {}

    @property
    def _pulled(self) -> Pulled:
        # Not a cached_property: until Python 3.12 those of all threads wait for each other.
        if self._received is None:
            self._received = self._answer.result()
        return self._received

    def rows_of(self, table: str, keys: Keys) -> Pulled | None:
        """Returns the rows of a table's unique keys; None: some are missing."""
        own = self._keys.get(table)
        if own is None:
            return None
        if np.array_equal(own, keys):
            return Pulled({table: self._pulled.rows[table]}, self._pulled.version)
        if table not in self._order:
            self._order[table] = np.argsort(own)
        order = self._order[table]
        places = np.searchsorted(own, keys, sorter=order)
        if not own.size or places.max(initial=0) == own.size:
            return None
        found = order[places]
        if not np.array_equal(own[found], keys):
            return None
        return Pulled({table: self._pulled.rows[table][found]}, self._pulled.version)


class Prefetcher:
    """The rows of the current and the next batch. For one thread."""

    def __init__(
        self,
        pull: Callable[[Mapping[str, Keys]], Future[Pulled]],
        tables: Collection[str],
        *,
        is_exact: bool,
    ) -> None:
        """Pulls rows of `tables`, which may grow; if `is_exact`, rows that miss a push are discarded."""
        self._pull = pull
        self._tables = tables
        self._is_exact = is_exact
        self._num_pushes = 0
        self.clear()

    def batches(self, loader: Iterable[B], keys_of_batch: KeysOfBatch[B]) -> Iterator[B]:
        """Yields the batches of a loader; see `Tables.prefetching`."""
        waiting: list[B] = []
        try:
            for batch in loader:
                self.advance()
                self.announce(self._checked(keys_of_batch(batch)))
                yield from waiting
                waiting = [batch]
            self.advance()
            yield from waiting
        finally:
            self.clear()

    def _checked(self, answer: Mapping[str, Tensor]) -> Mapping[str, Keys]:
        if not isinstance(answer, Mapping):
            raise UsageError(
                f"keys_of_batch returned a {type(answer).__name__}, expected keys by table, such as "
                '{"items": batch["items"]}'
            )
        for table, keys in answer.items():
            if table not in self._tables:
                known = ", ".join(sorted(self._tables)) or "none: attach a module first"
                raise UsageError(
                    f"keys_of_batch returned keys of the table {table!r}, but the tables are {known}"
                )
            if not isinstance(keys, Tensor):
                raise UsageError(
                    f"keys_of_batch returned a {type(keys).__name__} for the table {table!r}, expected a "
                    f"tensor of keys"
                )
        return {table: unique_keys(keys_of(keys))[0] for table, keys in answer.items()}

    def clear(self) -> None:
        """Forgets all rows."""
        self._next_keys: Mapping[str, Keys] | None = None
        self._next: _Asked | None = None
        self._current: _Asked | None = None

    def announce(self, keys: Mapping[str, Keys]) -> None:
        """Takes the unique keys of the next batch, by table."""
        self._next_keys = keys
        if not self._is_exact:
            self._ask(keys)

    def advance(self) -> None:
        """Moves on to the next batch."""
        self._current, self._next, self._next_keys = self._next, None, None

    def rejoined(self) -> None:
        """Invalidates rows requested before others may have taken steps alone."""
        self._current = None
        self._ask_exact()

    def pushed(self) -> None:
        """Records another push of this worker."""
        self._num_pushes += 1
        self._ask_exact()

    def _ask_exact(self) -> None:
        if self._is_exact and self._next_keys is not None:
            self._ask(self._next_keys)

    def _ask(self, keys: Mapping[str, Keys]) -> None:
        self._next = _Asked(keys, self._pull(keys), self._num_pushes)

    def rows_of(self, table: str, keys: Keys) -> Pulled | None:
        """Returns rows that miss no push of this worker, or in the asynchronous mode at most one."""
        asked = self._current
        if asked is None or self._num_pushes - asked.num_pushes > (0 if self._is_exact else 1):
            return None
        return asked.rows_of(table, keys)
