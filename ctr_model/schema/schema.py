"""The schema: dense columns with their scaling, slots in order, and the names of columns beside features.

A schema is part of a model, since keys depend on the order of slots and inputs on the scaling. Checkpoints
contain it (`to_dict`), and its `fingerprint` is compared before training resumes.
"""

import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.features import HASH_VERSION
from ctr_ps.ctr_model.schema.dense_column import (
    FLOAT32_MAX,
    DenseColumn,
    DenseScaling,
    SchemaError,
    list_entry,
    refuse_duplicates,
    refuse_unknown_keys,
    table_entry,
    text_entry,
)

_NAMES = ("label", "weight", "id")  # entries that name a column beside the features

_BEYOND_FLOAT32 = FLOAT32_MAX + 2.0**103  # the smallest number that float32 rounds to infinity

_PACKAGED = resources.files("ctr_ps.ctr_model.schema") / "schemas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of an example in the order of the data: dense columns, then slots."""

    dense: tuple[DenseColumn, ...]
    slots: tuple[str, ...]
    hash_version: int = HASH_VERSION  # version of the feature hash
    # by slot name, the slot whose keys it shares: equal values have the same key
    shares: Mapping[str, str] = field(default_factory=dict, hash=False)
    # by slot name, the separator of the values in its text; a slot without one has one value there
    split: Mapping[str, str] = field(default_factory=dict, hash=False)
    # name of the label's column; None: each format finds it by its place or a usual name
    label: str | None = None
    # names of further labels, for models of several tasks; only with `label`. In a file both are
    # the list `labels`.
    other_labels: tuple[str, ...] = ()
    # name of the column of sample weights; None: every example has weight 1
    weight: str | None = None
    id: str | None = None  # name of the column of ids of predictions; None: no ids
    # whether the columns of labels and weight are optional, and `id` is read. A setting of a reader
    # like `group`, not part of a schema file or the fingerprint.
    is_for_prediction: bool = field(default=False, repr=False, compare=False)
    # name of the column that groups the examples of an evaluation; None: none
    group: str | None = field(default=None, repr=False, compare=False)
    # number of each slot in the feature hash: its position, from 1, or that of the slot in `shares`
    slot_numbers: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _scaling: DenseScaling = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.hash_version != HASH_VERSION:
            raise SchemaError(
                f"the schema needs feature hash version {self.hash_version!r}, but this package has version "
                f"{HASH_VERSION}: use the release that wrote the schema"
            )
        if not self.slots:
            raise SchemaError("the schema has no slots: list at least one name under 'slots'")
        refuse_duplicates("dense column", (column.name for column in self.dense))
        refuse_duplicates("slot", self.slots)
        refuse_duplicates("label", self.labels)
        if self.other_labels and self.label is None:
            raise SchemaError("other_labels is set without label: give the first label, too")
        for label in self.labels:
            if {label, label.partition(">")[0].rstrip()} & {*self.features}:
                raise SchemaError(
                    f"column {label!r} is the label and a feature, so the model would read what it "
                    "predicts: remove it from 'dense' and 'slots'"
                )
        if self.weight is not None and self.weight in (*self.labels, *self.features):
            raise SchemaError(
                f"column {self.weight!r} is the weight and also a label or feature: name another column"
            )
        if self.id is not None and self.id in (*self.labels, self.weight):
            raise SchemaError(
                f"column {self.id!r} is the id and also the label or weight: name another column"
            )
        # A frozen dataclass.
        object.__setattr__(self, "shares", dict(self.shares))
        object.__setattr__(self, "split", dict(self.split))
        object.__setattr__(self, "slot_numbers", tuple(map(self._slot_number, self.slots)))
        object.__setattr__(self, "_scaling", DenseScaling(self.dense))
        for entry in ("shares", "split"):
            for slot in getattr(self, entry):
                self.slot_index(slot, where=entry)  # it exists
                text_entry(f"{entry}.{slot}", getattr(self, entry)[slot])

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Returns a packaged schema by name ("criteo"), or that in a file; SchemaError without either."""
        packaged = {entry.name.removesuffix(".toml"): entry for entry in _PACKAGED.iterdir()}
        if str(source) in packaged:
            return cls.from_dict(tomllib.loads(packaged[str(source)].read_text(encoding="utf-8")))
        path = Path(os.path.expanduser(source))  # noqa: PTH111 (its other form fails without a home)
        if not path.exists():
            raise SchemaError(
                f"no schema {str(source)!r}: it is neither a file nor one of the packaged schemas "
                f"{', '.join(sorted(packaged))}"
            )
        return cls.from_toml(path)

    @classmethod
    def numbered(cls, num_dense: int, num_slots: int) -> Self:
        """Returns a schema with dense columns I1, I2, ... and slots C1, C2, ..."""
        return cls(
            dense=tuple(DenseColumn(name=f"I{i}") for i in range(1, num_dense + 1)),
            slots=tuple(f"C{i}" for i in range(1, num_slots + 1)),
        )

    @classmethod
    def from_toml(cls, path: Path) -> Self:
        """Returns the schema in a TOML file; raises SchemaError."""
        try:
            return cls.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise SchemaError(f"cannot read schema {str(path)!r}: {error.strerror}") from error
        except ValueError as error:  # invalid UTF-8 or TOML, or a SchemaError
            raise SchemaError(f"schema {str(path)!r}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Self:
        """Returns the schema that `to_dict` wrote; defaults may be omitted. Raises SchemaError."""
        if not isinstance(data, Mapping):
            raise SchemaError(f"the schema is {data!r}, expected a mapping")
        known = ("dense", "slots", "shares", "split", "hash_version", "labels", *_NAMES)
        refuse_unknown_keys("schema", data, known)
        hash_version = data.get("hash_version")
        if type(hash_version) is not int:  # excludes bool
            raise SchemaError(
                f"schema: hash_version is {hash_version!r}, expected a whole number: a new schema says "
                f"hash_version = {HASH_VERSION}"
            )
        label, other_labels = _labels(data)
        return cls(
            dense=tuple(
                column
                for entry in list_entry("schema: dense", data.get("dense", []))
                for column in DenseColumn.list_from_dict(entry)
            ),
            slots=tuple(
                text_entry("slots", name)
                for name in list_entry("schema: slots", data.get("slots", []))
            ),
            hash_version=hash_version,
            shares=_texts_by_slot("shares", data),
            split=_texts_by_slot("split", data),
            label=label,
            other_labels=other_labels,
            weight=_optional_name("weight", data),
            id=_optional_name("id", data),
        )

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON, TOML and `from_dict`, without unused entries."""
        # Their absence keeps the fingerprint of schemas from before there were such entries.
        return {
            "hash_version": self.hash_version,
            **self._names(),
            "slots": list(self.slots),
            **({"shares": dict(self.shares)} if self.shares else {}),
            **({"split": dict(self.split)} if self.split else {}),
            "dense": [column.to_dict() for column in self.dense],
        }

    def to_toml(self, comments: Mapping[str, str] | None = None) -> str:
        """Returns a schema file for `from_toml`, with one-line comments by column name."""
        noted = {name: f"  # {comment}" for name, comment in (comments or {}).items()}
        lines = [f"hash_version = {self.hash_version}"]
        lines += [
            f"{key} = {_toml(name)}{noted.get(str(name), '')}"
            for key, name in self._names().items()
        ]
        lines += ["", "slots = ["]
        lines += [f"    {_toml(name)},{noted.get(name, '')}" for name in self.slots]
        lines += ["]", ""]
        for key, texts in (("shares", self.shares), ("split", self.split)):
            if texts:
                pairs = (f"{_toml(slot)} = {_toml(text)}" for slot, text in texts.items())
                lines += [f"{key} = {{ {', '.join(pairs)} }}", ""]
        lines += ["dense = ["]
        entries = [column.to_dict() for column in self.dense]
        for base, width in self.vectors.items():
            first = next(i for i, entry in enumerate(entries) if entry["name"] == f"{base}[0]")
            parts = [{**entries[first], "name": f"{base}[{i}]"} for i in range(width)]
            if entries[first : first + width] == parts:  # else they differ in more than their place
                entries[first : first + width] = [{**entries[first], "name": base, "width": width}]
        for entry in entries:
            pairs = (f"{key} = {_toml(value)}" for key, value in entry.items())
            lines.append(f"    {{ {', '.join(pairs)} }},{noted.get(str(entry['name']), '')}")
        return "\n".join([*lines, "]", ""])

    def _names(self) -> dict[str, object]:
        names = {key: getattr(self, key) for key in _NAMES}
        if self.other_labels:
            names = {"labels": list(self.labels), **names, "label": None}
        return {key: name for key, name in names.items() if name is not None}

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels' columns; empty: one label without a name."""
        return () if self.label is None else (self.label, *self.other_labels)

    @property
    def required_row_columns(self) -> Mapping[str, tuple[str, ...]]:
        """By name in `ROW_COLUMNS`, the columns required in every file."""
        required: dict[str, tuple[str, ...]] = {"other_labels": self.other_labels}
        required["weights"] = () if self.weight is None else (self.weight,)
        if self.is_for_prediction:
            required = {"ids": () if self.id is None else (self.id,)}
        return {key: names for key, names in required.items() if names}

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the dense columns, then of the slots."""
        return (*(column.name for column in self.dense), *self.slots)

    @property
    def vectors(self) -> dict[str, int]:
        """Widths of the vectors among the dense columns, by name: those called `name[0]`, `name[1]`, ..."""
        found: dict[str, int] = {}
        for column in self.dense:
            name = column.name.removesuffix("]").rpartition("[")[0]
            if column.name == f"{name}[{found.get(name, 0)}]":
                found[name] = found.get(name, 0) + 1
        return found

    @property
    def num_dense(self) -> int:
        """Number of dense inputs of the model: the columns, then the missing indicators."""
        return self._scaling.width

    def inputs_of_dense(self, index: int) -> list[int]:
        """Returns the dense inputs of column `index`: itself, and its missing indicator if any."""
        column = self.dense[index]
        if not column.missing_indicator:
            return [index]
        before = sum(each.missing_indicator for each in self.dense[:index])
        return [index, len(self.dense) + before]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the whole schema, in hex."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def slot_index(self, name: str, *, where: str = "") -> int:
        """Returns the index, from 0, of slot `name`; a SchemaError begins with `where`, names the nearest."""
        if name not in self.slots:
            nearest = difflib.get_close_matches(name, self.slots, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"only {', '.join(self.slots)}"
            prefix = f"{where}: " if where else ""
            raise SchemaError(f"{prefix}the schema has no slot {name!r}, {hint}")
        return self.slots.index(name)

    def _slot_number(self, name: str) -> int:
        target = self.shares.get(name, name)
        if target in self.shares:
            raise SchemaError(
                f"shares.{name} is {target!r}, which itself shares the keys of {self.shares[target]!r}: "
                f"write {self.shares[target]!r} instead"
            )
        try:
            return self.slot_index(target) + 1
        except SchemaError as error:
            raise SchemaError(f"shares.{name}: {error}") from error

    def scale_dense(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Scales the numbers float64[N, len(dense)] of N examples, nan where missing. Thread-safe.

        Returns float32[N, num_dense]: the columns, then the missing indicators, both in the order of `dense`;
        infinite where the result is beyond float32 (`overflows`).
        """
        return self._scaling.scale(values)

    def overflows(self, values: NDArray[np.float64], inputs: NDArray[np.float32]) -> dict[int, str]:
        """Returns the fault of each row of `values` with a number beyond float32, as given or in `inputs`."""
        is_far = (values >= _BEYOND_FLOAT32) | (values <= -_BEYOND_FLOAT32)
        if np.isfinite(inputs).all() and not is_far.any():
            return {}
        faults: dict[int, str] = {}
        is_beyond = is_far | (~np.isfinite(inputs[:, : len(self.dense)]) & ~np.isnan(values))
        for row, column in np.argwhere(is_beyond).tolist():
            name, value = self.dense[column].name, float(values[row, column])
            scaled = "" if is_far[row, column] else "scaled as the schema says, "
            faults.setdefault(
                row, f"column {name!r} is {value!r}, {scaled}beyond the range of float32"
            )
        return faults


def criteo_schema() -> Schema:
    """Returns the schema of Criteo's click logs: counts I1..I13 and slots C1..C26."""
    return Schema.load("criteo")


def _labels(data: Mapping[str, object]) -> tuple[str | None, tuple[str, ...]]:
    if data.get("labels") is None:
        return _optional_name("label", data), ()
    if data.get("label") is not None:
        raise SchemaError("schema: 'label' and 'labels' are both set: list all labels in 'labels'")
    names = [text_entry("labels", name) for name in list_entry("schema: labels", data["labels"])]
    if not names:
        raise SchemaError("schema: labels is empty, expected the names of the labels' columns")
    return names[0], tuple(names[1:])


def _texts_by_slot(key: str, data: Mapping[str, object]) -> dict[str, str]:
    entries = table_entry(f"schema: {key}", data.get(key, {}))
    return {slot: text_entry(f"{key}.{slot}", text) for slot, text in entries.items()}


def _optional_name(key: str, data: Mapping[str, object]) -> str | None:
    return None if data.get(key) is None else text_entry(key, data[key])


def _toml(value: object) -> str:
    # JSON is valid TOML here, except for one character that JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
