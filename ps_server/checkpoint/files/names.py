"""What things in a checkpoint are called.

Names come back from manifests, which may be anybody's: none may lead out of the checkpoint's folder.
"""

import re
import secrets

from protos.errors import CheckpointError

MANIFEST = "MANIFEST.json"
TOKEN = "TOKEN"
LATEST = "LATEST"
ATTACHMENTS = "attachments"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_DATA = re.compile(r"data-([0-9a-f]{32})")


def require_name(name: str) -> None:
    """Raises CheckpointError unless `name` can be part of a file name."""
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} cannot be part of a file name: use letters, digits, '_', '-' and '.', not "
            f"beginning with '.'"
        )


def new_token() -> str:
    """Returns a token that no other save has."""
    return secrets.token_hex(16)


def data_folder(token: str) -> str:
    """Returns the name of the folder for the files of one save."""
    return f"data-{token}"


def is_data_folder(name: str) -> bool:
    """Whether a folder holds the files of a save."""
    return _DATA.fullmatch(name) is not None
