"""How a folder becomes a checkpoint, and how one is found.

    <name>/MANIFEST.json      put last, in one step, in place of the one before
    <name>/data-<token>/      what one save wrote; while it is being written, it holds TOKEN
    LATEST                    in a folder of checkpoints: the name of the newest

A manifest names the one `data-` folder that belongs to it, so a crash at any point leaves the old
checkpoint or the new one to be found, and at most a `data-` folder that no manifest names: the next save
to that place removes it. Two saves to one place at a time are not supported.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protos.errors import CheckpointError
from ps_server.checkpoint.files.manifest import (
    LATEST,
    MANIFEST,
    TOKEN,
    Manifest,
    data_folder,
    is_data_folder,
    manifest_from_json,
    manifest_to_json,
    new_token,
)
from ps_server.checkpoint.storage.folders import Folder, folder_at

logger = logging.getLogger(__name__)

OWN_FILES = {MANIFEST, f"{MANIFEST}.next", f"{MANIFEST}.part"}


def open_data(target: Folder, *, is_inference: bool = False) -> tuple[Folder, str]:
    """Makes the folder for what a save to `target` writes, and returns it and its token.

    Raises:
        CheckpointError: If it cannot be made, or if `target` is something else than a checkpoint, or one of
            the other use: to train on, or to predict with.
    """
    _require_replaceable(target, is_inference=is_inference)
    _remove_leftovers(target)
    token = new_token()
    data = target.child(data_folder(token))
    data.make()
    try:
        data.put(TOKEN, token.encode())
    except CheckpointError:
        discard(target, data)
        raise
    return data, token


def publish(target: Folder, data: Folder, manifest: Manifest) -> None:
    """Makes `target` the checkpoint of a manifest; one that is there already is replaced.

    Raises:
        CheckpointError: If that fails; an old checkpoint is still there, or already replaced by the
            new one, whole either way.
    """
    data.remove_file(TOKEN)  # from here on no server writes to it any more
    target.put(MANIFEST, manifest_to_json(manifest).encode())
    try:
        _remove_data(target, keep=data.name)
    except CheckpointError as error:
        logger.warning("saved, but what was there before is left: %s", error)


def discard(target: Folder, data: Folder) -> None:
    """Removes what a save has written that failed, unless it may have been published all the same."""
    try:
        if target.has(MANIFEST) and read_manifest(target).data_folder == data.name:
            return
        data.remove()
        target.remove_if_empty()
    except CheckpointError as error:
        logger.warning("what a save that failed has written is left: %s", error)


def require_writable(root: str | Path, check_servers: Callable[[str, str], object]) -> None:
    """Finds out before training whether a folder can take checkpoints.

    Args:
        root: The folder of checkpoints.
        check_servers: Has every server check a folder in it with `check_folder`, by its URL and token.

    Raises:
        CheckpointError: If it cannot.
    """
    probe = folder_at(root).child("probe")
    data, token = open_data(probe)
    try:
        check_servers(data.url, token)
    finally:
        discard(probe, data)


@dataclass(frozen=True, slots=True)
class PublishedManifest:
    """A manifest in storage, and the checksum that it carries."""

    manifest: Manifest
    sha256: str


def read_published(target: Folder) -> PublishedManifest:
    """Returns the manifest of a checkpoint, with its checksum.

    Raises:
        CheckpointError: If it is not there, was altered, or is of another version.
    """
    text = target.read(MANIFEST)
    manifest = manifest_from_json(text, f"{target.url}/{MANIFEST}")
    return PublishedManifest(manifest, str(json.loads(text)["sha256"]))


def read_manifest(target: Folder) -> Manifest:
    """Returns the manifest of a checkpoint; raises as `read_published`."""
    return read_published(target).manifest


def write_latest(root: str | Path, name: str) -> None:
    """Says in `root/LATEST` that the newest of the checkpoints in `root` is `name`.

    Raises:
        CheckpointError: If it is no checkpoint, or cannot be said.
    """
    folder = folder_at(root)
    if not _is_checkpoint_in(folder, name):
        raise CheckpointError(
            f"{name!r} is no checkpoint in {folder.url}: it cannot be the latest one"
        )
    folder.put(LATEST, f"{name}\n".encode())


def has_latest(root: str | Path) -> bool:
    """Returns whether a folder of checkpoints says which is the newest, and so has one.

    Raises:
        CheckpointError: If its storage cannot be reached.
    """
    return folder_at(root).has(LATEST)


def resolve(url: str | Path) -> Folder:
    """Returns the folder of the checkpoint `url`, or of the latest one in it.

    Raises:
        CheckpointError: If there is none; says what is missing.
    """
    folder = folder_at(url)
    return folder if folder.has(MANIFEST) else _resolve_latest(folder)


def _resolve_latest(root: Folder) -> Folder:
    if not root.has(LATEST):
        if not root.files() and not root.folders():
            raise CheckpointError(f"no checkpoint {root.url}: there is nothing")
        raise CheckpointError(
            f"no {MANIFEST} in {root.url}: not a checkpoint, or its save did not finish; and no "
            f"{LATEST}: not a folder of checkpoints"
        )
    name = root.read(LATEST).decode(errors="replace").strip()
    if not _is_checkpoint_in(root, name):
        raise CheckpointError(
            f"{root.url}/{LATEST} names {name!r}, which is no checkpoint in {root.url}: no folder of "
            f"that name has a {MANIFEST}, so its save did not finish or it was removed; give the "
            f"path of one that is whole, or write its name into {LATEST}"
        )
    return folder_at(root.child(name).url)


def published_in(root: Folder) -> dict[str, PublishedManifest]:
    """Returns the manifests of the checkpoints in a folder, by name, without those that cannot be read.

    Raises:
        CheckpointError: If the folder cannot be listed, or not all in it be reached.
    """
    published = {}
    for folder in map(root.child, root.folders()):
        if folder.has(MANIFEST):
            try:
                published[folder.name] = read_published(folder)
            except CheckpointError as error:
                logger.warning("left where it is, as nobody can read it: %s", error)
    return published


def _is_checkpoint_in(root: Folder, name: str) -> bool:
    """Whether there is a checkpoint `root/name`, and `name` is a plain name."""
    is_plain = name not in ("", ".", "..") and "/" not in name
    return is_plain and root.child(name).has(MANIFEST)


def _require_replaceable(target: Folder, *, is_inference: bool) -> None:
    if target.has(MANIFEST):
        _require_same_use(target, is_inference=is_inference)
        return
    files, folders = target.files().keys(), target.folders()
    if files <= OWN_FILES and all(map(is_data_folder, folders)):
        return
    raise CheckpointError(
        f"{target.url} is there, and is not a checkpoint: it will not be replaced; choose another "
        f"folder, or remove it"
    )


def _require_same_use(target: Folder, *, is_inference: bool) -> None:
    try:
        kind = read_manifest(target).kind
    except CheckpointError:
        return  # of no use to anybody
    if (kind == "inference") != is_inference:
        use = "predict with" if is_inference else "train on"
        raise CheckpointError(
            f"{target.url} is a checkpoint of kind {kind!r}: one to {use} will not replace it; choose "
            f"another folder, or remove it"
        )


def _remove_leftovers(target: Folder) -> None:
    """Removes what saves that were killed have left, before it takes the room of the next one."""
    if not target.has(MANIFEST):
        _remove_data(target, keep="")
        return
    try:
        named = read_manifest(target).data_folder
    except CheckpointError:
        return  # it will be replaced; until then nobody knows what belongs to it
    _remove_data(target, keep=named)


def _remove_data(target: Folder, *, keep: str) -> None:
    for name in target.folders():
        if is_data_folder(name) and name != keep:
            target.child(name).remove()
