"""Output whose last line is held back, so that a JSON object there can get further fields."""

import json
from collections.abc import Mapping
from typing import Any

from deploy.cluster import Sink


class LastLine:
    """Passes on all but the last line. For one thread at a time."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = b""

    def __call__(self, data: bytes) -> None:
        """Takes output.

        Raises:
            OSError: If it cannot be passed on.
        """
        held = self._held + data
        end = held.rfind(b"\n", 0, len(held) - 1) + 1
        self._held = held[end:]
        if end:
            self._sink(held[:end])

    def end(self, fields: Mapping[str, Any]) -> None:
        """Passes on the last line with `fields` added, if it is an object, and else before them.

        Raises:
            OSError: If it cannot be passed on.
        """
        held, self._held = self._held, b""
        try:
            result = json.loads(held)
        except ValueError:
            result = None
        if isinstance(result, dict):
            fields = {**result, **fields}
        else:
            self._sink(held if held.endswith(b"\n") or not held else held + b"\n")
        self._sink(json.dumps(fields).encode() + b"\n")
