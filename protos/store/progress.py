"""How much of each worker's training a whole cluster has."""

from collections.abc import Mapping, Sequence

from protos.store.store import WorkerProgress


def merge_progress(parts: Sequence[Mapping[int, WorkerProgress]]) -> dict[int, WorkerProgress]:
    """Returns, by worker, the least progress of any server; a worker that one knows nothing of has none.

    Steps of a worker are numbered on from run to run, so they compare where incarnations differ.
    """
    everywhere = set.intersection(*map(set, parts)) if parts else set()
    return {
        worker: min((part[worker] for part in parts), key=lambda progress: progress.step)
        for worker in sorted(everywhere)
    }
