"""Parameters of a checkpoint for inference without servers."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.jit import read_only
from ctr_ps.ps_server.checkpoint.files.saved_rows import read_layers
from ctr_ps.ps_server.checkpoint.reader import Checkpoint


class SavedModel:
    """The parameters of one checkpoint, copied into memory. Immutable, so thread-safe.

    `maps` maps the files of rows instead, for a model larger than memory: they must not be changed. Each
    lookup notices changes of size and time; truncation during a lookup ends the process. `verifies`
    compares all checksums, of the bytes in memory unless they are mapped. Raises CheckpointError if a file
    is missing, truncated or altered.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, maps: bool = False, verifies: bool = False
    ) -> None:
        self.checkpoint = checkpoint
        if verifies:
            checkpoint.verify(without_rows=not maps)
        self._rows = {
            name: checkpoint.saved_rows(name, maps=maps, verifies=verifies)
            for name in checkpoint.tables
        }
        self._dense = {
            name: read_only(checkpoint.read_dense(name, slice(0, block.length)).weights)
            for name, block in checkpoint.blocks.items()
        }

    @classmethod
    def open(cls, url: str | Path) -> "SavedModel":
        """Opens the checkpoint `url`, or the latest one in that folder, in memory; see `Checkpoint.open`."""
        return cls(Checkpoint.open(url))

    @property
    def dense(self) -> Mapping[str, Values]:
        """The dense blocks, float32[n] by name, read-only."""
        return MappingProxyType(self._dense)

    def read(self, table: str, keys: Keys) -> Values:
        """Returns the rows of `keys` uint64[N] as float32[N, D]; missing keys have the table's default value.

        Raises CheckpointError if there is no such table, or its mapped files were changed.
        """
        return self.find(table, keys)[0]

    def find(self, table: str, keys: Keys) -> tuple[Values, NDArray[np.bool_]]:
        """As `read`, with bool[N], whether each key has a row."""
        if table not in self._rows:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.url} has no table {table!r}, only {sorted(self._rows)}"
            )
        spec = self.checkpoint.tables[table]
        rows = np.full((keys.size, spec.dim), spec.default_value, np.float32)
        has_row = read_layers(self._rows[table], keys, rows)
        return rows, has_row
