"""What the columns of the data are: dense numbers with their scaling, and slots with their order.

The schema is part of a model: another order of slots or another scaling is another model. So it
goes into checkpoints (`to_dict`), and two parties compare `fingerprint`s before they talk numbers.
"""

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from ctr_model.features import HASH_VERSION

Transform = Literal["none", "log1p"]

_PACKAGED = resources.files("ctr_model") / "schemas"


class SchemaError(ValueError):
    """A schema contradicts itself, cannot be read, or needs another version of this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """A number x of an example, which the model sees as (f(x) - shift) / scale.

    Attributes:
        name: Unique among the dense columns.
        transform: The function f; "none" is x, "log1p" is sign(x) * log(1 + |x|).
        shift: Min-max scaling has the minimum of f(x) here, standardisation the mean.
        scale: Min-max scaling has max - min of f(x) here, standardisation the deviation.
        missing: What the model sees when the number is missing; not scaled.
    """

    name: str
    transform: Transform = "none"
    shift: float = 0.0
    scale: float = 1.0
    missing: float = 0.0

    def __post_init__(self) -> None:
        """Refuses what could not be computed.

        Raises:
            SchemaError: Names the column and the value.
        """
        if self.transform not in get_args(Transform):
            raise SchemaError(
                f"dense column {self.name!r}: transform is {self.transform!r}, "
                f"expected one of {', '.join(get_args(Transform))}"
            )
        for name in ("shift", "scale", "missing"):
            if not math.isfinite(getattr(self, name)):
                raise SchemaError(
                    f"dense column {self.name!r}: {name} is {getattr(self, name)!r}, not finite"
                )
        if self.scale == 0:
            raise SchemaError(
                f"dense column {self.name!r}: scale is 0, and values are divided by it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of an example, in the order of the data: dense numbers first, then slots.

    Attributes:
        dense: Numbers, num_dense of them.
        slots: Names of the S slots; a slot's number in the feature hash is its position, from 1.
        hash_version: Of the feature hash under which the model's keys were made.
    """

    dense: tuple[DenseColumn, ...]
    slots: tuple[str, ...]
    hash_version: int = HASH_VERSION

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
        _refuse_duplicates("dense column", (column.name for column in self.dense))
        _refuse_duplicates("slot", self.slots)

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
        _refuse_unknown_keys("schema", data, cls)
        hash_version = data.get("hash_version")
        if type(hash_version) is not int:  # True is an int, too
            raise SchemaError(f"schema: hash_version is {hash_version!r}, expected a whole number")
        return cls(
            dense=tuple(_dense_column(entry) for entry in _list(data, "dense")),
            slots=tuple(_text("slots", name) for name in _list(data, "slots")),
            hash_version=hash_version,
        )

    def to_dict(self) -> dict[str, object]:
        """Returns plain values, as JSON and TOML know them, that `from_dict` reads back."""
        return {
            "hash_version": self.hash_version,
            "slots": list(self.slots),
            "dense": [
                {
                    "name": column.name,
                    "transform": column.transform,
                    "shift": float(column.shift),  # 1 and 1.0 are one fingerprint
                    "scale": float(column.scale),
                    "missing": float(column.missing),
                }
                for column in self.dense
            ],
        }

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
        """Returns what the model sees of the numbers of N examples.

        Args:
            values: float64[N, num_dense], as they stand in the data; nan is a missing number.

        Returns:
            float32[N, num_dense]
        """
        scaled = np.empty(values.shape, np.float32)
        for index, column in enumerate(self.dense):
            x = values[:, index]
            fx = np.copysign(np.log1p(np.abs(x)), x) if column.transform == "log1p" else x
            y = (fx - column.shift) / column.scale
            scaled[:, index] = np.where(np.isnan(y), column.missing, y)
        return scaled


def criteo_schema() -> Schema:
    """Returns the schema of Criteo's click logs: counts I1..I13 and slots C1..C26."""
    return Schema.load("criteo")


def _dense_column(entry: object) -> DenseColumn:
    if not isinstance(entry, Mapping):
        raise SchemaError(f"schema: a dense column is {entry!r}, expected a table with a name")
    _refuse_unknown_keys("dense column", entry, DenseColumn)
    name = _text("dense column: name", entry.get("name"))
    numbers = {key: entry[key] for key in ("shift", "scale", "missing") if key in entry}
    for key, number in numbers.items():
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise SchemaError(f"dense column {name!r}: {key} is {number!r}, expected a number")
    return DenseColumn(
        name=name,
        transform=entry.get("transform", "none"),
        **{key: float(number) for key, number in numbers.items()},
    )


def _list(data: Mapping[str, object], key: str) -> list[object]:
    entries = data.get(key)
    if not isinstance(entries, list | tuple):
        raise SchemaError(f"schema: {key} is {entries!r}, expected a list")
    return list(entries)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{where} is {value!r}, expected a text that is not empty")
    return value


def _refuse_duplicates(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SchemaError(f"{kind} {name!r} is listed twice; names must be unique")
        seen.add(name)


def _refuse_unknown_keys(
    where: str, data: Mapping[str, object], cls: type[Schema] | type[DenseColumn]
) -> None:
    known = [field.name for field in fields(cls)]
    for key in data:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise SchemaError(f"{where}: unknown key {key!r}, did you mean {nearest!r}?")
