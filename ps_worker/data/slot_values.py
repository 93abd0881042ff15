"""Kinds of slot values in the data that a model was trained on.

    text        as it stands there: "7" and "07" are two values
    integers    of a column of whole numbers, whose digits were hashed
    keys        whole numbers that are keys already
    lists       a row had any number of values, beside one of these

A model knows hashes only. Its checkpoint stores these kinds, so that a whole number, or an empty list, keeps
its meaning.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

logger = logging.getLogger(__name__)

Kind = Literal["text", "integers", "keys", "lists"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """How values of a slot are read."""

    # as a key, by its digits, or not at all, for the reason in `number_fault`
    whole_number: Literal["key", "digits", "none"] = "key"
    number_fault: str = ""  # ends a message
    text_fault: str = ""  # reason to refuse text other than ""; empty: text is read


AS_KEYS = Meaning()
"""The default, for training samples."""


class SlotValues:
    """Kinds of values by slot name; empty: unknown."""

    def __init__(self, kinds: Mapping[str, Iterable[Kind]] | None = None) -> None:
        self._kinds: dict[str, set[Kind]] = {
            name: set(each) for name, each in (kinds or {}).items()
        }
        self._doubted: set[str] = set()

    def note(self, slot: str, *kinds: Kind) -> None:
        """Adds observed kinds of values of a slot."""
        self._kinds.setdefault(slot, set()).update(kinds)

    def merge(self, other: "SlotValues") -> None:
        """Adds the kinds of other data."""
        for slot, kinds in other._kinds.copy().items():
            self.note(slot, *kinds)

    @property
    def are_known(self) -> bool:
        """Whether the kind of a slot's values is known."""
        return any(self._kinds.values())

    def has_lists(self, slot: str) -> bool:
        """Whether rows had any number of values in a slot."""
        return "lists" in self._kinds.get(slot, ())

    def doubt_text(self, slot: str, text: str) -> None:
        """Warns, once a slot, of `text` where rows had lists: it may be several values in one."""
        if self.has_lists(slot) and slot not in self._doubted:
            self._doubted.add(slot)
            why = "but the model was trained on lists: give lists, or train with `split` in the schema"
            logger.warning("slot %r has %s, read as one value, %s", slot, text, why)

    def meaning(self, slot: str) -> Meaning:
        """Returns how to read values with the meaning of the data."""
        match sorted(self._kinds.get(slot, set()) - {"lists"}):
            case []:
                return Meaning(
                    "none",
                    "but the checkpoint does not tell how whole numbers of its training data became keys: "
                    "send text or a Batch of keys, or train on files or samples and save again",
                )
            case ["text"]:
                return Meaning(
                    "none",
                    "but the model was trained on text, where '7' and '07' differ: send the text as in the "
                    "data",
                )
            case ["integers"] | ["integers", "text"]:
                return Meaning("digits")
            case ["keys"]:
                return Meaning(
                    text_fault=(
                        "but the model was trained on keys, not on hashes of text: send a whole number"
                    )
                )
            case ["keys", "text"]:
                return AS_KEYS
        return Meaning(
            "none",
            "but in its training data some whole numbers were keys and others values to hash: send text, or "
            "a Batch of keys",
        )

    def to_json(self) -> str:
        """Returns a text for `from_json`."""
        return json.dumps({slot: sorted(kinds) for slot, kinds in sorted(self._kinds.items())})

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Returns the kinds that `to_json` wrote, ignoring unknown ones; ValueError for another text."""
        found = json.loads(text)
        if not isinstance(found, dict) or not all(
            isinstance(each, list) for each in found.values()
        ):
            raise ValueError(f"it is {str(found)[:100]}, expected a list of kinds for each slot")
        return cls(
            {
                slot: [each for each in kinds if each in get_args(Kind)]
                for slot, kinds in found.items()
            }
        )
