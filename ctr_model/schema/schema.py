"""The schema: dense columns with their scaling, and slots in order.

A schema is part of a model, since keys depend on the order of slots and inputs on the scaling. Checkpoints
contain it (`to_dict`), and its `fingerprint` is compared before training resumes.
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
    """The columns of an example in the order of the data: dense columns, then slots.

    Attributes:
        dense: Dense columns.
        slots: Names of the S slots; a slot's number in the feature hash is its position, from 1.
        hash_version: Version of the feature hash of the model's keys.
    """

    dense: tuple[DenseColumn, ...]
    slots: tuple[str, ...]
    hash_version: int = HASH_VERSION
    _scaling: DenseScaling = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the hash version, and that there are slots and names are unique.

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
        object.__setattr__(self, "_scaling", DenseScaling(self.dense))  # a frozen dataclass

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Returns a packaged schema by name ("criteo"), or the schema in a file.

        Raises:
            SchemaError: If neither exists, or the file is invalid.
        """
        packaged = {entry.name.removesuffix(".toml"): entry for entry in _PACKAGED.iterdir()}
        if str(source) in packaged:
            return cls.from_dict(tomllib.loads(packaged[str(source)].read_text(encoding="utf-8")))
        if not Path(source).exists():
            raise SchemaError(
                f"no schema {str(source)!r}: there is no such file, "
                f"and the packaged schemas are {', '.join(sorted(packaged))}"
            )
        return cls.from_toml(Path(source))

    @classmethod
    def numbered(cls, num_dense: int, num_slots: int) -> Self:
        """Returns a schema with dense columns I1, I2, ... and slots C1, C2, ..."""
        return cls(
            dense=tuple(DenseColumn(name=f"I{i}") for i in range(1, num_dense + 1)),
            slots=tuple(f"C{i}" for i in range(1, num_slots + 1)),
        )

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Returns the schema in a TOML file.

        Raises:
            SchemaError: Names the file and the fault.
        """
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise SchemaError(f"cannot read schema {str(path)!r}: {error.strerror}") from error
        except ValueError as error:  # invalid UTF-8 or TOML, or a SchemaError
            raise SchemaError(f"schema {str(path)!r}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Returns the schema that `to_dict` wrote; defaults may be omitted.

        Raises:
            SchemaError: Names the entry, its value and, for an unknown key, the nearest known one.
        """
        refuse_unknown_keys("schema", data, ("dense", "slots", "hash_version"))
        hash_version = data.get("hash_version")
        if type(hash_version) is not int:  # excludes bool
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
        """Returns plain values for JSON or TOML, which `from_dict` reads."""
        return {
            "hash_version": self.hash_version,
            "slots": list(self.slots),
            "dense": [column.to_dict() for column in self.dense],
        }

    def to_toml(self) -> str:
        """Returns the content of a schema file, which `from_toml` reads."""
        lines = [f"hash_version = {self.hash_version}", "", "slots = ["]
        lines += [f"    {_toml(name)}," for name in self.slots]
        lines += ["]", "", "dense = ["]
        for column in self.dense:
            pairs = (f"{key} = {_toml(value)}" for key, value in column.to_dict().items())
            lines.append(f"    {{ {', '.join(pairs)} }},")
        return "\n".join([*lines, "]", ""])

    @property
    def num_dense(self) -> int:
        """Number of dense inputs of the model: the columns, then the missing indicators."""
        return self._scaling.width

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the whole schema, in hex."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def slot_index(self, name: str) -> int:
        """Returns the index, from 0, of the slot `name`.

        Raises:
            SchemaError: If it does not exist; names the nearest.
        """
        if name not in self.slots:
            nearest = difflib.get_close_matches(name, self.slots, n=1, cutoff=0.0)[0]
            raise SchemaError(f"the schema has no slot {name!r}, did you mean {nearest!r}?")
        return self.slots.index(name)

    def scale_dense(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Scales the numbers of N examples. Thread-safe.

        Args:
            values: float64[N, len(dense)], unscaled; nan is a missing number.

        Returns:
            float32[N, num_dense]: the columns, then the missing indicators of columns that have one, both in
            the order of `dense`.

        Raises:
            ValueError: If `values` has another number of columns.
        """
        return self._scaling.scale(values)


def criteo_schema() -> Schema:
    """Returns the schema of Criteo's click logs: counts I1..I13 and slots C1..C26."""
    return Schema.load("criteo")


def _toml(value: object) -> str:
    """Returns a plain value as TOML."""
    # JSON is valid TOML here, except for one character that JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
