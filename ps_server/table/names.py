"""What tables and dense blocks may be called."""

import re

from protos.errors import SpecConflictError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def check_name(name: str) -> None:
    """Raises SpecConflictError unless `name` can be part of a file name."""
    if not _NAME.fullmatch(name):
        raise SpecConflictError(
            f"{name!r} is no name for a table or dense block: up to 100 letters, digits, '_', '-' "
            f"and '.', expected"
        )
