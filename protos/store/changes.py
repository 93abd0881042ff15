"""Changes: the rows that others changed, for workers that hold a replica of a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ctr_ps.protos.futures import Future
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store.parameters import Version


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows that changed since a worker last asked.

    Attributes:
        rows: For each table asked for uint64[N] and float32[N, D]: keys and weights.
        version: The rows have all that was applied up to this version, and perhaps more; of several
            servers the smallest.
        has_more: There may be more: ask again.
    """

    rows: Mapping[str, tuple[Keys, Values]]
    version: Version
    has_more: bool


class Changes(Protocol):
    """Subscriptions to the changes of tables."""

    def pull_changed(self, tables: Sequence[str], worker: int, *, max_rows: int) -> Future[Changed]:
        """Takes rows that changed since this worker last took them: by a load, or by a push of another.

        A row that only the worker's own pushes on arrival changed does not count: the worker knows the
        result. If another worker changed it too, it counts.

        Rows in an answer count as known to the worker even if the answer is lost: after an error the worker
        has to end. Rows that change meanwhile come again.

        Args:
            tables: Tables to take from; they record changes.
            worker: Index of the asking worker.
            max_rows: Limit of the rows from each server, at least 1; fewer come where more would not fit a
                message.

        Raises:
            UnknownTableError: If a table does not exist.
            ProtocolError: If one does not record changes, if `max_rows` is less than 1, or if the worker is
                not of this job.
        """
        ...
