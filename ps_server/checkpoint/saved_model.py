"""Parameters of a checkpoint for inference without servers."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ctr_ps.protos.errors import CheckpointError, UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.runtime.jit import read_only
from ctr_ps.ps_server.checkpoint.files.saved_rows import Layer, read_layers
from ctr_ps.ps_server.checkpoint.reader import Checkpoint


class SavedModel:
    """The parameters of one checkpoint, copied into memory. Immutable, so thread-safe.

    `maps` maps the files of rows instead, for a model larger than memory: they must not be changed. Each
    lookup notices changes of size and time; truncation during a lookup ends the process. `verifies`
    compares all checksums, of the bytes in memory unless they are mapped. The rows of its chain's checkpoints
    that `earlier`, opened alike, has too are not read again: a delta costs its own rows. Raises
    CheckpointError if a file is missing, truncated or altered.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        maps: bool = False,
        verifies: bool = False,
        earlier: "SavedModel | None" = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._opened = maps, verifies
        is_alike = earlier is not None and earlier._opened == self._opened
        known = earlier._layers if earlier is not None and is_alike else {}
        self._layers: dict[str, Mapping[str, Layer]] = {}  # by checksum of the manifest, and table
        for link in checkpoint.chain:
            if (layers := known.get(link.sha256)) is None:
                if verifies:
                    link.verify_own(without_rows=not maps)
                layers = {
                    name: link.own_layer(name, maps=maps, verifies=verifies) for name in link.tables
                }
            self._layers[link.sha256] = layers
        newest_first = [self._layers[link.sha256] for link in reversed(checkpoint.chain)]
        self._rows = {name: [layers[name] for layers in newest_first] for name in checkpoint.tables}
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

    def read(self, table: str, keys: ArrayLike) -> Values:
        """Returns the rows of `keys`, [N], as float32[N, D]; missing keys have the table's default value.

        Keys are whole numbers: uint64, or signed ones as their 64 bits. Raises UsageError for others,
        CheckpointError if there is no such table, or its mapped files were changed.
        """
        return self.find(table, keys)[0]

    def find(self, table: str, keys: ArrayLike) -> tuple[Values, NDArray[np.bool_]]:
        """As `read`, with bool[N], whether each key has a row."""
        if table not in self._rows:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.url} has no table {table!r}, only {sorted(self._rows)}"
            )
        spec, found = self.checkpoint.tables[table], _in_64_bits(np.asarray(keys))
        rows = np.full((found.size, spec.dim), spec.default_value, np.float32)
        has_row = read_layers(self._rows[table], found, rows)
        return rows, has_row


def _in_64_bits(keys: NDArray[Any]) -> Keys:
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise UsageError(
            f"keys are {keys.dtype}{list(keys.shape)}, expected whole numbers in one dimension"
        )
    # Signed ones by their sign first: -1 in 32 bits is -1 in 64.
    wide = keys.astype(np.int64 if keys.dtype.kind == "i" else np.uint64, copy=False)
    return np.ascontiguousarray(wide).view(np.uint64)
