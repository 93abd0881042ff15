"""A worker's position in its data, stored in checkpoints for resuming exactly."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.files.file_split import FileSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """A position between two rows of a pass: all rows before it were yielded, none after it."""

    epoch: int = 1  # number of the pass, from 1
    seed: int = 0  # seed of the order of splits
    split: int = 0  # index of the split in the order of the pass
    offset: int | None = None  # `Block.offset` in this split; None: its start
    skip: int = 0  # rows after `offset` that were already yielded
    files: str = ""  # digest of the files (`digest_of_files`)

    def to_json(self) -> str:
        """Returns the position as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the position that `to_json` wrote; raises DataError for another text."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise DataError(f"data position {text!r} is not JSON: {error}") from error
        names = [field.name for field in fields(cls)]
        if isinstance(values, dict) and "part" in values:
            # Older checkpoints.
            values["split"] = values.pop("part")
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise DataError(f"data position {text!r}: expected an object with {', '.join(names)}")
        for name, value in values.items():
            is_count = type(value) is int and value >= 0  # True is an int, too
            if name == "files" and not isinstance(value, str):
                raise DataError(f"data position: files is {value!r}, expected a text")
            if name != "files" and not is_count and not (name == "offset" and value is None):
                raise DataError(
                    f"data position: {name} is {value!r}, expected a whole number of at least 0"
                )
        return cls(**values)


Batches = Iterable[Batch | tuple[Batch, DataPosition]]
"""Training data: batches, each with the position after it if its source has positions."""


def digest_of_files(splits: Sequence[FileSplit], is_shuffled: bool) -> str:
    """Returns 16 hex digits over the splits, their order and `is_shuffled`."""
    text = json.dumps([is_shuffled, *([split.path, split.start, split.stop] for split in splits)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
