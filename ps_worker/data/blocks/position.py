"""Where in its data a worker is: enough to go on from there exactly, and small enough for a checkpoint."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

from ctr_model.batch import Batch
from protos.errors import DataError
from ps_worker.data.files.file_split import FileSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """All rows before it were given, none after it.

    Attributes:
        epoch: Number of the pass, from 1.
        seed: Of the order of the splits in it.
        split: Index of the split in the order of the pass.
        offset: A block's in this split, as `Reader.blocks` takes it; None: the start of the split.
        skip: Rows from there on that were given already.
        files: Digest of the files that it is a position in.
    """

    epoch: int = 1
    seed: int = 0
    split: int = 0
    offset: int | None = None
    skip: int = 0
    files: str = ""

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
        if isinstance(values, dict) and "part" in values:
            # A checkpoint from before splits had this name.
            values["split"] = values.pop("part")
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise DataError(f"data position {text!r}: expected an object with {', '.join(names)}")
        for name, value in values.items():
            is_count = type(value) is int and value >= 0  # True is an int, too
            if name == "files" and not isinstance(value, str):
                raise DataError(f"data position: files is {value!r}, expected a text")
            if name != "files" and not is_count and not (name == "offset" and value is None):
                raise DataError(
                    f"data position: {name} is {value!r}, expected a whole number from 0 on"
                )
        return cls(**values)


Batches = Iterable[Batch | tuple[Batch, DataPosition]]
"""What is trained on: batches, each with the position after it if its source knows."""


def digest_of_files(splits: Sequence[FileSplit], is_shuffled: bool) -> str:
    """Returns 16 hex digits that differ where splits, their order or whether they are shuffled differ."""
    text = json.dumps([is_shuffled, *([split.path, split.start, split.stop] for split in splits)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
