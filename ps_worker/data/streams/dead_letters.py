"""A file of the messages that could not be read, an object of JSON a line."""

import base64
import json
from pathlib import Path

from ctr_ps.ps_worker.data.streams.decoding import Lost


class DeadLetters:
    """Adds what cannot be read to a file; one that a restarted run reads again is in it twice."""

    def __init__(self, path: Path) -> None:
        """Creates no file before the first."""
        self._path = path

    def __call__(self, lost: Lost) -> None:
        """Adds a line or message; its value is text, or base64 if it is no UTF-8."""
        message = lost.message
        found = {"partition": message.partition, "offset": message.offset, "row": lost.line + 1}
        try:
            value = {"value": lost.value.decode()}
        except UnicodeDecodeError:
            value = {"base64": base64.b64encode(lost.value).decode()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**found, **value}) + "\n")
