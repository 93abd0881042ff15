"""Retention: removal of old checkpoints, and of what interrupted saves and removals left.

Which checkpoints of a folder belong to a run, and so may be removed, is ps_worker/checkpoints/retention.py.
"""

import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from ps_server.checkpoint.files.manifest import LATEST, MANIFEST, TOKEN, Manifest, is_data_folder
from ps_server.checkpoint.publish import OWN_FILES, published_in
from ps_server.checkpoint.storage.folders import Folder, folder_at

logger = logging.getLogger(__name__)


def keep_last(root: str | Path, number: int, own: Collection[str]) -> list[str]:
    """Removes the oldest of some checkpoints of a folder, and what is left of ones removed in part.

    The one that LATEST names stays, and so do those of kind inference and those that one which stays needs.

    Args:
        root: A folder of checkpoints.
        number: How many of `own` to keep, at least 1; 0 keeps all.
        own: The names of those that may go.

    Returns:
        The names of those removed.

    Raises:
        CheckpointError: If the folder cannot be read, or one cannot be removed.
    """
    if not number:
        return []
    folder = folder_at(root)
    latest = folder.read(LATEST).decode().strip() if folder.has(LATEST) else ""
    for name in folder.folders():
        if name in own:
            _remove_rest(folder.child(name))
    manifests = manifests_in(root)
    candidates = [name for name in manifests if name in own and manifests[name].kind != "inference"]
    old = candidates[:-number]
    kept = _with_bases([latest, *(name for name in manifests if name not in old)], manifests)
    removed = [name for name in candidates if name not in kept]
    for name in removed:
        child = folder.child(name)
        child.remove_file(MANIFEST)  # first: half a checkpoint must not look like one
        child.remove()
        logger.info("removed old checkpoint=%s", child.url)
    return removed


def _with_bases(names: Iterable[str], manifests: dict[str, Manifest]) -> set[str]:
    """Returns `names` and all checkpoints that these need."""
    kept: set[str] = set()
    for name in names:
        needed: str | None = name
        while needed is not None and needed not in kept:
            kept.add(needed)
            needed = manifests[needed].base if needed in manifests else None
    return kept


def _remove_rest(folder: Folder) -> None:
    """Removes a folder that was a checkpoint: its manifest went first, and then somebody was killed."""
    names = folder.folders()
    is_rest = bool(names) and not folder.files() and all(map(is_data_folder, names))
    # A save at work has a TOKEN in its folder until it has a manifest.
    if is_rest and not any(folder.child(name).has(TOKEN) for name in names):
        folder.remove()
        logger.info("removed what was left of an old checkpoint=%s", folder.url)


def manifests_in(root: str | Path) -> dict[str, Manifest]:
    """Returns the manifest of each checkpoint in a folder, by name, the oldest first.

    Those whose manifest is damaged are left out, with a warning.

    Raises:
        CheckpointError: If the folder cannot be read.
    """
    manifests = {name: found.manifest for name, found in published_in(folder_at(root)).items()}
    return dict(sorted(manifests.items(), key=lambda item: (item[1].created, item[0])))


def remove_unfinished(root: str | Path) -> list[str]:
    """Removes from a folder of checkpoints what saves that were killed have left, under whatever names.

    To be called when nobody saves into the folder: a save at work looks the same.

    Returns:
        The names of those removed.

    Raises:
        CheckpointError: If the folder cannot be read, or one cannot be removed.
    """
    folder = folder_at(root)
    removed = [name for name in folder.folders() if _is_unfinished(folder.child(name))]
    for name in removed:
        folder.child(name).remove()
    return removed


def _is_unfinished(folder: Folder) -> bool:
    if folder.has(MANIFEST):  # perhaps by another name: see `RenamingFolder`
        return False
    names = folder.folders()
    return bool(names) and all(map(is_data_folder, names)) and folder.files().keys() <= OWN_FILES
