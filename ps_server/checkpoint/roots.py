"""Where a process may save and load: whoever reaches a server could have it write and read anywhere else."""

from collections.abc import Iterable, Sequence

from protos.errors import CheckpointError
from ps_server.checkpoint.publish import resolve
from ps_server.checkpoint.reader import Checkpoint
from ps_server.checkpoint.storage.folders import place_of


class Roots:
    """Folders that checkpoints have to be in; without any, they may be anywhere."""

    def __init__(self, urls: Iterable[str] = ()) -> None:
        """Takes paths and URLs.

        Raises:
            CheckpointError: If one cannot be that of a folder.
        """
        self._places = [place_of(url) for url in urls]

    def require(self, urls: Sequence[str]) -> None:
        """Checks that places, with all links followed, are in one of the roots.

        Raises:
            CheckpointError: If one is not.
        """
        for url in urls if self._places else ():
            place = place_of(url)
            if not any(f"{place}/".startswith(f"{root.rstrip('/')}/") for root in self._places):
                raise CheckpointError(
                    f"{url!r} is outside of {', '.join(self._places)}: this server saves and loads there "
                    f"only (--checkpoint-root)"
                )

    def open(self, url: str) -> Checkpoint:
        """Opens the checkpoint `url`, or the latest one in that folder.

        Raises:
            CheckpointError: If there is none, it is not whole, or a part of it is not in the roots.
        """
        self.require([url])
        found = resolve(url).url  # where LATEST leads, which may be a link
        self.require([found])
        checkpoint = Checkpoint.open(found)
        self.require(checkpoint.file_urls)
        return checkpoint
