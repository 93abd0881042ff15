"""The manifest: contents and checksums of a checkpoint, and the names of its files.

`MANIFEST.json` lists specs, entries (one per file, by the server that wrote it) and attachments, and has a
checksum of itself. It is written last: a folder without it is not a checkpoint.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ctr_ps.protos.errors import CheckpointError, SpecError
from ctr_ps.protos.limits import MAX_TABLES, MAX_TOTAL_SHARDS
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import InferenceDtype, WorkerProgress
from ctr_ps.ps_server.optimizers.registry import optimizer_of
from ctr_ps.ps_server.table.changes import MAX_PASSES
from ctr_ps.ps_server.table.feature_life.admission import check_score_source
from ctr_ps.ps_server.table.memory.hash_index import STATISTICS_WIDTH
from ctr_ps.ps_server.table.spec_checks import check_dense_spec, check_table_spec

FORMAT_VERSION = 3
"""Of the files and the manifest together; a reader accepts only this version."""

MANIFEST = "MANIFEST.json"
TOKEN = "TOKEN"
LATEST = "LATEST"
BEST = "BEST"
PUBLISHED = "PUBLISHED"
PUBLISHING = "PUBLISHING"
ATTACHMENTS = "attachments"

TOKEN_CHARACTERS = 32

TableKind = Literal["rows", "candidates", "removed"]

Count = Annotated[int, Field(ge=0, lt=2**63)]
Passes = Annotated[int, Field(ge=0, le=MAX_PASSES)]
Xxh3 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Seconds = Annotated[float, Field(ge=0, lt=253402300800, allow_inf_nan=False)]
"""Since 1970, to the year 9999, the last that Python's dates have."""


# A manifest is untrusted input: no name may lead out of the checkpoint's folder.
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]*"
_DATA = rf"data-[0-9a-f]{{{TOKEN_CHARACTERS}}}"
Name = Annotated[str, Field(pattern=f"^{_NAME}$")]
DataFolder = Annotated[str, Field(pattern=f"^{_DATA}$")]


class DamagedManifestError(CheckpointError):
    """A manifest was truncated or altered; its checkpoint is lost."""


def require_name(name: str) -> None:
    """Raises CheckpointError if `name` cannot be part of a file name."""
    if not re.fullmatch(_NAME, name):
        raise CheckpointError(
            f"{name!r} cannot be part of a file name: use letters, digits, '_', '-' and '.', but no '.' at "
            "the beginning"
        )


