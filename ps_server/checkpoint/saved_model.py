"""Parameters of a checkpoint for inference without servers: rows are mapped, only dense blocks are loaded."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from protos.errors import CheckpointError
from protos.gradients import Values
from protos.keys import Keys
from protos.runtime.jit import read_only
from ps_server.checkpoint.files.mapped_rows import read_layers
from ps_server.checkpoint.reader import Checkpoint


class SavedModel:
    """The parameters of one checkpoint. Immutable, so thread-safe."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Maps the rows, and reads the dense blocks.

        Raises:
            CheckpointError: If a file is missing or truncated, or altered in what is read of it.
        """
        self.checkpoint = checkpoint
        self._rows = {name: checkpoint.map_rows(name) for name in checkpoint.tables}
        self._dense = {
            name: read_only(checkpoint.read_dense(name, slice(0, block.length)).weights)
            for name, block in checkpoint.blocks.items()
        }

    @classmethod
    def open(cls, url: str | Path) -> "SavedModel":
        """Opens the checkpoint `url`, or the latest one in that folder.

        Raises:
            CheckpointError: If there is none, or it is not complete.
        """
        return cls(Checkpoint.open(url))

    @property
    def dense(self) -> Mapping[str, Values]:
        """The dense blocks, float32[n] by name, read-only."""
        return MappingProxyType(self._dense)

    def read(self, table: str, keys: Keys) -> Values:
        """Returns the rows of `keys` uint64[N] as float32[N, D]; missing keys have the table's default value.

        Raises:
            CheckpointError: If there is no such table.
        """
        return self.find(table, keys)[0]

    def find(self, table: str, keys: Keys) -> tuple[Values, NDArray[np.bool_]]:
        """Returns what `read` does, and bool[N], whether each key has a row.

        Raises:
            CheckpointError: If there is no such table.
        """
        if table not in self._rows:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.url} has no table {table!r}, only {sorted(self._rows)}"
            )
        spec = self.checkpoint.tables[table]
        rows = np.full((keys.size, spec.dim), spec.default_value, np.float32)
        has_row = read_layers(self._rows[table], keys, rows)
        return rows, has_row
