"""Saving: what each server does for its part, and what the one that asks them does around it."""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from protos.errors import CheckpointError
from protos.spec import DenseSpec, TableSpec
from ps_server.checkpoint.durable import sync, write_file
from ps_server.checkpoint.format import require_name, write_dense_file, write_table_file
from ps_server.checkpoint.manifest import Attachment, Entry, Manifest
from ps_server.checkpoint.publish import TOKEN, local_path, open_staging, publish
from ps_server.checkpoint.reader import ATTACHMENTS, Checkpoint
from ps_server.checkpoint.rows import DenseSource, TableSource


def verify_token(folder: Path, token: str) -> None:
    """Checks that this process sees the folder that the saving worker made.

    Raises:
        CheckpointError: If it sees none, or another one.
    """
    advice = "servers and workers need shared storage, mounted at the same path"
    try:
        found = (folder / TOKEN).read_bytes()
    except OSError as exc:
        raise CheckpointError(
            f"this server does not see the worker's folder {folder} ({exc.strerror}): {advice}"
        ) from exc
    if found != token.encode():
        raise CheckpointError(f"this server sees another folder {folder} than the worker: {advice}")


def write_part(
    folder: Path,
    server_index: int,
    tables: Sequence[TableSource],
    blocks: Sequence[DenseSource],
) -> list[Entry]:
    """Writes one server's shards and pieces into a staging folder; again is no error.

    Raises:
        CheckpointError: If it cannot be written.
    """
    return [
        *(write_table_file(folder, server_index, table) for table in tables),
        *(write_dense_file(folder, server_index, block) for block in blocks),
    ]


def save_checkpoint(
    target: str | Path,
    *,
    write_parts: Callable[[Path, str], list[Entry]],
    tables: Mapping[str, TableSpec],
    blocks: Mapping[str, DenseSpec],
    attachments: Mapping[str, bytes],
) -> str:
    """Writes a whole checkpoint, publishes it, and returns the model's digest.

    Others may train meanwhile: each shard and each dense piece is of one moment, not all of the same one.

    Args:
        target: A folder that does not exist, is empty, or holds a checkpoint, which is replaced.
        write_parts: Has every server write its part into the folder it gets, after `verify_token`
            with the token it gets; returns the entries of all of them.
        tables: Every table, by name.
        blocks: Every dense block, by name.
        attachments: Files that travel with the parameters, by name.

    Raises:
        CheckpointError: If it cannot be written, or is not whole; an older checkpoint is still there.
    """
    for name in attachments:
        require_name(name)
    folder = local_path(target)
    staging, token = open_staging(folder)
    try:
        entries = write_parts(staging, token)
        manifest = Manifest(
            model_digest="",  # of what the files hold, once they are all there
            tables=tuple(tables.values()),
            blocks=tuple(blocks.values()),
            entries=tuple(entries),
            attachments=_write_attachments(staging, attachments),
        )
        digest = Checkpoint(staging, manifest).digest_of_files()
        manifest = replace(manifest, model_digest=digest)
        publish(staging, folder, manifest)
    finally:
        # Published, it has another name; what is left is a save that failed.
        shutil.rmtree(staging, ignore_errors=True)
    return manifest.model_digest


def _write_attachments(staging: Path, contents: Mapping[str, bytes]) -> dict[str, Attachment]:
    folder = staging / ATTACHMENTS
    try:
        folder.mkdir()
        for name, content in contents.items():
            write_file(folder / name, content)
        sync(folder)
    except OSError as exc:
        raise CheckpointError(f"cannot write attachments to {folder}: {exc}") from exc
    return {
        name: Attachment(size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in contents.items()
    }
