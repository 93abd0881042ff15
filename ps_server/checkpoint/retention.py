"""Retention: removal of old checkpoints, and of the remains of interrupted saves and removals.

ps_worker/checkpoints/retention.py decides which checkpoints belong to a run, and so may be removed. A folder
that cannot be read, or a checkpoint that cannot be removed, raises CheckpointError.
"""

import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from ctr_ps.ps_server.checkpoint.files.manifest import (
    BEST,
    LATEST,
    MANIFEST,
    TOKEN,
    Manifest,
    is_data_folder,
)
from ctr_ps.ps_server.checkpoint.publish import is_own_file, published_in, remove_unfinished_files
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at

logger = logging.getLogger(__name__)


def keep_last(root: str | Path, number: int, own: Collection[str]) -> list[str]:
    """Removes all but the newest `number` checkpoints of a run's `own`, and the rest of interrupted removals.

    Never removes those named by LATEST and BEST, those of kind inference, and the bases of others; 0 keeps
    all. Returns the names of the removed ones.
    """
    if not number:
        return []
    folder = folder_at(root)
    for name in folder.folders():
        if name in own:
            _finish_removal(folder.child(name))
    manifests = manifests_in(root)
    candidates = [name for name in manifests if name in own and manifests[name].kind != "inference"]
    return _remove(folder, candidates[:-number], manifests)


def remove_checkpoints(root: str | Path, names: Collection[str]) -> list[str]:
    """Removes checkpoints, except those that `keep_last` never removes; returns their names."""
    manifests = manifests_in(root)
    old = [name for name in manifests if name in names and manifests[name].kind != "inference"]
    return _remove(folder_at(root), old, manifests)


def _remove(folder: Folder, old: Collection[str], manifests: dict[str, Manifest]) -> list[str]:
    named = [folder.read(file).decode().strip() for file in (LATEST, BEST) if folder.has(file)]
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
        logger.info("removed the rest of an old checkpoint=%s", folder.url)


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
    remove_unfinished_files(folder)
    return removed


def _is_unfinished(folder: Folder) -> bool:
    if folder.has(MANIFEST):  # also as MANIFEST.json.next: see `RenamingFolder`
        return False
    names = folder.folders()
    return bool(names) and all(map(is_data_folder, names)) and all(map(is_own_file, folder.files()))
