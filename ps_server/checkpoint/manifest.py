"""The manifest: what a checkpoint consists of, and the checksum of each part.

`MANIFEST.json` lists specs, entries (one a file, made by the server that wrote the file) and
attachments, and carries a checksum of itself. It is written last: a folder without it is no checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from protos.errors import CheckpointError
from protos.spec import DenseSpec, TableSpec

FORMAT_VERSION = 1
"""Of the files and of the manifest together; a reader knows one version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBatch:
    """One record batch of a table's file.

    Attributes:
        shard: Number of the shard that it holds.
        rows: Its length.
        sha256: `shard_digest`, in hexadecimal.
    """

    shard: int
    rows: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """A file with one server's shards of a table.

    Attributes:
        file: Its name in the checkpoint's folder.
        size_bytes: Its size.
        table: Name of the table.
        state_width: Columns of optimizer state in a row.
        batches: The file's record batches, in their order.
    """

    file: str
    size_bytes: int
    table: str
    state_width: int
    batches: tuple[ShardBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseEntry:
    """A file with one server's piece of a dense block.

    Attributes:
        file: Its name in the checkpoint's folder.
        size_bytes: Its size.
        block: Name of the dense block.
        start: Position in the block of the piece's first element.
        length: Elements of the piece.
        num_states: Numbers of optimizer state that each element has.
        scalars: The optimizer's state of the whole piece.
        sha256: `piece_digest`, in hexadecimal.
    """

    file: str
    size_bytes: int
    block: str
    start: int
    length: int
    num_states: int
    scalars: tuple[float, ...]
    sha256: str


Entry = TableEntry | DenseEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file that travels with the parameters; its bytes mean nothing here."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but the numbers.

    Attributes:
        model_digest: Of the model that the files hold.
        tables: Specs as they were declared.
        blocks: Specs as they were declared.
        entries: One for each file of rows or dense weights.
        attachments: By name.
    """

    model_digest: str
    tables: tuple[TableSpec, ...]
    blocks: tuple[DenseSpec, ...]
    entries: tuple[Entry, ...]
    attachments: Mapping[str, Attachment]

    def files_of_table(self, name: str) -> list[TableEntry]:
        """Returns the entries of one table."""
        return [
            entry for entry in self.entries if isinstance(entry, TableEntry) and entry.table == name
        ]

    def files_of_block(self, name: str) -> list[DenseEntry]:
        """Returns the entries of one dense block, in the order of their pieces."""
        files = [
            entry for entry in self.entries if isinstance(entry, DenseEntry) and entry.block == name
        ]
        return sorted(files, key=lambda entry: (entry.start, entry.length))


_ENTRIES = TypeAdapter(list[Entry])
_MANIFEST = TypeAdapter(Manifest)


def entries_to_json(entries: Sequence[Entry]) -> str:
    """Returns the entries as JSON, for `SaveResponse`."""
    return _ENTRIES.dump_json(list(entries)).decode()


def entries_from_json(text: str) -> list[Entry]:
    """Returns what `entries_to_json` was given.

    Raises:
        CheckpointError: If it is something else, as from a server of another release.
    """
    try:
        return _ENTRIES.validate_json(text)
    except ValidationError as exc:
        raise CheckpointError(
            f"a server's answer to a save is not a list of entries (is it of another release?): "
            f"{_first_error(exc)}"
        ) from exc


def shard_digests(entries: Sequence[Entry]) -> dict[tuple[str, int], bytes]:
    """Returns the digest of each shard, by table and shard."""
    return {
        (entry.table, batch.shard): bytes.fromhex(batch.sha256)
        for entry in entries
        if isinstance(entry, TableEntry)
        for batch in entry.batches
    }


def manifest_to_json(manifest: Manifest) -> str:
    """Returns the text of `MANIFEST.json`."""
    document = {"format_version": FORMAT_VERSION, **_MANIFEST.dump_python(manifest, mode="json")}
    return json.dumps({**document, "sha256": _checksum(document)}, indent=1) + "\n"


def manifest_from_json(text: bytes, source: str) -> Manifest:
    """Returns what `manifest_to_json` was given.

    Args:
        text: The content of a `MANIFEST.json`.
        source: Its path, for messages.

    Raises:
        CheckpointError: If it was cut or altered, or has another format version.
    """
    try:
        document = json.loads(text)
    except ValueError as exc:
        raise CheckpointError(f"{source} is not JSON, was it cut or altered? {exc}") from exc
    if not isinstance(document, dict):
        raise CheckpointError(f"{source} is not a manifest: it is no JSON object")
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{source} has format version {version!r}; this release reads version {FORMAT_VERSION}"
        )
    if document.pop("sha256", None) != _checksum(document):
        raise CheckpointError(f"{source} was altered: it does not match its own sha256")
    try:
        return _MANIFEST.validate_python(document)
    except ValidationError as exc:
        raise CheckpointError(f"{source} is not a manifest: {_first_error(exc)}") from exc


def require_whole(manifest: Manifest, source: str) -> None:
    """Checks that the entries hold each shard and each dense element once.

    Args:
        manifest: To be checked.
        source: The checkpoint, for messages.

    Raises:
        CheckpointError: If one is missing, doubled or of something undeclared.
    """
    belonging: set[Entry] = set()
    for table in manifest.tables:
        table_files = manifest.files_of_table(table.name)
        _require_whole_table(table, table_files, source)
        belonging.update(table_files)
    for block in manifest.blocks:
        block_files = manifest.files_of_block(block.name)
        _require_whole_block(block, block_files, source)
        belonging.update(block_files)
    strays = sorted(entry.file for entry in manifest.entries if entry not in belonging)
    if strays:
        raise CheckpointError(f"{source}: files {strays} are of tables or blocks without a spec")


def _require_whole_table(spec: TableSpec, entries: Sequence[TableEntry], source: str) -> None:
    shards = sorted(batch.shard for entry in entries for batch in entry.batches)
    if shards != list(range(spec.num_shards)):
        raise CheckpointError(
            f"{source}: table {spec.name!r} has {spec.num_shards} shards, each to be saved once, but "
            f"the files hold shards {shards}; was each server asked once?"
        )
    widths = {entry.state_width for entry in entries}
    if len(widths) > 1:
        raise CheckpointError(
            f"{source}: files of table {spec.name!r} have different state widths {sorted(widths)}; "
            f"did all servers declare the same optimizer?"
        )


def _require_whole_block(spec: DenseSpec, entries: Sequence[DenseEntry], source: str) -> None:
    starts = [entry.start for entry in entries]
    stops = [entry.start + entry.length for entry in entries]
    if not entries or [0, *stops] != [*starts, spec.length]:
        raise CheckpointError(
            f"{source}: dense block {spec.name!r} has {spec.length} elements, each to be saved once, "
            f"but the files hold pieces {list(zip(starts, stops, strict=True))}; was each server "
            f"asked once?"
        )
    states = {(entry.num_states, len(entry.scalars)) for entry in entries}
    if len(states) > 1:
        raise CheckpointError(
            f"{source}: files of dense block {spec.name!r} have different numbers of states and "
            f"scalars {sorted(states)}; did all servers declare the same optimizer?"
        )


def _checksum(document: Mapping[str, object]) -> str:
    # Of the values, not of the bytes: white space and the order of keys mean nothing.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _first_error(exc: ValidationError) -> str:
    error = exc.errors(include_url=False)[0]
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
