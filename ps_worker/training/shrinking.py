"""What a shrink says in the log."""

import logging
from collections.abc import Mapping

from protos.store import Shrunk

logger = logging.getLogger(__name__)


def log_shrunk(tables: Mapping[str, Shrunk]) -> None:
    """Logs of each table what a shrink removed and left; a warning if more than half of its rows went."""
    for name, shrunk in tables.items():
        level = logging.WARNING if shrunk.rows > shrunk.left_rows else logging.INFO
        candidates = f" removed_candidates={shrunk.candidates}" if shrunk.candidates else ""
        logger.log(
            level,
            "shrunk table=%s removed_rows=%d left_rows=%d removed_mb=%.1f%s",
            name,
            shrunk.rows,
            shrunk.left_rows,
            shrunk.size_bytes / 2**20,
            candidates,
        )
