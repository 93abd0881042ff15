"""What the columns of the data are: dense numbers with their scaling, and slots with their order.

The schema is part of a model: another order of slots or another scaling is another model. So it
goes into checkpoints (`to_dict`), and two parties compare `fingerprint`s before they talk numbers.
"""

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctr_model.features import HASH_VERSION
from ctr_model.schema.dense_column import DenseColumn
from ctr_model.schema.dense_scaling import DenseScaling
from ctr_model.schema.entries import (
    SchemaError,
    list_entry,
    refuse_duplicates,
    refuse_unknown_keys,
    text_entry,
)

_PACKAGED = resources.files("ctr_model.schema") / "schemas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of an example, in the order of the data: dense numbers first, then slots.

    Attributes:
        dense: Numbers, as they stand in the data.
        slots: Names of the S slots; a slot's number in the feature hash is its position, from 1.
        hash_version: Of the feature hash under which the model's keys were made.
    """

    dense: tuple[DenseColumn, ...]
    slots: tuple[str, ...]
    hash_version: int = HASH_VERSION
    _scaling: DenseScaling = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuses duplicate names, no slots, and keys of another hash.

        Raises:
            SchemaError: Names the duplicate or the version.
        """
        if self.hash_version != HASH_VERSION:
            raise SchemaError(
                f"the schema needs feature hash version {self.hash_version!r}, "
                f"this package has version {HASH_VERSION}: use the release that wrote it"
            )
        if not self.slots:
            raise SchemaError("the schema has no slots: list at least one name under 'slots'")
        refuse_duplicates("dense column", (column.name for column in self.dense))
        refuse_duplicates("slot", self.slots)
        object.__setattr__(self, "_scaling", DenseScaling(self.dense))  # frozen, else

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Returns a schema of this package by name ("criteo") or a file's by path.

        Raises:
            SchemaError: If there is neither, or the file is wrong.
        """
        packaged = {entry.name.removesuffix(".toml"): entry for entry in _PACKAGED.iterdir()}
        if str(source) in packaged:
            return cls.from_dict(tomllib.loads(packaged[str(source)].read_text(encoding="utf-8")))
        if not Path(source).exists():
            raise SchemaError(
                f"no schema {str(source)!r}: there is no such file, "
                f"and the names known here are {', '.join(sorted(packaged))}"
            )
        return cls.from_toml(Path(source))

    @classmethod
    def numbered(cls, num_dense: int, num_slots: int) -> Self:
        """Returns a schema of columns I1, I2, ... and C1, C2, ..., for batches that come ready made."""
        return cls(
            dense=tuple(DenseColumn(name=f"I{i}") for i in range(1, num_dense + 1)),
            slots=tuple(f"C{i}" for i in range(1, num_slots + 1)),
        )

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Returns the schema in the TOML file at `path`.

        Raises:
            SchemaError: Names the file and what is wrong in it.
        """
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise SchemaError(f"cannot read schema {str(path)!r}: {error.strerror}") from error
        except ValueError as error:  # of the encoding, of TOML, or ours
            raise SchemaError(f"schema {str(path)!r}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Returns the schema of which `to_dict` gave `data`; defaults may be left out.

        Raises:
            SchemaError: Names the entry, its value and, for an unknown key, the nearest known one.
        """
        refuse_unknown_keys("schema", data, ("dense", "slots", "hash_version"))
        hash_version = data.get("hash_version")
        if type(hash_version) is not int:  # True is an int, too
            raise SchemaError(f"schema: hash_version is {hash_version!r}, expected a whole number")
        return cls(
            dense=tuple(
                DenseColumn.from_dict(entry)
                for entry in list_entry("schema: dense", data.get("dense"))
            ),
            slots=tuple(
                text_entry("slots", name) for name in list_entry("schema: slots", data.get("slots"))
            ),
            hash_version=hash_version,
        )

    def to_dict(self) -> dict[str, object]:
        """Returns plain values, as JSON and TOML know them, that `from_dict` reads back."""
        return {
            "hash_version": self.hash_version,
            "slots": list(self.slots),
            "dense": [column.to_dict() for column in self.dense],
        }

    def to_toml(self) -> str:
        """Returns the content of a schema file, a dense column a line, that `from_toml` reads back."""
        lines = [f"hash_version = {self.hash_version}", "", "slots = ["]
        lines += [f"    {_toml(name)}," for name in self.slots]
        lines += ["]", "", "dense = ["]
        for column in self.dense:
            pairs = (f"{key} = {_toml(value)}" for key, value in column.to_dict().items())
            lines.append(f"    {{ {', '.join(pairs)} }},")
        return "\n".join([*lines, "]", ""])

    @property
    def num_dense(self) -> int:
        """How many numbers the model sees of an example: the columns, then the missing indicators."""
        return self._scaling.width

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all of the schema: it differs where anything differs."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def slot_index(self, name: str) -> int:
        """Returns the number, from 0, of the slot `name`.

        Raises:
            SchemaError: If there is none; names the nearest.
        """
        if name not in self.slots:
            nearest = difflib.get_close_matches(name, self.slots, n=1, cutoff=0.0)[0]
            raise SchemaError(f"the schema has no slot {name!r}, did you mean {nearest!r}?")
        return self.slots.index(name)

    def scale_dense(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Returns what the model sees of the numbers of N examples. For any thread.

        Args:
            values: float64[N, len(dense)], as they stand in the data; nan is a missing number.

        Returns:
            float32[N, num_dense]: the columns in the order of the data, then an indicator for each
            column that has one, in the same order.

        Raises:
            ValueError: If `values` has another number of columns.
        """
        return self._scaling.scale(values)


def criteo_schema() -> Schema:
    """Returns the schema of Criteo's click logs: counts I1..I13 and slots C1..C26."""
    return Schema.load("criteo")


def _toml(value: object) -> str:
    """Returns plain values as TOML."""
    # JSON's texts, numbers and truth values are TOML's, but for one character that JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
