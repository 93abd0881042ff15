"""Where each key of a job was written: on which line of its file, or by which override."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_worker.job.toml_lines import KeyPath, key_lines


def path_of(override: str) -> KeyPath:
    """Returns the key that `section.key=value` sets."""
    return tuple(override.partition("=")[0].strip().split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The texts that a job was read from. All are equal: a job is what it says, wherever that stands.

    Attributes:
        source: Path of the file, or what else to call it.
        text: TOML of the file; empty: its lines are not known.
        overrides: `section.key=value`, in their order.
        aliases: Keys that were written under another name, by the name that they have in the job.
    """

    source: str = field(default="job", compare=False)
    text: str = field(default="", compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)
    aliases: Mapping[KeyPath, KeyPath] = field(default_factory=dict, compare=False)

    def as_written(self, key: Sequence[str]) -> KeyPath:
        """Returns the key by the name under which it was written."""
        return self.aliases.get(tuple(key), tuple(key))

    def is_overridden(self, key: Sequence[str]) -> bool:
        """Whether an override brought the key, alone or in a table."""
        return any(_is_within(self.as_written(key), path_of(text)) for text in self.overrides)

    def of(self, key: Sequence[str]) -> str:
        """Returns where a key was written: `path:line`, `--set section.key=value`, or both.

        Both, where overrides changed a part of what stands in the file. A key that nobody wrote has the
        place of the nearest table around it, or else that of the source.
        """
        lines = key_lines(self.text)
        path = self.as_written(key)
        if places := self._places(path, lines):
            return ", ".join(places)
        for length in range(len(path) - 1, 0, -1):
            if places := self._places(path[:length], lines):
                return places[0]
        return self.source

    def _places(self, path: KeyPath, lines: Mapping[KeyPath, int]) -> list[str]:
        places = [f"{self.source}:{lines[path]}"] if path in lines else []
        for text in self.overrides:
            if _is_within(path, path_of(text)):
                places = [f"--set {text}"]  # whatever stood there before is gone
            elif _is_within(path_of(text), path):
                places.append(f"--set {text}")
        return places


def _is_within(path: KeyPath, table: KeyPath) -> bool:
    return path[: len(table)] == table
