"""Chains of deltas: the checkpoints that a delta needs, and how their rows are merged.

full <---- delta <---- delta        each has the name of its base, in the same folder, and the sha256 of
the base's manifest: so a replaced base is detected

rows = rows of the base, decayed, without those removed or changed since + changed rows
"""

from dataclasses import dataclass

import numpy as np

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.ps_server.checkpoint.files.manifest import MANIFEST, Manifest
from ctr_ps.ps_server.checkpoint.publish import PublishedManifest, published_in, read_published
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, folder_at
from ctr_ps.ps_server.table.contents import Rows
from ctr_ps.ps_server.table.rows.statistics import CLICK, SHOW, UNSEEN


@dataclass(frozen=True, slots=True)
class ShardChange:
    """Changes of one shard since the base."""

    rows: Rows  # changed and new ones
    removed: Keys  # uint64[N] ascending, of rows that were removed at any time since the base
    passes: int  # decay passes over the other rows
    decay: float  # factor of a pass for shows and clicks


def merged(base: Rows, change: ShardChange) -> Rows:
    """Returns the rows of a shard after a change, ascending by key."""
    new = change.rows
    is_removed = np.isin(base.keys, change.removed, assume_unique=True)
    stays = ~(is_removed | np.isin(base.keys, new.keys, assume_unique=True))
    keys = np.concatenate([base.keys[stays], new.keys])
    order = np.argsort(keys, kind="stable")  # merges two sorted runs
    old_statistics = _aged(base.statistics[stays], change)
    return Rows(
        keys=keys[order],
        weights=np.concatenate([base.weights[stays], new.weights])[order],
        state=np.concatenate([base.state[stays], new.state])[order],
        statistics=np.concatenate([old_statistics, new.statistics])[order],
    )


def _aged(statistics: Values, change: ShardChange) -> Values:
    """Returns statistics after the decay passes, computed as in ps_server/table/feature_life/removal.py."""
    if not (change.passes and statistics.shape[1]):
        return statistics
    aged = statistics.copy()
    for _ in range(change.passes):
        for column in (SHOW, CLICK):
            aged[:, column] *= np.float32(change.decay)
        aged[:, UNSEEN] += np.float32(1.0)
    return aged


def manifests_of_chain(folder: Folder) -> list[tuple[Folder, PublishedManifest]]:
    """Returns a checkpoint and its bases, the full one first.

    Raises CheckpointError, with the name, if one is missing, was replaced, or does not fit.
    """
    published = read_published(folder)
    chain = [(folder, published)]
    while (base := published.manifest.base) is not None:
        base_folder = beside(folder, base)
        if not base_folder.has(MANIFEST):
            raise CheckpointError(
                f"the base {base_folder.url} of checkpoint {folder.url} was removed or moved: load an older "
                "checkpoint"
            )
        base_published = read_published(base_folder)
        if base_published.sha256 != published.manifest.base_sha256:
            raise CheckpointError(
                f"the base {base_folder.url} of checkpoint {folder.url} was replaced by another: its "
                f"manifest has the sha256 {base_published.sha256}, not {published.manifest.base_sha256}"
            )
        shapes, base_shapes = _shapes_of(published.manifest), _shapes_of(base_published.manifest)
        if shapes != base_shapes:
            raise CheckpointError(
                f"checkpoint {folder.url} does not fit its base {base!r}: its tables have (dim, shards, "
                f"optimizer, widths of state and statistics) {shapes}, the base's tables {base_shapes}"
            )
        folder, published = base_folder, base_published
        chain.append((folder, published))
    return chain[::-1]


def dependants(folder: Folder) -> list[str]:
    """Returns the names of the deltas that need a checkpoint, ascending, from the same parent folder.

    Deltas of a replaced base do not count, as they cannot be read. Raises CheckpointError if the parent
    folder cannot be listed.
    """
    above = folder.url.rpartition("/")[0]
    if not folder.has(MANIFEST) or above.endswith(":/"):  # a bucket has no parent
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


def beside(folder: Folder, name: str) -> Folder:
    """Returns the folder `name` with the same parent as `folder`."""
    return folder_at(f"{folder.url.rpartition('/')[0]}/{name}")


def _shapes_of(manifest: Manifest) -> dict[str, tuple[object, ...]]:
    shapes = {}
    for spec in manifest.tables:
        files = manifest.files_of_table(spec.name)
        widths = {(entry.state_width, entry.statistics_width) for entry in files}
        shapes[spec.name] = spec.dim, spec.num_shards, spec.optimizer.name, *sorted(widths)
    return shapes
