"""Reading a checkpoint, whatever the number of servers that saved it and of those that load it."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from protos.errors import CheckpointError
from protos.spec import DenseSpec, TableSpec
from ps_server.checkpoint.digest import model_digest
from ps_server.checkpoint.format import read_dense_file, read_table_file, require_size
from ps_server.checkpoint.manifest import (
    DenseEntry,
    Manifest,
    manifest_from_json,
    require_whole,
    shard_digests,
)
from ps_server.checkpoint.publish import MANIFEST, resolve
from ps_server.checkpoint.rows import DensePiece, Rows

ATTACHMENTS = "attachments"

T = TypeVar("T")


class Checkpoint:
    """A checkpoint on disk. Nothing comes out of it that is not what was saved; arrays are read-only."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Takes a folder to be what the manifest says; `open` reads a published one.

        Raises:
            CheckpointError: If the manifest is not whole, or a file is missing or has another size.
        """
        require_whole(manifest, str(folder / MANIFEST))
        for entry in manifest.entries:
            require_size(folder / entry.file, entry.size_bytes)
        for name, attachment in manifest.attachments.items():
            require_size(folder / ATTACHMENTS / name, attachment.size_bytes)
        self.folder = folder
        self._manifest = manifest

    @classmethod
    def open(cls, url: str | Path) -> "Checkpoint":
        """Opens the checkpoint `url`, or the latest one in that folder.

        Raises:
            CheckpointError: If there is none, or it is not whole.
        """
        folder = resolve(url)
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except OSError as exc:
            raise CheckpointError(f"cannot read {path}: {exc}") from exc
        return cls(folder, manifest_from_json(text, str(path)))

    def require(self, names: Iterable[str]) -> None:
        """Checks that there is a table or a dense block of each name.

        Raises:
            CheckpointError: If one is missing: whoever loads would go on with initial values for it.
        """
        saved = self.tables.keys() | self.blocks.keys()
        if missing := sorted(set(names) - saved):
            raise CheckpointError(
                f"checkpoint {self.folder} has no {', '.join(missing)}, only {', '.join(sorted(saved))}: "
                f"it is of another model"
            )

    @property
    def model_digest(self) -> str:
        """The digest of the saved model."""
        return self._manifest.model_digest

    @cached_property
    def tables(self) -> Mapping[str, TableSpec]:
        """The specs of the saved tables, by name."""
        return {spec.name: spec for spec in self._manifest.tables}

    @cached_property
    def blocks(self) -> Mapping[str, DenseSpec]:
        """The specs of the saved dense blocks, by name."""
        return {spec.name: spec for spec in self._manifest.blocks}

    @property
    def attachments(self) -> Sequence[str]:
        """Names of the attachments."""
        return list(self._manifest.attachments)

    def read_shards(self, table: str, shards: Iterable[int]) -> Iterator[tuple[int, Rows]]:
        """Yields shards of a table with their numbers, in the order of the files.

        Raises:
            CheckpointError: If there is no such table or shard, or a file was altered.
        """
        spec = _find(self.tables, table, "table", self.folder)
        wanted = frozenset(shards)
        if not wanted <= set(range(spec.num_shards)):
            raise CheckpointError(
                f"checkpoint {self.folder}: table {table!r} has {spec.num_shards} shards, not "
                f"{sorted(wanted)}"
            )
        for entry in self._manifest.files_of_table(table):
            yield from read_table_file(self.folder, entry, spec.dim, wanted)

    def read_dense(self, block: str, part: slice) -> DensePiece:
        """Returns elements `part.start` to `part.stop` of a dense block.

        Scalars are those of the saved piece that the part begins in: pieces differ in them only if
        they were saved by servers that had not applied the same pushes.

        Raises:
            CheckpointError: If there is no such block or part, or a file was altered.
        """
        spec = _find(self.blocks, block, "dense block", self.folder)
        start, stop = part.start, part.stop
        if not 0 <= start <= stop <= spec.length:
            raise CheckpointError(
                f"checkpoint {self.folder}: dense block {block!r} has {spec.length} elements, not "
                f"{start} to {stop}"
            )
        files = _overlapping(self._manifest.files_of_block(block), start, stop)
        pieces = [read_dense_file(self.folder, entry) for entry in files]
        cut = slice(start - pieces[0].start, stop - pieces[0].start)
        return DensePiece(
            start=start,
            weights=np.concatenate([piece.weights for piece in pieces])[cut],
            element_state=np.concatenate([piece.element_state for piece in pieces], axis=1)[:, cut],
            scalars=pieces[0].scalars,
        )

    def attachment(self, name: str) -> bytes:
        """Returns an attachment.

        Raises:
            CheckpointError: If there is none of this name, or it was altered.
        """
        saved = _find(self._manifest.attachments, name, "attachment", self.folder)
        path = self.folder / ATTACHMENTS / name
        try:
            content = path.read_bytes()
        except OSError as exc:
            raise CheckpointError(f"cannot read {path}: {exc}") from exc
        if hashlib.sha256(content).hexdigest() != saved.sha256:
            raise CheckpointError(f"{path} was altered: it does not match its sha256 in {MANIFEST}")
        return content

    def verify(self) -> None:
        """Reads everything.

        Raises:
            CheckpointError: If anything was altered.
        """
        for name, table in self.tables.items():
            for _ in self.read_shards(name, range(table.num_shards)):
                pass
        for name in self.attachments:
            self.attachment(name)
        found = self.digest_of_files()
        if found != self.model_digest:
            raise CheckpointError(
                f"{self.folder / MANIFEST} says that the model's digest is {self.model_digest}, but "
                f"the files hold a model with digest {found}"
            )

    def digest_of_files(self) -> str:
        """Returns the model's digest, from the dense blocks on disk and the digests of shards.

        Raises:
            CheckpointError: If the file of a dense block was altered.
        """
        dense = {
            name: self.read_dense(name, slice(0, block.length)).weights
            for name, block in self.blocks.items()
        }
        return model_digest(dense, shard_digests(self._manifest.entries))


def _find(things: Mapping[str, T], name: str, kind: str, folder: Path) -> T:
    if name not in things:
        raise CheckpointError(f"checkpoint {folder} has no {kind} {name!r}, only {sorted(things)}")
    return things[name]


def _overlapping(files: Sequence[DenseEntry], start: int, stop: int) -> list[DenseEntry]:
    """Returns the files with a part of `[start, stop)`; for an empty part, one that touches it."""
    found = [file for file in files if file.start < stop and start < file.start + file.length]
    return found or [file for file in files if file.start <= start <= file.start + file.length][:1]
