"""The manifest: what a checkpoint consists of, and the checksum of each part.

`MANIFEST.json` lists specs, entries (one a file, made by the server that wrote the file) and
attachments, and carries a checksum of itself. It is written last: a folder without it is no checkpoint.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from protos.errors import CheckpointError
from protos.spec import DenseSpec, TableSpec
from protos.store import InferenceDtype, WorkerProgress

FORMAT_VERSION = 3
"""Of the files and of the manifest together; a reader knows one version."""

MANIFEST = "MANIFEST.json"
TOKEN = "TOKEN"
LATEST = "LATEST"
ATTACHMENTS = "attachments"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_DATA = re.compile(r"data-([0-9a-f]{32})")


def require_name(name: str) -> None:
    """Raises CheckpointError unless `name` can be part of a file name."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} cannot be part of a file name: use letters, digits, '_', '-' and '.', not "
            f"beginning with '.'"
        )


def new_token() -> str:
    """Returns a token that no other save has."""
    return secrets.token_hex(16)


def data_folder(token: str) -> str:
    """Returns the name of the folder for the files of one save."""
    return f"data-{token}"


def is_data_folder(name: str) -> bool:
    """Whether a folder holds the files of a save."""
    return _DATA.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBatch:
    """One record batch of a table's file.

    Attributes:
        shard: Number of the shard that it holds.
        rows: Its length.
        xxh3: `shard_digest`, or `counters_checksum`, in hexadecimal.
        statistics_xxh3: `statistics_checksum`, in hexadecimal; empty: there are none.
    """

    shard: int
    rows: int
    xxh3: str
    statistics_xxh3: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """A file with one server's shards of a table, or of keys that have no row in it, yet or any more.

    Attributes:
        kind: "candidates" have keys and statistics only, "removed" (since the base of a delta) only keys.
        file: Its name in the folder of the save.
        size_bytes: Its size.
        table: Name of the table.
        state_width: Columns of optimizer state in a row.
        statistics_width: Columns of statistics in a row.
        passes: How often the rows of the base have aged; of removed keys only.
        dtype: Of the weights.
        batches: The file's record batches, in their order.
    """

    kind: Literal["rows", "candidates", "removed"] = "rows"
    file: str
    size_bytes: int
    table: str
    state_width: int
    statistics_width: int = 0
    passes: int = 0
    dtype: InferenceDtype = "float32"
    batches: tuple[ShardBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersEntry:
    """A file with the counters that one server keeps of keys without a row, as bytes.

    Attributes:
        kind: Tells it from other entries.
        file: Its name in the folder of the save.
        size_bytes: Its size.
        table: Name of the table.
        batches: The file's record batches, in their order, with a row for each byte.
    """

    kind: Literal["counters"] = "counters"
    file: str
    size_bytes: int
    table: str
    batches: tuple[ShardBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseEntry:
    """A file with one server's piece of a dense block.

    Attributes:
        kind: Tells it from other entries.
        file: Its name in the folder of the save.
        size_bytes: Its size.
        block: Name of the dense block.
        start: Position in the block of the piece's first element.
        length: Elements of the piece.
        num_states: Numbers of optimizer state that each element has.
        scalars: The optimizer's state of the whole piece.
        xxh3: `piece_checksum`, in hexadecimal.
    """

    kind: Literal["dense"] = "dense"
    file: str
    size_bytes: int
    block: str
    start: int
    length: int
    num_states: int
    scalars: tuple[float, ...]
    xxh3: str


Entry = Annotated[TableEntry | CountersEntry | DenseEntry, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one server wrote, and of which moment it is.

    Attributes:
        entries: One for each of its files.
        version: The server's version at that moment.
        workers: How much of each worker's training is in it.
    """

    entries: tuple[Entry, ...]
    version: int = 0
    workers: Mapping[int, WorkerProgress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A file that travels with the parameters; its bytes mean nothing here."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but the numbers.

    Attributes:
        kind: "full": everything; "delta": of the rows those that changed since its base, all else whole;
            "inference": weights only.
        base: Name of the checkpoint, in the same folder, that this one needs; None: it needs none.
        base_sha256: That of the base's manifest.
        data_folder: Name of the folder with the files, beside the manifest.
        created: When it was saved, in seconds since 1970.
        version: Steps that are in it on every server.
        workers: How much of each worker's training is in it on every server.
        model_digest: Of the model that the files hold; of a delta, whose rows are not all read for it, empty.
        tables: Specs as they were declared.
        blocks: Specs as they were declared.
        entries: One for each file but attachments.
        attachments: By name.
    """

    kind: Literal["full", "delta", "inference"] = "full"
    base: str | None = None
    base_sha256: str = ""
    data_folder: str
    created: float
    version: int = 0
    workers: Mapping[int, WorkerProgress] = field(default_factory=dict)
    model_digest: str
    tables: tuple[TableSpec, ...]
    blocks: tuple[DenseSpec, ...]
    entries: tuple[Entry, ...]
    attachments: Mapping[str, Attachment]

    def files_of_table(self, name: str) -> list[TableEntry]:
        """Returns the entries of a table's rows."""
        return self._of_table(name, "rows")

    def num_rows(self, table: str) -> int:
        """Returns how many rows of a table are in the files: of a delta those that changed."""
        return sum(batch.rows for entry in self.files_of_table(table) for batch in entry.batches)

    @property
    def sizes(self) -> list[int]:
        """The sizes of all files in bytes, attachments included."""
        return [file.size_bytes for file in (*self.entries, *self.attachments.values())]

    def files_of_candidates(self, name: str) -> list[TableEntry]:
        """Returns the entries of the keys that have no row in a table yet, if it counts them."""
        return self._of_table(name, "candidates")

    def files_of_removed(self, name: str) -> list[TableEntry]:
        """Returns the entries of the keys that lost their row in a table, of a delta."""
        return self._of_table(name, "removed")

    def _of_table(self, name: str, kind: str) -> list[TableEntry]:
        return [
            entry
            for entry in self.entries
            if isinstance(entry, TableEntry) and entry.table == name and entry.kind == kind
        ]

    def files_of_counters(self, name: str) -> list[CountersEntry]:
        """Returns the entries of a table's counters, if it has some."""
        return [
            entry
            for entry in self.entries
            if isinstance(entry, CountersEntry) and entry.table == name
        ]

    def files_of_block(self, name: str) -> list[DenseEntry]:
        """Returns the entries of one dense block, in the order of their pieces."""
        files = [
            entry for entry in self.entries if isinstance(entry, DenseEntry) and entry.block == name
        ]
        return sorted(files, key=lambda entry: (entry.start, entry.length))


_SHARE = TypeAdapter(Share)
_MANIFEST = TypeAdapter(Manifest)


def share_to_json(share: Share) -> str:
    """Returns a server's part as JSON, for `SaveResponse`."""
    return _SHARE.dump_json(share).decode()


def share_from_json(text: str) -> Share:
    """Returns what `share_to_json` was given.

    Raises:
        CheckpointError: If it is something else, as from a server of another release.
    """
    try:
        return _SHARE.validate_json(text)
    except ValidationError as exc:
        raise CheckpointError(
            f"a server's answer to a save is not its share of one (is it of another release?): "
            f"{_first_error(exc)}"
        ) from exc


def shard_digests(entries: Sequence[Entry]) -> dict[tuple[str, int], bytes]:
    """Returns the digest of each shard, by table and shard."""
    return {
        (entry.table, batch.shard): bytes.fromhex(batch.xxh3)
        for entry in entries
        if isinstance(entry, TableEntry) and entry.kind == "rows"
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
        manifest = _MANIFEST.validate_python(document)
    except ValidationError as exc:
        raise CheckpointError(f"{source} is not a manifest: {_first_error(exc)}") from exc
    _require_inside(manifest, source)
    return manifest


def _require_inside(manifest: Manifest, source: str) -> None:
    """Refuses names that may lead out of the checkpoint's folder: anybody can write a manifest."""
    names = [*(entry.file for entry in manifest.entries), *manifest.attachments]
    try:
        for name in names if manifest.base is None else [*names, manifest.base]:
            require_name(name)
    except CheckpointError as error:
        raise CheckpointError(f"{source} is not a manifest: {error}") from error
    if not is_data_folder(manifest.data_folder):
        raise CheckpointError(
            f"{source} is not a manifest: {manifest.data_folder!r} is no folder of a save"
        )


def require_whole(manifest: Manifest, source: str) -> None:
    """Checks that the entries hold each shard and each dense element once.

    Args:
        manifest: To be checked.
        source: The checkpoint, for messages.

    Raises:
        CheckpointError: If one is missing, doubled or of something undeclared.
    """
    if (manifest.kind == "delta") != (manifest.base is not None):
        raise CheckpointError(
            f"{source}: it is of kind {manifest.kind!r} and has the base {manifest.base!r}; deltas have "
            f"one, and no others"
        )
    belonging: set[Entry] = set()
    for table in manifest.tables:
        for files in _files_of(manifest, table.name):
            _require_whole_table(table, files, source)
            belonging.update(files)
    for block in manifest.blocks:
        block_files = manifest.files_of_block(block.name)
        _require_whole_block(block, block_files, source)
        belonging.update(block_files)
    strays = sorted(entry.file for entry in manifest.entries if entry not in belonging)
    if strays:
        raise CheckpointError(f"{source}: files {strays} are of tables or blocks without a spec")


def _files_of(manifest: Manifest, table: str) -> Iterator[Sequence[TableEntry | CountersEntry]]:
    """Yields groups of files, each of which has to hold every shard of a table."""
    yield manifest.files_of_table(table)
    if manifest.kind == "delta":
        yield manifest.files_of_removed(table)
    for optional in (manifest.files_of_candidates(table), manifest.files_of_counters(table)):
        if optional:
            yield optional


def _require_whole_table(
    spec: TableSpec, entries: Sequence[TableEntry | CountersEntry], source: str
) -> None:
    shards = sorted(batch.shard for entry in entries for batch in entry.batches)
    if shards != list(range(spec.num_shards)):
        raise CheckpointError(
            f"{source}: table {spec.name!r} has {spec.num_shards} shards, each to be saved once, but "
            f"the files hold shards {shards}; was each server asked once?"
        )
    widths = {
        (entry.state_width, entry.statistics_width)
        for entry in entries
        if isinstance(entry, TableEntry)
    }
    if len(widths) > 1:
        raise CheckpointError(
            f"{source}: files of table {spec.name!r} have different widths of state and statistics "
            f"{sorted(widths)}; did all servers declare the same table?"
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
