"""Roots: the only folders in which a server saves and loads, as clients could name any place."""

from collections.abc import Iterable, Sequence

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.ps_server.checkpoint.publish import resolve
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import place_of


class Roots:
    """Folders that must contain all checkpoints; none: any place is allowed.

    Raises CheckpointError if a path or URL is invalid.
    """

    def __init__(self, urls: Iterable[str] = ()) -> None:
        self._places = [place_of(url) for url in urls]

    def require(self, urls: Sequence[str]) -> None:
        """Raises CheckpointError unless all `urls`, with links resolved, are in the roots."""
        for url in urls if self._places else ():
            place = place_of(url)
            if not any(f"{place}/".startswith(f"{root.rstrip('/')}/") for root in self._places):
                raise CheckpointError(
                    f"{url!r} is outside of {', '.join(self._places)}: this server saves and loads only "
                    f"there (--checkpoint-root)"
                )

    def open(self, url: str) -> Checkpoint:
        """Opens the checkpoint `url`, or the latest one in that folder.

        Raises CheckpointError if there is none, it is not complete, or a file of it is not in the roots.
        """
        self.require([url])
        found = resolve(url).url  # LATEST may lead to a link
        self.require([found])
        checkpoint = Checkpoint.open(found)
        self.require(checkpoint.file_urls)
        return checkpoint