def is_data_folder(name: str) -> bool:
    """Whether a folder of this name holds the files of a save."""
    return re.fullmatch(_DATA, name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBatch:
    """A record batch: a shard with its number of rows; of counters, of bytes.

    `xxh3` is its `shard_digest`, or the `checksum` of the counters, and `statistics_xxh3` that of statistics,
    empty without any, in hexadecimal.
    """

    shard: Count
    rows: Count
    xxh3: Xxh3
    statistics_xxh3: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """A file in the data folder with one server's shards of a table, or of keys without a row.

    Of kind "candidates" (not admitted yet) it has keys and statistics, of kind "removed" (since the base of a
    delta) only keys, and the number of decay `passes` since. `batches` are in file order.
    """

    kind: TableKind = "rows"
    file: Name
    size_bytes: Count
    table: str
    state_width: Count
    statistics_width: Count = 0
    passes: Passes = 0
    dtype: InferenceDtype = "float32"
    batches: tuple[ShardBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersEntry:
    """A file in the data folder with one server's counters of a table, from the filter of keys without a row.

    `batches` are in file order, with a row per byte.
    """

    kind: Literal["counters"] = "counters"
    file: Name
    size_bytes: Count
    table: str
    batches: tuple[ShardBatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseEntry:
    """A file in the data folder with one server's piece of a dense block, from element `start` on.

    It has `num_states` optimizer states for each element, and `scalars` for the whole piece. `xxh3` is the
    `checksum` of weights and states, in hexadecimal.
    """

    kind: Literal["dense"] = "dense"
    file: Name
    size_bytes: Count
    block: str
    start: Count
    length: Count
    num_states: Count
    scalars: tuple[float, ...]
    xxh3: Xxh3


Entry = Annotated[TableEntry | CountersEntry | DenseEntry, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One server's share of a checkpoint: its files, and its state at the snapshot.

    `batches` and `workers` are those that it had applied.
    """

    entries: tuple[Entry, ...]
    version: Count = 0
    batches: Count = 0
    workers: Mapping[int, WorkerProgress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """An opaque file saved with the parameters."""

    size_bytes: Count
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a checkpoint; a delta has only rows that changed since the base, and all else complete."""

    kind: Literal["full", "delta", "inference"] = "full"  # "inference": weights only
    base: Name | None = None  # of a delta, the name of its base, in the same folder
    base_sha256: str = ""  # of the base's manifest
    data_folder: DataFolder  # beside the manifest, has the files
    created: Seconds  # time of the save
    version: Count = 0  # steps applied on every server
    batches: Count = 0  # of all workers, applied on every server, with those of resumed runs
    workers: Mapping[int, WorkerProgress] = field(default_factory=dict)  # applied on every server
    model_digest: str  # empty for a delta, as it would take reading all rows
    tables: tuple[TableSpec, ...]
    blocks: tuple[DenseSpec, ...]
    entries: tuple[Entry, ...]  # one per file, without attachments
    attachments: Mapping[Name, Attachment]

    def files_of_table(self, name: str, kind: TableKind = "rows") -> list[TableEntry]:
        """Returns the entries of a table's rows, candidates or removed keys."""
        return [
            entry
            for entry in self.entries
            if isinstance(entry, TableEntry) and entry.table == name and entry.kind == kind
        ]

    def num_rows(self, table: str) -> int:
        """Returns the number of rows in a table's files; of a delta, of changed rows."""
        return sum(batch.rows for entry in self.files_of_table(table) for batch in entry.batches)

    @property
    def sizes(self) -> list[int]:
        """Sizes of all files in bytes, attachments included."""
        return [file.size_bytes for file in (*self.entries, *self.attachments.values())]

    def files_of_counters(self, name: str) -> list[CountersEntry]:
        """Returns the entries of a table's counters."""
        return [
            entry
            for entry in self.entries
            if isinstance(entry, CountersEntry) and entry.table == name
        ]

    def files_of_block(self, name: str) -> list[DenseEntry]:
        """Returns the entries of a dense block, in the order of their pieces."""
        files = [
            entry for entry in self.entries if isinstance(entry, DenseEntry) and entry.block == name
        ]
        return sorted(files, key=lambda entry: (entry.start, entry.length))


_SHARE = TypeAdapter(Share)
_MANIFEST = TypeAdapter(Manifest)


def share_to_json(share: Share) -> str:
    """Returns a share as JSON, for `SaveResponse`."""
    return _SHARE.dump_json(share).decode()


def share_from_json(text: str) -> Share:
    """Inverse of `share_to_json`; raises CheckpointError for other text, as from another release."""
    try:
        return _SHARE.validate_json(text)
    except ValidationError as exc:
        raise CheckpointError(
            f"a server answered a save wrongly: {_first_error(exc)}; do all servers run the same release?"
        ) from exc


def shard_digests(entries: Sequence[Entry]) -> dict[tuple[str, int], bytes]:
    """Returns the digests of shards, by table and shard number."""
    return {
        (entry.table, batch.shard): bytes.fromhex(batch.xxh3)
        for entry in entries
        if isinstance(entry, TableEntry) and entry.kind == "rows"
        for batch in entry.batches
    }


def manifest_to_json(manifest: Manifest) -> str:
    """Returns the content of `MANIFEST.json`."""
    document = {"format_version": FORMAT_VERSION, **_MANIFEST.dump_python(manifest, mode="json")}
    return json.dumps({**document, "sha256": _checksum(document)}, indent=1) + "\n"


def manifest_from_json(text: bytes, source: str) -> Manifest:
    """Inverse of `manifest_to_json`; `source` is the URL, for messages.

    Raises DamagedManifestError if it was truncated or altered, CheckpointError if it has another format
    version, or other fields.
    """
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise DamagedManifestError(f"{source} is not a manifest: it is not a JSON object")
        own = document.pop("sha256", None)
        checksum = _checksum(document)
    except (ValueError, RecursionError) as exc:
        raise DamagedManifestError(
            f"{source} is not JSON, was it truncated or altered? {exc}"
        ) from exc
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{source} has format version {version!r}; this release reads version {FORMAT_VERSION}"
        )
    if own != checksum:
        raise DamagedManifestError(f"{source} was altered: its content does not match its sha256")
    try:
        return _MANIFEST.validate_python(document)
    except ValidationError as exc:
        raise CheckpointError(f"{source} is not a manifest: {_first_error(exc)}") from exc


def require_whole(manifest: Manifest, source: str) -> None:
    """Raises CheckpointError unless specs are valid and their entries hold each shard and element once.

    A manifest is untrusted input: after this check, arrays are sized and indexed by it.
    """
    if (manifest.kind == "delta") != (manifest.base is not None):
        raise CheckpointError(
            f"{source}: kind is {manifest.kind!r} and base {manifest.base!r}, but deltas have a base and "
            "other kinds have none"
        )
    for worker, progress in manifest.workers.items():
        numbers = (worker, progress.incarnation, progress.sequence, progress.step)
        if not all(0 <= number < 2**64 for number in numbers):
            raise CheckpointError(
                f"{source}: the progress of worker {worker} is {progress}, expected numbers from 0 to 2^64 "
                "- 1"
            )
    try:
        _check_specs(manifest)
    except SpecError as error:
        raise CheckpointError(f"{source}: {error}") from error
    belonging: set[Entry] = set()
    for table in manifest.tables:
        for files in _files_of(manifest, table.name):
            _require_whole_table(manifest, table, files, source)
            belonging.update(files)
    for block in manifest.blocks:
        block_files = manifest.files_of_block(block.name)
        _require_whole_block(manifest, block, block_files, source)
        belonging.update(block_files)
    strays = sorted(entry.file for entry in manifest.entries if entry not in belonging)
    if strays:
        raise CheckpointError(
            f"{source}: files {strays} belong to tables or dense blocks that the manifest does not declare"
        )


def _check_specs(manifest: Manifest) -> None:
    tables = {table.name: table for table in manifest.tables}
    names = [*tables, *(block.name for block in manifest.blocks)]
    if len(tables) < len(manifest.tables) or len(set(names)) < len(names):
        raise SpecError("tables and dense blocks have equal names, expected unique names")
    if len(names) > 2 * MAX_TABLES:
        raise SpecError(f"it has {len(names)} tables and dense blocks, more than {2 * MAX_TABLES}")
    for table in manifest.tables:
        check_table_spec(table)
        if table.admission is not None:
            check_score_source(table, tables.get(table.admission.table))
    for block in manifest.blocks:
        check_dense_spec(block)
    if (shards := sum(table.num_shards for table in manifest.tables)) > MAX_TOTAL_SHARDS:
        raise SpecError(f"its tables have {shards} shards, more than {MAX_TOTAL_SHARDS}")


def _files_of(manifest: Manifest, table: str) -> Iterator[Sequence[TableEntry | CountersEntry]]:
    """Yields groups of files that must hold every shard of a table."""
    yield manifest.files_of_table(table)
    if manifest.kind == "delta":
        yield manifest.files_of_table(table, "removed")
    for optional in (
        manifest.files_of_table(table, "candidates"),
        manifest.files_of_counters(table),
    ):
        if optional:
            yield optional


def _require_whole_table(
    manifest: Manifest,
    spec: TableSpec,
    entries: Sequence[TableEntry | CountersEntry],
    source: str,
) -> None:
    shards = sorted(batch.shard for entry in entries for batch in entry.batches)
    if len(shards) != spec.num_shards or shards != list(range(spec.num_shards)):
        raise CheckpointError(
            f"{source}: table {spec.name!r} needs each of its {spec.num_shards} shards once, but the "
            f"files hold shards {shards}; did each server save once?"
        )
    for entry in entries:
        if isinstance(entry, TableEntry):
            _require_widths(manifest, spec, entry, source)
        else:
            _require_room(entry, sum(batch.rows for batch in entry.batches), source)


def _require_widths(manifest: Manifest, spec: TableSpec, entry: TableEntry, source: str) -> None:
    """Checks that rows have the widths of the spec, as a kernel copies them."""
    state_width = optimizer_of(spec.optimizer).state_width(spec.dim)
    statistics_width = 0 if spec.statistics is None else STATISTICS_WIDTH
    expected = {
        "rows": (0, 0) if manifest.kind == "inference" else (state_width, statistics_width),
        "candidates": (0, STATISTICS_WIDTH),
        "removed": (0, 0),
    }[entry.kind]
    found = (entry.state_width, entry.statistics_width)
    if found != expected:
        raise CheckpointError(
            f"{source}: {entry.kind} of table {spec.name!r} in {entry.file} have state and statistics of "
            f"widths {found}, expected {expected} for optimizer {spec.optimizer.name!r} and dim {spec.dim}"
        )
    if entry.dtype != "float32" and manifest.kind != "inference":
        raise CheckpointError(
            f"{source}: {entry.file} has weights of {entry.dtype}, expected float32, as only inference "
            "checkpoints have other dtypes"
        )
    dim = spec.dim if entry.kind == "rows" else 0
    num_bytes = 8 + 4 * sum(found) + (4 if entry.dtype == "float32" else 2) * dim
    _require_room(entry, num_bytes * sum(batch.rows for batch in entry.batches), source)


def _require_room(entry: Entry, num_bytes: int, source: str) -> None:
    if num_bytes > entry.size_bytes:
        raise CheckpointError(
            f"{source}: {entry.file} has {entry.size_bytes} bytes, too few for {num_bytes} bytes of "
            f"numbers"
        )


def _require_whole_block(
    manifest: Manifest, spec: DenseSpec, entries: Sequence[DenseEntry], source: str
) -> None:
    starts = [entry.start for entry in entries]
    stops = [entry.start + entry.length for entry in entries]
    if not entries or [0, *stops] != [*starts, spec.length]:
        raise CheckpointError(
            f"{source}: dense block {spec.name!r} has {spec.length} elements, but its files hold the ranges "
            f"{list(zip(starts, stops, strict=True))}, expected each element once; did each server save "
            "once?"
        )
    optimizer = optimizer_of(spec.optimizer)
    expected = (optimizer.num_slots, len(optimizer.initial_scalars))
    for entry in entries:
        found = (entry.num_states, len(entry.scalars))
        if found != (expected if manifest.kind != "inference" else (0, 0)):
            raise CheckpointError(
                f"{source}: {entry.file} has {found[0]} state values per element and {found[1]} scalars, "
                f"expected {expected} for optimizer {optimizer.name!r} of dense block {spec.name!r}"
            )
        _require_room(entry, 4 * (1 + entry.num_states) * entry.length, source)


def _checksum(document: Mapping[str, object]) -> str:
    # Of the values, not of the bytes: white space and the order of keys do not matter.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _first_error(exc: ValidationError) -> str:
    error = exc.errors(include_url=False)[0]
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
