"""Names of barriers and exchanges: chosen by workers, kept by servers."""

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import MAX_NAME_CHARACTERS


def require_name(kind: str, name: str) -> None:
    """Raises ProtocolError unless `name` is short enough for a barrier or an exchange."""
    if len(name) > MAX_NAME_CHARACTERS:
        raise ProtocolError(
            f"the name of {kind} {name[:MAX_NAME_CHARACTERS]!r}... has {len(name)} characters, expected "
            f"up to {MAX_NAME_CHARACTERS}"
        )
