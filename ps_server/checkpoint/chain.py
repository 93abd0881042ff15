"""Deltas on a base: which checkpoints a delta needs, and the rows that come of them.

    full <---- delta <---- delta        each names its base, beside it, with the checksum of its manifest

    rows = rows of the base, aged, without those that were removed or changed since + rows that changed

So a base that was replaced since breaks the chain, and that is noticed.
"""

from dataclasses import dataclass

import numpy as np

from protos.errors import CheckpointError
from protos.gradients import Values
from protos.keys import Keys
from protos.spec import TableSpec
from ps_server.checkpoint.files.manifest import MANIFEST, Manifest
from ps_server.checkpoint.publish import PublishedManifest, published_in, read_published
from ps_server.checkpoint.storage.folders import Folder, folder_at
from ps_server.table.contents import Rows
from ps_server.table.rows.statistics import CLICK, SHOW, UNSEEN


@dataclass(frozen=True, slots=True)
class ShardChange:
    """What a delta says of one shard.

    Attributes:
        rows: Those that changed or are new.
        removed: uint64[N] ascending, keys that lost their row at some time since the base.
        passes: How often the other rows have aged.
        decay: What a pass left of their shows and clicks.
    """

    rows: Rows
    removed: Keys
    passes: int
    decay: float


def merged(base: Rows, change: ShardChange) -> Rows:
    """Returns the rows of a shard, ascending by key, after a change of those of the base."""
    new = change.rows
    stays = ~(_are_in(base.keys, change.removed) | _are_in(base.keys, new.keys))
    keys = np.concatenate([base.keys[stays], new.keys])
    order = np.argsort(keys, kind="stable")  # two sorted runs, which this merges
    old_statistics = _aged(base.statistics[stays], change)
    return Rows(
        keys=keys[order],
        weights=np.concatenate([base.weights[stays], new.weights])[order],
        state=np.concatenate([base.state[stays], new.state])[order],
        statistics=np.concatenate([old_statistics, new.statistics])[order],
    )


def _are_in(keys: Keys, sorted_keys: Keys) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found = np.zeros(keys.size, np.bool_)
    if sorted_keys.size:
        positions = np.minimum(np.searchsorted(sorted_keys, keys), sorted_keys.size - 1)
        found[:] = sorted_keys[positions] == keys
    return found


def _aged(statistics: Values, change: ShardChange) -> Values:
    """Returns statistics after some passes, by the same steps as ps_server/table/feature_life/expiry.py."""
    if not (change.passes and statistics.shape[1]):
        return statistics
    aged = statistics.copy()
    for _ in range(change.passes):
        for column in (SHOW, CLICK):
            aged[:, column] *= np.float32(change.decay)
        aged[:, UNSEEN] += np.float32(1.0)
    return aged


def manifests_of_chain(folder: Folder) -> list[tuple[Folder, PublishedManifest]]:
    """Returns a checkpoint and those that it needs, the full one first.

    Raises:
        CheckpointError: If one is missing, was replaced since, or does not fit; says which.
    """
    published = read_published(folder)
    chain = [(folder, published)]
    while (base := published.manifest.base) is not None:
        base_folder = beside(folder, base)
        if not base_folder.has(MANIFEST):
            raise CheckpointError(
                f"{folder.url} needs its base {base_folder.url}, and there is no checkpoint: it was removed "
                f"or moved; load an older one that is whole"
            )
        base_published = read_published(base_folder)
        if base_published.sha256 != published.manifest.base_sha256:
            raise CheckpointError(
                f"{folder.url} needs its base {base_folder.url} as it was, but that was replaced since: its "
                f"manifest has the sha256 {base_published.sha256}, not {published.manifest.base_sha256}"
            )
        _require_fitting(published.manifest, base_published.manifest, folder.url)
        folder, published = base_folder, base_published
        chain.append((folder, published))
    return chain[::-1]


def dependants(folder: Folder) -> list[str]:
    """Returns the names of the deltas that need the checkpoint in a folder, ascending; all are beside it.

    Those whose base was replaced before are none: they cannot be read with it either.

    Raises:
        CheckpointError: If what is beside it cannot be listed.
    """
    above = folder.url.rpartition("/")[0]
    if not folder.has(MANIFEST) or above.endswith(":/"):  # nothing is beside a whole bucket
        return []
    published = published_in(folder_at(above or "/"))
    found, bases = list[str](), [folder.name]
    while bases:
        base = bases.pop()
        deltas = [
            name
            for name, delta in published.items()
            if delta.manifest.base == base
            and base in published
            and delta.manifest.base_sha256 == published[base].sha256
        ]
        found += deltas
        bases += deltas
    return sorted(found)


def require_unneeded(folder: Folder) -> None:
    """Checks that no delta needs the checkpoint in a folder, so that it may be replaced.

    Raises:
        CheckpointError: If one does, or if what is beside it cannot be listed.
    """
    if names := dependants(folder):
        raise CheckpointError(
            f"{folder.url} will not be replaced: {', '.join(names)} beside it cannot be read without it as "
            f"it is; write to another place"
        )


def beside(folder: Folder, name: str) -> Folder:
    """Returns the folder `name` in that which `folder` is in."""
    return folder_at(f"{folder.url.rpartition('/')[0]}/{name}")


def _require_fitting(manifest: Manifest, base: Manifest, url: str) -> None:
    shapes, base_shapes = _shapes_of(manifest), _shapes_of(base)
    if shapes != base_shapes:
        raise CheckpointError(
            f"{url} does not fit its base {manifest.base!r}: tables have (dim, shards, optimizer, widths of "
            f"state and statistics) {shapes}, there {base_shapes}"
        )


def _shapes_of(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    return {spec.name: _shape_of(manifest, spec) for spec in manifest.tables}


def _shape_of(manifest: Manifest, spec: TableSpec) -> tuple[object, ...]:
    widths = {
        (entry.state_width, entry.statistics_width) for entry in manifest.files_of_table(spec.name)
    }
    return spec.dim, spec.num_shards, spec.optimizer.name, *sorted(widths)
