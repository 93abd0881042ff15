"""Settings of a job that the launcher heeds, as its workers will read them.

The launcher knows no job: a file or an override that is wrong is left to the workers, whose error says why.
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class JobSettings:
    """A job's settings, with the overrides of a worker's command line."""

    def __init__(self, job: Path, words: Sequence[str] = ()) -> None:
        """Reads the job.

        Args:
            job: A TOML file.
            words: Words of a command line, of which `--set section.key=value` count.
        """
        try:
            self._tree: dict[str, Any] = tomllib.loads(job.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._tree = {}
        for option, override in itertools.pairwise(words):
            if option == "--set":
                self._override(override)

    def get(self, section: str, key: str) -> Any:
        """Returns a setting; None: it is not set."""
        values = self._tree.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    def _override(self, override: str) -> None:
        path, _, text = override.partition("=")
        section, _, key = path.strip().partition(".")
        if not key:
            self._tree[section] = _value(text)
        elif isinstance(values := self._tree.setdefault(section, {}), dict):
            values[key.strip()] = _value(text)


def _value(text: str) -> Any:
    """Returns the TOML value that `text` is, or the text itself: quotes around words are optional."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except ValueError:
        return text.strip()
