"""What a save costs those who train meanwhile."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """What a save of a store costs, or of all servers of a cluster: the most of any.

    Attributes:
        pause_s: For how long pushes were held back while parameters were cut.
        duration_s: From the cut until all was written; 0 while it goes on.
        is_over: Whether it has ended, saved or failed.
    """

    pause_s: float
    duration_s: float
    is_over: bool
