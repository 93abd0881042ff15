"""Admin: ending a pass, comparing models, looking at a store."""

from collections.abc import Mapping
from typing import Protocol

from ctr_ps.protos.store.status import Shrunk, StoreStatus


class Admin(Protocol):
    """Upkeep and observation of a store."""

    def shrink(
        self, *, max_norm: float | None = None, dry_run: bool = False
    ) -> Mapping[str, Shrunk]:
        """Ends a pass over the data: rows age, and those that have expired are removed.

        Tables that keep statistics decay them and count the pass for rows that were not pushed; then each
        table's own rules (`TableSpec.expiry`) say which rows are removed. A removed key is one without a row,
        as if it had never been pushed. Others may push and pull meanwhile; while they wait in a barrier, the
        same rows are removed on any number of servers.

        Args:
            max_norm: Also removes, from all tables, the rows whose weights have an L2 norm of at most this.
            dry_run: Returns what would be removed, and changes nothing.

        Returns:
            What was removed and what is left, by table.

        Raises:
            ProtocolError: If `max_norm` is negative or not finite, or a table has replicas; nothing was
                changed.
        """
        ...

    def digest(self) -> str:
        """Returns the digest of all parameters and optimizer states of rows, in hexadecimal.

        Equal models have equal digests on any number of servers: docs/checkpoint.md says what is hashed.
        """
        ...

    def status(self) -> StoreStatus:
        """Returns what the store holds and has seen, merged over servers."""
        ...
