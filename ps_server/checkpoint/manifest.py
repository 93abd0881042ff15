"""The manifest: what a checkpoint consists of, and the checksum of each part.

`MANIFEST.json` is a list of specs, a list of entries (one a file, made by the server that wrote the
file) and a list of attachments. It is written last: a folder without it is no checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from protos.errors import CheckpointError


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

_ENTRIES = TypeAdapter(list[Entry])


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
            f"{exc.errors(include_url=False)[0]['msg']}"
        ) from exc
