"""Texts of values for figures by slot value.

Hashes cannot be inverted, so the evaluated files are searched for the values. The most frequent ones of a
slot are found early, after reading few rows.
"""

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import CtrPsError
from ctr_ps.ps_worker.data.bad_rows import silent_bad_rows

logger = logging.getLogger(__name__)

MAX_ROWS = 1_000_000
"""Limit of rows to read again: other values are reported by key only."""


class ValueTexts:
    """Finds texts in files, each once. For one thread."""

    def __init__(self, files: Sequence[str], schema: Schema, format: str | None) -> None:
        self._files = files
        self._schema = schema
        self._format = format
        self._found: dict[tuple[str, int], str] = {}
        self._sought: set[tuple[str, int]] = (
            set()
        )  # each validation asks again for those without a text

    def find(self, slot: str, keys: Iterable[int]) -> dict[int, str]:
        """Returns the texts of the values of a slot with these keys, as far as they are found."""
        keys = list(keys)
        if missing := {key for key in keys if (slot, key) not in self._sought}:
            self._sought |= {(slot, key) for key in missing}
            self._read(slot, missing)
        return {key: self._found[slot, key] for key in keys if (slot, key) in self._found}

    def _read(self, slot: str, missing: set[int]) -> None:
        # Imported late: most evaluations have no slices, and not all files are Arrow's to read.
        from ctr_ps.ps_worker.data.distinct_values import DistinctValues

        bad_rows = silent_bad_rows()  # the evaluation has reported them
        values = DistinctValues(
            self._files, self._schema, slot, format=self._format, bad_rows=bad_rows
        )
        wanted = np.array(sorted(missing), np.uint64)
        try:
            for texts, keys in values:
                for place in np.flatnonzero(np.isin(keys, wanted)):
                    text = texts[int(place)].as_py().decode(errors="backslashreplace")
                    self._found[slot, int(keys[place])] = text
                    missing.discard(int(keys[place]))
                if not missing or values.rows > MAX_ROWS:
                    return
        except CtrPsError as error:
            # A file of keys or a format without values: the figures are reported by key.
            logger.info("values of slot %s have no texts: %s", slot, error)
