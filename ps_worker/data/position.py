"""Where in its data a worker is: enough to go on from there exactly, and small enough for a checkpoint."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Self

from protos.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """All rows before it were given, none after it.

    Attributes:
        epoch: Number of the pass, from 1.
        seed: Of the order of the parts in it.
        part: Index of the part in the order of the pass.
        offset: A block's in this part, as `Reader.blocks` takes it; None: the start of the part.
        skip: Rows from there on that were given already.
    """

    epoch: int = 1
    seed: int = 0
    part: int = 0
    offset: int | None = None
    skip: int = 0

    def to_json(self) -> str:
        """Returns a text that `from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the position of which `to_json` gave `text`.

        Raises:
            DataError: If it is none.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise DataError(f"data position {text!r} is not JSON: {error}") from error
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise DataError(f"data position {text!r}: expected an object with {', '.join(names)}")
        for name, value in values.items():
            is_count = type(value) is int and value >= 0  # True is an int, too
            if not is_count and not (name == "offset" and value is None):
                raise DataError(
                    f"data position: {name} is {value!r}, expected a whole number from 0 on"
                )
        return cls(**values)
