"""The values that the last synchronous step changed, as they were before it.

A worker that dies while it pushes its part of step t may have reached some servers and not others: those
that have all parts apply the step, the others wait for its part. The process that takes its place computes
that part again, from the values before step t, so all servers still answer with those:

    values now, all but those that step t changed + values before step t = values at version t

One step back is enough: no server applies step t + 1 without this worker's part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.protos.store import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeStep:
    """Values before a step."""

    step: Version  # its number, which is the version that has these values
    # keys uint64[N], embeddings float32[N, D] that it changes
    rows: Mapping[str, tuple[Keys, Values]]
    blocks: Mapping[str, Values]  # weights float32[p] of each dense block that it changes
    num_evicted: int  # rows that the tables had evicted by then

    def restore_rows(self, table: str, keys: Keys, values: Values) -> None:
        """Overwrites the embeddings `values` float32[M, D] of `keys` uint64[M] that the step changed."""
        if table not in self.rows:
            return
        changed, before = self.rows[table]
        order = np.argsort(changed)
        places = np.searchsorted(changed, keys, sorter=order)
        places = order[np.minimum(places, changed.size - 1)] if changed.size else places[:0]
        (found,) = np.nonzero(changed[places] == keys) if changed.size else (places,)
        values[found] = before[places[found]]

    def restore_block(self, block: str, values: Values) -> None:
        """Overwrites the weights `values` float32[p] of a dense block, if the step changed them."""
        if block in self.blocks:
            values[:] = self.blocks[block]


def require_values_at(
    version: Version, kept: BeforeStep | None, *, newest: Version, num_evicted: int
) -> BeforeStep:
    """Returns the values `kept` before the last step, which are those at `version`, that somebody asks for.

    Raises ProtocolError if they were not kept, or rows were evicted since: a step that evicts changes others
    than those of its gradients. `newest` is the version of the server, for the message.
    """
    if kept is None or kept.step != version or kept.num_evicted != num_evicted:
        raise ProtocolError(
            f"this server is at version {newest} and no longer has the values of version {version}, which a "
            "worker needs to repeat a step. Either the step evicted rows, or another server has lost the end "
            "of its update log, as can happen with --log-sync os when a machine crashes: the output of that "
            f"server then has a line 'recovered ... version={version}'. Start the job again from its "
            "checkpoint"
        )
    return kept
