"""Publishing of checkpoints as an atomic step, finding them, and removing old ones.

    <name>/MANIFEST.json      replaced atomically, last
    <name>/data-<token>/      files of one save; has a file TOKEN while it is being written
    LATEST                    in a folder of checkpoints: the name of the newest
    BEST                      likewise, of the one with the best validation
    PUBLISHED                 likewise, of the one that readers take: of an ended run, or what passed a gate
    PUBLISHING                of the one that is to be PUBLISHED as soon as it is the LATEST

A manifest names its `data-` folder, so a crash at any point leaves either the old checkpoint or the new one,
and perhaps a `data-` folder without a manifest, which the next save to the same target removes. Concurrent
saves to one target are not supported. ps_worker/checkpoints/retention.py decides which checkpoints belong to
a run, and so may be removed.

All functions raise CheckpointError if the storage cannot be reached, read or written.
"""

import json
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint.files.manifest import (
    BEST,
    LATEST,
    MANIFEST,
    PUBLISHED,
    PUBLISHING,
    TOKEN,
    TOKEN_CHARACTERS,
    DamagedManifestError,
    Manifest,
    is_data_folder,
    manifest_from_json,
    manifest_to_json,
)
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_REMOVED = 5
"""Checkpoints in a row that may be removed while they are read."""

_OWN_FILE = re.compile(rf"{re.escape(MANIFEST)}(\.[0-9a-f]+)?(\.next|\.part)?")
"""A file beside the data of a save that is its manifest, or an unfinished one."""
_UNFINISHED = re.compile(r"(?:LATEST|BEST|PUBLISH\w+|MANIFEST\.json)\.[0-9a-f]+\.(?:next|part)")


def _remove_unfinished_files(folder: Folder) -> None:
    for name in folder.files():
        if _UNFINISHED.fullmatch(name):
            folder.remove_file(name)


