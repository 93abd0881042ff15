"""The place where each key of a job was written: its file, or an override."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

KeyPath = tuple[str, ...]
"""A key from the top on; the elements of an array have their index as key: ("data", "train", "0")."""


def path_of(override: str) -> KeyPath:
    """Returns the key that `section.key=value` sets."""
    return tuple(override.partition("=")[0].strip().split("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The texts that a job was read from. All are equal: a job is its values, wherever they were written.

    Attributes:
        source: Path of the file, or another name of the source.
        overrides: `section.key=value`, in order.
        aliases: Keys as written under another name, by their name in the job.
    """

    source: str = field(default="job", compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)
    aliases: Mapping[KeyPath, KeyPath] = field(default_factory=dict, compare=False)

    def as_written(self, key: Sequence[str]) -> KeyPath:
        """Returns the key under the name with which it was written."""
        return self.aliases.get(tuple(key), tuple(key))

    def of(self, key: Sequence[str]) -> str:
        """Returns all places of a key, for messages."""
        return ", ".join(self.places(key))

    def places(self, key: Sequence[str]) -> list[str]:
        """Returns where a key was written: the source, `--set section.key=value`, or both.

        Both, where overrides changed a part of the value.
        """
        path = self.as_written(key)
        places = [self.source]
        for text in self.overrides:
            if _is_within(path, path_of(text)):
                places = [f"--set {text}"]  # it replaced the value before
            elif _is_within(path_of(text), path):
                places.append(f"--set {text}")
        return places


def _is_within(path: KeyPath, table: KeyPath) -> bool:
    return path[: len(table)] == table
