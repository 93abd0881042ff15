"""Reading a checkpoint, on any number of servers.

A missing or altered file raises CheckpointError.
"""

import hashlib
import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.spec import DenseSpec, StatisticsSpec, TableSpec
from ctr_ps.ps_server.checkpoint.chain import ShardChange, manifests_of_chain, merged
from ctr_ps.ps_server.checkpoint.files.digest import model_digest, shard_digest
from ctr_ps.ps_server.checkpoint.files.format import (
    load_table_file,
    map_table_file,
    read_counters_file,
    read_dense_file,
    read_table_file,
)
from ctr_ps.ps_server.checkpoint.files.manifest import (
    ATTACHMENTS,
    MANIFEST,
    DenseEntry,
    Manifest,
    TableKind,
    require_whole,
    shard_digests,
)
from ctr_ps.ps_server.checkpoint.files.saved_rows import Layer, SavedRows
from ctr_ps.ps_server.checkpoint.publish import resolve
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, place_of
from ctr_ps.ps_server.table.contents import DensePiece, Rows

T = TypeVar("T")


class Checkpoint:
    """A checkpoint in storage. Checksums are compared on reading; arrays are read-only.

    A delta is read with its base, as the whole model. `open` finds a published checkpoint; this constructor
    takes a folder with a manifest, and raises CheckpointError if that is not complete, or a file is missing
    or has another size.
    """

    def __init__(
        self,
        folder: Folder,
        manifest: Manifest,
        *,
        sha256: str = "",
        base: "Checkpoint | None" = None,
    ) -> None:
        require_whole(manifest, f"{folder.url}/{MANIFEST}")
        self.url, self.name = folder.url, folder.name  # path or URL, and its last component
        self.manifest = manifest  # its own manifest, not that of its base
        self.sha256 = sha256  # checksum in the manifest; empty before it is published
        self.base = base  # base of a delta; else None
        self._data = folder.child(manifest.data_folder)
        self._attachments = self._data.child(ATTACHMENTS)
        _require_sizes(self._data, {entry.file: entry.size_bytes for entry in manifest.entries})
        sizes = {name: saved.size_bytes for name, saved in manifest.attachments.items()}
        _require_sizes(self._attachments, sizes)

    @classmethod
    def open(cls, url: str | Path) -> "Checkpoint":
        """Opens the checkpoint `url`, or the latest one in that folder; a delta with its chain.

        Raises CheckpointError if there is none, or it is not complete.
        """
        checkpoint: Checkpoint | None = None
        for folder, published in manifests_of_chain(resolve(url)):
            checkpoint = cls(folder, published.manifest, sha256=published.sha256, base=checkpoint)
        if checkpoint is None:
            raise CheckpointError(f"no checkpoint {url}")
        return checkpoint

    @property
    def token(self) -> str:
        """Token of its save."""
        return self.manifest.data_folder.partition("-")[2]

    @cached_property
    def chain(self) -> Sequence["Checkpoint"]:
        """The checkpoints of this one's chain, the full one first and this one last."""
        chain = [self]
        while (base := chain[-1].base) is not None:
            chain.append(base)
        return chain[::-1]

    def require(self, names: Iterable[str], only: Collection[str] = ()) -> None:
        """Raises CheckpointError unless it has each of `names`, or of `only`, as a table or dense block.

        A missing one would silently keep initial values. `only` counts if it is not empty, and must be in
        `names`.
        """
        declared, saved = frozenset(names), self.tables.keys() | self.blocks.keys()
        if strange := sorted(frozenset(only) - declared if only else ()):
            raise CheckpointError(
                f"{', '.join(strange)} cannot be loaded from checkpoint {self.url}: the model has no such "
                f"table or dense block, only {', '.join(sorted(declared))}"
            )
        if missing := sorted((frozenset(only) or declared) - saved):
            raise CheckpointError(
                f"checkpoint {self.url} belongs to another model: it has no {', '.join(missing)}, only "
                f"{', '.join(sorted(saved))}"
            )

    def require_token(self, token: str) -> None:
        """Raises CheckpointError if it is of another save than `token`'s; an empty token matches any."""
        if token and token != self.token:
            raise CheckpointError(
                f"checkpoint {self.url} was replaced during the load: the token of its save was {token!r}, "
                f"and is now {self.token!r}. Load again, and save new checkpoints to folders of other names"
            )

    def require_trainable(self) -> None:
        """Raises CheckpointError if it is an inference checkpoint, which cannot be loaded for training."""
        if self.manifest.kind == "inference":
            raise CheckpointError(
                f"checkpoint {self.url} is for inference: it has no optimizer state and no statistics. Load "
                "the full checkpoint from which it was made"
            )

    @property
    def model_digest(self) -> str:
        """The digest of the saved model; empty for a delta: see `digest_of_files`."""
        return self.manifest.model_digest

    @cached_property
    def tables(self) -> Mapping[str, TableSpec]:
        """The specs of the saved tables, by name."""
        return {spec.name: spec for spec in self.manifest.tables}

    @cached_property
    def blocks(self) -> Mapping[str, DenseSpec]:
        """The specs of the saved dense blocks, by name."""
        return {spec.name: spec for spec in self.manifest.blocks}

    @property
    def file_urls(self) -> Sequence[str]:
        """URLs of its manifest and files; of a delta, those of its chain."""
        return [
            *(() if self.base is None else self.base.file_urls),
            f"{self.url}/{MANIFEST}",
            *(f"{self._data.url}/{entry.file}" for entry in self.manifest.entries),
            *(map(self.attachment_url, self.manifest.attachments)),
        ]

    @property
    def attachments(self) -> Sequence[str]:
        """Names of the attachments."""
        return list(self.manifest.attachments)

    def table(self, name: str) -> TableSpec:
        """Returns the spec of a saved table; raises CheckpointError if there is none of this name."""
        return _find(self.tables, name, "table", self.url)

    def read_shards(self, table: str, shards: Iterable[int]) -> Iterator[tuple[int, Rows]]:
        """Yields shards of a table with their numbers, in the order of the (full) checkpoint's files.

        Raises CheckpointError if there is no such table or shard.
        """
        spec = self.table(table)
        wanted = frozenset(shards)
        if not wanted <= set(range(spec.num_shards)):
            raise CheckpointError(
                f"checkpoint {self.url}: table {table!r} has {spec.num_shards} shards, not "
                f"{sorted(wanted)}"
            )
        full, *deltas = self.chain
        changes = [delta.read_changes(table, wanted) for delta in deltas]
        for shard, rows in full._read_own_shards(spec, wanted):
            yield shard, reduce(merged, (change[shard] for change in changes), rows)

    def read_changes(self, table: str, shards: Set[int]) -> dict[int, ShardChange]:
        """Returns the changes that this delta makes to shards of a table, by number."""
        spec = self.table(table)
        changed = dict(self._read_own_shards(spec, shards))
        statistics = spec.statistics or StatisticsSpec()
        return {
            shard: ShardChange(changed[shard], removed.keys, entry.passes, statistics.decay)
            for entry in self.manifest.files_of_table(table, "removed")
            for shard, removed in read_table_file(self._data, entry, replace(spec, dim=0), shards)
        }

    def _read_own_shards(self, spec: TableSpec, shards: Set[int]) -> Iterator[tuple[int, Rows]]:
        for entry in self.manifest.files_of_table(spec.name):
            yield from read_table_file(self._data, entry, spec, shards)

    def own_layer(self, table: str, *, maps: bool, verifies: bool) -> Layer:
        """Returns its own rows of a table for lookups, of a delta those changed and removed since its base.

        With `maps` the files are mapped without reading them; else keys and weights are copied into memory,
        and their checksums compared if `verifies`.
        """
        spec = self.table(table)

        def saved(kind: TableKind) -> list[SavedRows]:
            of_kind = spec if kind == "rows" else replace(spec, dim=0)
            return [
                map_table_file(self._data, entry, of_kind)
                if maps
                else load_table_file(self._data, entry, of_kind, verifies=verifies)
                for entry in self.manifest.files_of_table(table, kind)
            ]

        return Layer(rows=saved("rows"), removed=saved("removed"))

    def read_candidates(self, table: str, shards: Iterable[int]) -> Iterator[tuple[int, Rows]]:
        """Yields the saved candidates of shards with the shards' numbers."""
        return self._read_keys(table, "candidates", frozenset(shards))

    def _read_keys(
        self, table: str, kind: TableKind, shards: Set[int]
    ) -> Iterator[tuple[int, Rows]]:
        keys_only = replace(self.table(table), dim=0)
        for entry in self.manifest.files_of_table(table, kind):
            yield from read_table_file(self._data, entry, keys_only, shards)

    def read_counters(
        self, table: str, shards: Iterable[int]
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yields the saved counters of shards with the shards' numbers."""
        wanted = frozenset(shards)
        for entry in self.manifest.files_of_counters(table):
            yield from read_counters_file(self._data, entry, wanted)

    def read_dense(self, block: str, elements: slice) -> DensePiece:
        """Returns elements of a dense block, from `elements.start` to `elements.stop`.

        Scalars are those of the saved piece with the first element: pieces differ in them only if their
        servers had not applied the same pushes. Raises CheckpointError if there is no such block, or it is
        shorter.
        """
        spec = _find(self.blocks, block, "dense block", self.url)
        start, stop = elements.start, elements.stop
        if not 0 <= start <= stop <= spec.length:
            raise CheckpointError(
                f"checkpoint {self.url}: dense block {block!r} has {spec.length} elements, not "
                f"{start} to {stop}"
            )
        files = _overlapping(self.manifest.files_of_block(block), start, stop)
        pieces = [read_dense_file(self._data, entry) for entry in files]
        overlap = slice(start - pieces[0].start, stop - pieces[0].start)
        return DensePiece(
            start=start,
            weights=np.concatenate([piece.weights for piece in pieces])[overlap],
            element_state=np.concatenate([piece.element_state for piece in pieces], axis=1)[
                :, overlap
            ],
            scalars=pieces[0].scalars,
        )

    def attachment(self, name: str) -> bytes:
        """Returns an attachment; raises CheckpointError if there is none of this name."""
        saved = _find(self.manifest.attachments, name, "attachment", self.url)
        content = self._attachments.read(name)
        if hashlib.sha256(content).hexdigest() != saved.sha256:
            raise CheckpointError(
                f"{self.attachment_url(name)} was altered: its sha256 differs from {MANIFEST}"
            )
        return content

    def json_attachment(self, name: str) -> dict[str, Any]:
        """Returns an attachment that is a JSON object; raises CheckpointError if it is not."""
        try:
            content = json.loads(self.attachment(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.attachment_url(name)} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(
                f"{self.attachment_url(name)} is {content!r:.100}, expected a JSON object"
            )
        return content

    def attachment_url(self, name: str) -> str:
        """Returns the URL of an attachment, for messages."""
        return f"{self._attachments.url}/{name}"

    def verify(self, *, without_rows: bool = False) -> None:
        """Reads every file, of a delta those of its chain, and compares all checksums.

        `without_rows` leaves out the rows, if the caller has compared their checksums.
        """
        for link in self.chain:
            link.verify_own(without_rows=without_rows)

    def verify_own(self, *, without_rows: bool = False) -> None:
        """Like `verify`, of its own files only."""
        for name, table in self.tables.items():
            shards = frozenset(range(table.num_shards))
            if not without_rows:
                deque(self._read_own_shards(table, shards), maxlen=0)
                deque(self._read_keys(name, "removed", shards), maxlen=0)
            deque(self.read_candidates(name, shards), maxlen=0)
            deque(self.read_counters(name, shards), maxlen=0)
        for name in self.attachments:
            self.attachment(name)
        found = self.digest_of_own_files()
        if found != self.model_digest:
            raise CheckpointError(
                f"the model digest in {self.url}/{MANIFEST} is {self.model_digest}, but the files have "
                f"{found}"
            )

    def digest_of_files(self) -> str:
        """Returns the model's digest; for a delta, all rows of its chain are read."""
        if self.base is None:
            return self.digest_of_own_files()
        shards = {
            (name, shard): shard_digest(rows)
            for name, table in self.tables.items()
            for shard, rows in self.read_shards(name, range(table.num_shards))
        }
        return model_digest(self._read_dense_weights(), shards)

    def digest_of_own_files(self) -> str:
        """Returns the model's digest, from dense blocks and the digests of shards; "" for a delta."""
        dense = self._read_dense_weights()  # for a delta too: compares their checksums
        if self.base is not None:
            return ""
        return model_digest(dense, shard_digests(self.manifest.entries))

    def _read_dense_weights(self) -> dict[str, Values]:
        return {
            name: self.read_dense(name, slice(0, block.length)).weights
            for name, block in self.blocks.items()
        }


class Roots:
    """The only folders in which a server saves and loads, as clients could name any place; none: all.

    Raises CheckpointError if a path or URL is invalid.
    """

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self._places = [place_of(url) for url in urls]

    def require(self, urls: Sequence[str]) -> None:
        """Raises CheckpointError unless all `urls`, with links resolved, are in the roots."""
        for url in urls if self._places else ():
            place = place_of(url)
            if not any(f"{place}/".startswith(f"{root.rstrip('/')}/") for root in self._places):
                raise CheckpointError(
                    f"{url!r} is outside of {', '.join(self._places)}: this server saves and loads only "
                    "there (--checkpoint-root)"
                )

    def open(self, url: str) -> Checkpoint:
        """Opens the checkpoint `url`, or the latest one in that folder.

        Raises CheckpointError if there is none, it is not complete, or a file of it is not in the roots.
        """
        self.require([url])
        found = resolve(url).url  # LATEST may lead to a link
        self.require([found])
        checkpoint = Checkpoint.open(found)
        self.require(checkpoint.file_urls)
        return checkpoint


def _require_sizes(folder: Folder, sizes: Mapping[str, int]) -> None:
    found = folder.files() if sizes else {}
    for file, size_bytes in sizes.items():
        if file not in found:
            raise CheckpointError(f"{folder.url}/{file} is missing from the checkpoint")
        if found[file] != size_bytes:
            raise CheckpointError(
                f"{folder.url}/{file} has {found[file]} bytes, but the manifest says {size_bytes}; was it "
                "truncated?"
            )


def _find(things: Mapping[str, T], name: str, kind: str, url: str) -> T:
    if name not in things:
        raise CheckpointError(f"checkpoint {url} has no {kind} {name!r}, only {sorted(things)}")
    return things[name]


def _overlapping(files: Sequence[DenseEntry], start: int, stop: int) -> list[DenseEntry]:
    """Returns the files that overlap `[start, stop)`; if that is empty, one that touches it."""
    found = [file for file in files if file.start < stop and start < file.start + file.length]
    return found or [file for file in files if file.start <= start <= file.start + file.length][:1]