def open_data(target: Folder, *, is_inference: bool = False) -> tuple[Folder, str]:
    """Creates the data folder of a save to `target`, and returns it and its token.

    Raises CheckpointError if `require_replaceable` refuses `target`.
    """
    require_replaceable(target, is_inference=is_inference)
    _remove_leftovers(target)
    token = secrets.token_hex(TOKEN_CHARACTERS // 2)
    data = target.child(f"data-{token}")
    data.make()
    try:
        data.put(TOKEN, token.encode())
    except CheckpointError:
        discard(target, data)
        raise
    return data, token


def require_replaceable(target: Folder, *, is_inference: bool = False) -> None:
    """Raises CheckpointError unless `target` is empty or a checkpoint for the same use.

    A damaged one may be replaced, but not one that only this release cannot read, or only now.
    """
    if target.has(MANIFEST):
        _require_same_use(target, is_inference=is_inference)
        return
    files, folders = target.files().keys(), target.folders()
    if all(map(_OWN_FILE.fullmatch, files)) and all(map(is_data_folder, folders)):
        return
    raise CheckpointError(
        f"{target.url} exists and is not a checkpoint, so it is not replaced: choose another folder, or "
        "remove it"
    )


def publish(target: Folder, data: Folder, manifest: Manifest) -> None:
    """Publishes a manifest at `target`, replacing the checkpoint there.

    Raises CheckpointError on failure, or if another process saves there; the old checkpoint or the new one is
    there, complete.
    """
    content = manifest_to_json(manifest).encode()
    if not data.has(TOKEN):
        raise CheckpointError(
            f"{target.url} was not replaced: another process, which saves to the same folder, removed the "
            "files of this save"
        )
    data.remove_file(TOKEN)  # from here on servers refuse to write to it
    target.put(MANIFEST, content)
    try:
        _remove_data(target, keep=data.name)
    except CheckpointError as error:
        logger.warning("saved, but could not remove the files of the old checkpoint: %s", error)


def discard(target: Folder, data: Folder) -> None:
    """Removes the data of a failed save, unless it was published."""
    try:
        if target.has(MANIFEST) and read_manifest(target).data_folder == data.name:
            return
        data.remove()
        target.remove_if_empty()
    except CheckpointError as error:
        logger.warning("could not remove the files of a failed save: %s", error)


def require_writable(root: str | Path, check_servers: Callable[[str, str], object]) -> None:
    """Raises CheckpointError, before training, if this process or a server cannot save into a folder.

    `check_servers` lets every server run `check_folder` on a probe folder, by its URL and token.
    """
    probe = folder_at(root).child("probe")
    data, token = open_data(probe)
    try:
        check_servers(data.url, token)
    finally:
        discard(probe, data)


@dataclass(frozen=True, slots=True)
class PublishedManifest:
    """A published manifest and its checksum."""

    manifest: Manifest
    sha256: str


def read_published(target: Folder) -> PublishedManifest:
    """Returns the manifest of a checkpoint, with its checksum.

    Raises CheckpointError if it does not exist, was altered, or has another format version.
    """
    text = target.read(MANIFEST)
    manifest = manifest_from_json(text, f"{target.url}/{MANIFEST}")
    return PublishedManifest(manifest, str(json.loads(text)["sha256"]))


def read_manifest(target: Folder) -> Manifest:
    """As `read_published`, without the checksum."""
    return read_published(target).manifest


def write_latest(
    root: str | Path, name: str, before: str | None = None, *, is_gated: bool = False
) -> None:
    """Makes `name` the latest of the checkpoints in `root`; CheckpointError if it is none, or not the newest.

    Readers take it unless `is_gated`. `before` is `latest_in(root)` at the start of the run: if LATEST has
    changed since, it is of this run, and is replaced only by one of at least its version. None: by any.
    """
    folder = folder_at(root)
    if before is not None:
        _require_newest(folder, name, before)
    if not is_gated and folder.has(PUBLISHED):
        folder.remove_file(PUBLISHED)
    _write_name(folder, LATEST, name, "latest")


def latest_in(root: str | Path) -> str:
    """Returns the checksum of the latest checkpoint; "": there is no readable one."""
    latest = _latest_of(folder_at(root))
    return "" if latest is None else latest.sha256


def require_latest(root: str | Path, name: str) -> None:
    """Raises CheckpointError if LATEST no longer names `name`, as another process saves there."""
    if (now := _named_by(folder_at(root), LATEST)) != name:
        raise CheckpointError(
            f"{root}/{LATEST} names {now!r}, expected {name!r}: another process saves to this folder"
        )


def _latest_of(folder: Folder) -> PublishedManifest | None:
    name = _named_by(folder, LATEST) if folder.has(LATEST) else ""
    if not _is_checkpoint_in(folder, name):
        return None
    try:
        return read_published(folder.child(name))
    except DamagedManifestError:
        return None


def _require_newest(folder: Folder, name: str, before: str) -> None:
    latest = _latest_of(folder)
    if latest is None or latest.sha256 == before or not _is_checkpoint_in(folder, name):
        return
    version, newest = read_manifest(folder.child(name)).version, latest.manifest.version
    if newest > version:
        raise CheckpointError(
            f"cannot publish {name!r} of version {version}: {folder.url}/{LATEST} already names "
            f"{_named_by(folder, LATEST)!r} of version {newest}, so another process saves to this folder"
        )


def write_best(root: str | Path, name: str, file: str = BEST) -> None:
    """Has BEST (or PUBLISHED, PUBLISHING) name a checkpoint in `root`; CheckpointError if it is none."""
    _write_name(folder_at(root), file, name, file.lower())
    if file == PUBLISHED:
        folder_at(root).remove_file(PUBLISHING)


def begin_gate(root: str | Path, *, is_on: bool, is_fresh: bool) -> str:
    """Has readers take what they do now, or what passed before a crash; nothing if that is saved again.

    Returns the name of what they take from now on; "": what they did, or nothing.
    """
    folder, pending, taken = folder_at(root), name_in(root, PUBLISHING), ""
    if pending and is_on and not is_fresh and pending == name_in(root, LATEST):
        write_best(root, taken := pending, PUBLISHED)
        logger.info("%s names checkpoint=%s, as the run ended before it did", PUBLISHED, pending)
    folder.remove_file(PUBLISHING)
    published, newest = best_in(root, PUBLISHED), _latest_of(folder)
    if not is_on:
        taken = name_in(root, LATEST) if folder.has(PUBLISHED) else ""
        folder.remove_file(PUBLISHED)
    elif is_fresh or newest is None:
        folder.put(PUBLISHED, b"\n")
    elif not folder.has(PUBLISHED):
        write_best(root, _named_by(folder, LATEST), PUBLISHED)
    elif published and read_manifest(folder.child(published)).version > newest.manifest.version:
        folder.put(PUBLISHED, b"\n")  # the run was turned back
        return ""
    return taken


def best_in(root: str | Path, file: str = BEST) -> str | None:
    """Returns the best (or PUBLISHED) one's name; None: there is no file, or it names a removed one."""
    name = name_in(root, file)
    return name if _is_checkpoint_in(folder_at(root), name) else None


def name_in(root: str | Path, file: str) -> str:
    """Returns the name in LATEST, BEST or PUBLISHED, also of a removed checkpoint; "": there is none."""
    folder = folder_at(root)
    return _named_by(folder, file) if folder.has(file) else ""


def resolve(url: str | Path) -> Folder:
    """Returns the folder of the checkpoint `url`, of the published or latest one in that folder, or its BEST.

    Raises CheckpointError if there is none; names what is missing.
    """
    folder = folder_at(url)
    if folder.has(MANIFEST):
        return folder
    if folder.name in (LATEST, BEST, PUBLISHED):
        root = folder_at(folder.url.rpartition("/")[0])
        if root.has(folder.name):
            return _resolve_name(root, folder.name)
        if folder.name == BEST and root.folders() and not folder.folders():
            raise CheckpointError(
                f"{root.url} has no {BEST}: a run writes it if data.valid and checkpoint.dir are set; give "
                "the path of a checkpoint, or that of the folder to use its newest one"
            )
    for file in (PUBLISHED, LATEST):
        if folder.has(file):
            return _resolve_name(folder, file)
    if not folder.files() and not folder.folders():
        raise CheckpointError(f"no checkpoint {folder.url}: the folder is empty or does not exist")
    raise CheckpointError(
        f"{folder.url} is neither a checkpoint nor a folder of checkpoints: it has no {MANIFEST}, which a "
        f"save writes last, and no {LATEST}"
    )


def of_newest(url: str | Path, load: Callable[[str], T]) -> T:
    """Returns what `load` makes of the checkpoint `url`, or of the newest one in that folder.

    Loads the next one if a run removes it before all is read. Raises CheckpointError as `resolve` and `load`.
    """
    left = MOST_REMOVED
    while True:
        found = resolve(url).url
        try:
            return load(found)
        except CheckpointError:
            left -= 1
            if not left or resolve(url).url == found:
                raise


def _resolve_name(root: Folder, file: str) -> Folder:
    name = _named_by(root, file)
    if file == PUBLISHED and not name:
        raise CheckpointError(
            f"no checkpoint in {root.url} is published yet: none has passed the gate of its run; `ps-ckpt "
            f"publish {root.url} NAME` publishes one, {root.url}/{LATEST} is the newest"
        )
    if not _is_checkpoint_in(root, name):
        raise CheckpointError(
            f"{root.url}/{file} names {name!r}, which is not a checkpoint in {root.url}: it has no "
            f"{MANIFEST}, as its save did not finish or it was removed; give the path of a complete "
            f"checkpoint, or write its name into {file}"
        )
    return folder_at(root.child(name).url)


def _named_by(root: Folder, file: str) -> str:
    return root.read(file).decode(errors="replace").strip()


def _write_name(root: Folder, file: str, name: str, rank: str) -> None:
    if not _is_checkpoint_in(root, name):
        raise CheckpointError(
            f"{root.url} has no checkpoint {name!r}, so it cannot be the {rank} one"
        )
    root.put(file, f"{name}\n".encode())


def published_in(root: Folder) -> dict[str, PublishedManifest]:
    """Returns the manifests of the checkpoints in a folder, by name; skips damaged ones with a warning."""
    published = {}
    for name in root.folders():
        if (folder := root.child(name)).has(MANIFEST):
            try:
                published[name] = read_published(folder)
            except CheckpointError as error:
                logger.warning("skipped an unreadable checkpoint: %s", error)
    return published


def _is_checkpoint_in(root: Folder, name: str) -> bool:
    is_plain = name not in ("", ".", "..") and "/" not in name
    return is_plain and root.child(name).has(MANIFEST)


def _require_same_use(target: Folder, *, is_inference: bool) -> None:
    try:
        kind = read_manifest(target).kind
    except DamagedManifestError:
        return
    except CheckpointError as error:
        raise CheckpointError(
            f"{target.url} cannot be read, so it is not replaced: {error}; choose another folder, or remove "
            "it"
        ) from error
    if (kind == "inference") != is_inference:
        new = "an inference checkpoint" if is_inference else "a checkpoint for training"
        raise CheckpointError(
            f"{target.url} is a checkpoint of kind {kind!r}, so {new} cannot replace it: choose another "
            "folder, or remove it"
        )


def _remove_leftovers(target: Folder) -> None:
    """Removes the data of interrupted saves, to free space for the next one."""
    _remove_unfinished_files(target)
    is_published = target.has(MANIFEST)
    try:
        named = read_manifest(target).data_folder if is_published else ""
    except CheckpointError:
        return  # which data belongs to it is unknown until it is replaced
    _remove_data(target, keep=named)


def _remove_data(target: Folder, *, keep: str) -> None:
    for name in target.folders():
        if is_data_folder(name) and name != keep:
            target.child(name).remove()


def keep_last(root: str | Path, number: int, own: Collection[str]) -> list[str]:
    """Removes all but the newest `number` checkpoints of a run's `own`, and the rest of interrupted removals.

    Never removes those named by LATEST, BEST and PUBLISHED, those of kind inference, and the bases of others;
    0 keeps all. Returns the names of the removed ones.
    """
    if not number:
        return []
    folder = folder_at(root)
    for name in folder.folders():
        if name in own:
            _finish_removal(folder.child(name))
    return remove_checkpoints(root, own, keep=number)


def remove_checkpoints(root: str | Path, names: Collection[str], *, keep: int = 0) -> list[str]:
    """Removes all but the newest `keep`, and those that `keep_last` never removes; returns their names."""
    folder, manifests = folder_at(root), manifests_in(root)
    old = [name for name in manifests if name in names and manifests[name].kind != "inference"]
    old = old[: max(len(old) - keep, 0)]
    named = [_named_by(folder, file) for file in (LATEST, BEST, PUBLISHED) if folder.has(file)]
    kept = _with_bases([*named, *(name for name in manifests if name not in old)], manifests)
    removed = [name for name in manifests if name in old and name not in kept]
    for name in removed:
        child = folder.child(name)
        child.remove_file(MANIFEST)  # first: half a checkpoint must not look like one
        child.remove()
        logger.info("removed old checkpoint=%s", child.url)
    return removed


def _with_bases(names: Iterable[str], manifests: dict[str, Manifest]) -> set[str]:
    kept: set[str] = set()
    for name in names:
        needed: str | None = name
        while needed is not None and needed not in kept:
            kept.add(needed)
            needed = manifests[needed].base if needed in manifests else None
    return kept


def _finish_removal(folder: Folder) -> None:
    """Removes the rest of a checkpoint after an interrupted removal, which begins with the manifest."""
    names = folder.folders()
    is_rest = bool(names) and not folder.files() and all(map(is_data_folder, names))
    # A running save has a TOKEN in its data folder until it has a manifest.
    if is_rest and not any(folder.child(name).has(TOKEN) for name in names):
        folder.remove()
        logger.info("removed the remaining files of an old checkpoint=%s", folder.url)


def manifests_in(root: str | Path) -> dict[str, Manifest]:
    """Returns the manifests of the checkpoints in a folder by name, oldest first; skips damaged ones."""
    manifests = {name: found.manifest for name, found in published_in(folder_at(root)).items()}
    return dict(sorted(manifests.items(), key=lambda item: (item[1].created, item[0])))


def remove_unfinished(root: str | Path) -> list[str]:
    """Removes the data of interrupted first saves, and unfinished files; returns the folders' names.

    Must not be called during a save into the folder, which looks the same.
    """
    folder = folder_at(root)
    removed = [name for name in folder.folders() if _is_unfinished(folder.child(name))]
    for name in removed:
        folder.child(name).remove()
    _remove_unfinished_files(folder)
    return removed


def _is_unfinished(folder: Folder) -> bool:
    if folder.has(MANIFEST):  # also as MANIFEST.json.next: see `RenamingFolder`
        return False
    names = folder.folders()
    return (
        bool(names)
        and all(map(is_data_folder, names))
        and all(map(_OWN_FILE.fullmatch, folder.files()))
    )
