"""How a folder becomes a checkpoint, and how one is found.

    .<name>.staging-<random>   being written, next to its target; holds TOKEN
    <name>                     published: the staging folder, renamed once it has its MANIFEST.json
    .<name>.previous           the checkpoint that stood there before, for the moment of the swap
    LATEST                     in a folder of checkpoints: the name of the newest

A crash at any point leaves the old checkpoint or the new one to be found. Two saves to one target at
a time are not supported.
"""

import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from protos.errors import CheckpointError
from ps_server.checkpoint.durable import sync, write_file
from ps_server.checkpoint.manifest import Manifest, manifest_to_json

MANIFEST = "MANIFEST.json"
TOKEN = "TOKEN"
LATEST = "LATEST"

# One slash, because `Path` leaves no more of them.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(url: str | Path) -> Path:
    """Returns the absolute path, without symbolic links.

    Raises:
        CheckpointError: If `url` has a scheme.
    """
    if _SCHEME.match(str(url)):
        raise CheckpointError(
            f"{str(url)!r} is a URL, but checkpoints are kept in local or mounted folders only: give "
            f"a path"
        )
    return Path(url).resolve()


def open_staging(target: Path) -> tuple[Path, str]:
    """Makes a staging folder for `target`, and returns it and its token.

    Raises:
        CheckpointError: If it cannot be made, or if `target` is something else than a checkpoint.
    """
    staging = target.with_name(f".{target.name}.staging-{secrets.token_hex(8)}")
    token = secrets.token_hex(16)
    try:
        _require_replaceable(target)
        staging.mkdir(parents=True)
        write_file(staging / TOKEN, token.encode())
    except OSError as exc:
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"cannot write a checkpoint next to {target}: {exc}") from exc
    return staging, token


def require_writable(root: str | Path) -> None:
    """Finds out before training whether a folder can take checkpoints.

    Raises:
        CheckpointError: If it cannot.
    """
    staging, _ = open_staging(local_path(root) / "probe")
    shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, target: Path, manifest: Manifest) -> None:
    """Makes a staging folder the checkpoint `target`; one that is there already is replaced.

    The files that the manifest lists have been forced to disk by whoever wrote them.

    Raises:
        CheckpointError: If that fails; an old checkpoint is still there, or already replaced by the
            new one, whole either way.
    """
    try:
        _require_replaceable(target)
        write_file(staging / MANIFEST, manifest_to_json(manifest).encode())
        (staging / TOKEN).unlink()
        sync(staging)
        _swap(staging, target)
    except OSError as exc:
        raise CheckpointError(f"cannot publish checkpoint {target}: {exc}") from exc


def write_latest(root: str | Path, name: str) -> None:
    """Says in `root/LATEST` that the newest of the checkpoints in `root` is `name`.

    Raises:
        CheckpointError: If it is no checkpoint, or cannot be said.
    """
    folder = local_path(root)
    latest, beside = folder / LATEST, folder / f".{LATEST}.{secrets.token_hex(8)}"
    if _checkpoint_in(folder, name) is None:
        raise CheckpointError(f"{name!r} is no checkpoint in {folder}: it cannot be the latest one")
    try:
        write_file(beside, f"{name}\n".encode())
        beside.replace(latest)
        sync(folder)
    except OSError as exc:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {latest}: {exc}") from exc


def resolve(url: str | Path) -> Path:
    """Returns the folder of the checkpoint `url`, or of the latest one in it.

    Raises:
        CheckpointError: If there is none; says what is missing.
    """
    path = local_path(url)
    try:
        return _published(path) or _resolve_latest(path)
    except OSError as exc:
        raise CheckpointError(f"cannot read checkpoint {path}: {exc}") from exc


def _resolve_latest(root: Path) -> Path:
    if not root.exists():
        raise CheckpointError(f"no checkpoint {root}: there is no such folder")
    latest = root / LATEST
    if not latest.is_file():
        raise CheckpointError(
            f"no {MANIFEST} in {root}: not a checkpoint, or its save did not finish; and no {LATEST}: "
            f"not a folder of checkpoints"
        )
    name = latest.read_bytes().decode(errors="replace").strip()
    folder = _checkpoint_in(root, name)
    if folder is None:
        raise CheckpointError(
            f"{latest} names {name!r}, which is no checkpoint in {root}: no folder of that name has a "
            f"{MANIFEST}, so its save did not finish; give the path of one that is whole"
        )
    return folder


def _checkpoint_in(root: Path, name: str) -> Path | None:
    """Returns where the checkpoint `root/name` is, if `name` is a plain name of one."""
    return _published(root / name) if name and Path(name).name == name else None


def _published(folder: Path) -> Path | None:
    """Returns where the checkpoint `folder` is at the moment, if there is one."""
    if (folder / MANIFEST).is_file():
        return folder
    previous = _previous(folder)
    # A save was killed between the two renames of its swap.
    if not folder.exists() and (previous / MANIFEST).is_file():
        return previous
    return None


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _require_replaceable(target: Path) -> None:
    if not target.exists() or (target / MANIFEST).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise CheckpointError(
            f"{target} is there, and is not a checkpoint: it will not be replaced; choose another "
            f"folder, or remove it"
        )


def _swap(staging: Path, target: Path) -> None:
    previous = _previous(target)
    has_old = (target / MANIFEST).is_file()
    if has_old:
        _discard(previous)
        target.rename(previous)
    try:
        staging.rename(target)
    except OSError:
        if has_old:
            previous.rename(target)
        raise
    sync(target.parent)
    _discard(previous)


def _discard(folder: Path) -> None:
    # The manifest goes first: half a checkpoint must not look like one.
    with suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)
