"""The format of messages and update logs: one number; a release reads its own and its neighbours'.

    format 4 --works with--> 3, 4, 5        of workers, servers and logs; 2 and 6 are refused by name

It rises by one when a message, record or state gets, loses or changes a meaning. What is written still means
the same to a release one below: docs/decisions/0065-formats-of-neighbours.md says how.
"""

from ctr_ps.protos.errors import CtrPsError, ProtocolError

FORMAT = 1
"""That of this release."""


def require_format(
    theirs: int,
    whose: str,
    *,
    own: int = FORMAT,
    whose_own: str = "this process",
    error: type[CtrPsError] = ProtocolError,
) -> None:
    """Raises `error` unless the formats of two sides, or of a log and its reader, work together."""
    if abs(theirs - own) <= 1:
        return
    raise error(
        f"{whose} has format {theirs} of messages and logs, but {whose_own} has format {own}, and only "
        "formats that differ by at most 1 work together: upgrade one release at a time, first all servers, "
        "then all workers, and further after the next checkpoint (docs/operations.md#upgrade)"
    )
