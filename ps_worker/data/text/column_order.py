"""Column order of multi-slot text and of a user's data generator, checked against the schema."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import UsageError, did_you_mean

DENSE_GROUP = "dense_input"
LABEL_NAMES = ("click", "label")


class Kind(Enum):
    """The kind of a column."""

    LABEL = auto()
    NUMBER = auto()
    NUMBERS = auto()
    SLOT = auto()


Column = tuple[Kind, int]


class ColumnOrder:
    """The columns of a row, checked against a schema."""

    def __init__(self, schema: Schema, names: Sequence[str] | None = None) -> None:
        """Checks the names in order.

        Args:
            schema: The columns that a row must have.
            names: "dense_input" for all dense columns together, or the name of each of them; the slots; and
                the label if rows have one: `schema.label`, or if that is None "click" or "label". None:
                "dense_input", if there are dense columns, the slots, the label.

        Raises:
            UsageError: Names an unknown, ambiguous, repeated or missing column.
        """
        if isinstance(names, str):
            raise UsageError(f"columns is {names!r}, expected a list of names")
        if names is None:
            names = (
                *([DENSE_GROUP] if schema.dense else []),
                *schema.slots,
                _label_names(schema)[0],
            )
        meanings = _meanings(schema)
        self.names = tuple(names)
        # kind and index of each: of a NUMBER the dense column, of a SLOT the slot, from 0
        self.columns = tuple(_only_meaning(name, meanings) for name in self.names)
        self.has_label = (Kind.LABEL, 0) in self.columns  # whether the label is among them
        _refuse_repeated(self.names, self.columns)
        _refuse_incomplete(self.columns, schema)


def _meanings(schema: Schema) -> Mapping[str, Sequence[Column]]:
    meanings: defaultdict[str, list[Column]] = defaultdict(list)
    for index, column in enumerate(schema.dense):
        meanings[column.name].append((Kind.NUMBER, index))
    for index, name in enumerate(schema.slots):
        meanings[name].append((Kind.SLOT, index))
    for name in _label_names(schema):
        meanings[name].append((Kind.LABEL, 0))
    if schema.dense:
        meanings[DENSE_GROUP].append((Kind.NUMBERS, 0))
    return dict(meanings)


def _label_names(schema: Schema) -> tuple[str, ...]:
    return LABEL_NAMES if schema.label is None else (schema.label,)


def _only_meaning(name: str, meanings: Mapping[str, Sequence[Column]]) -> Column:
    if name not in meanings:
        hint = did_you_mean(str(name), meanings)
        raise UsageError(f"columns has an unknown name {name!r}{hint}")
    if len(meanings[name]) > 1:
        kinds = " and a ".join(kind.name.lower() for kind, _ in meanings[name])
        raise UsageError(f"column {name!r} is both a {kinds}: rename it in the schema")
    return meanings[name][0]


def _refuse_repeated(names: Sequence[str], columns: Sequence[Column]) -> None:
    seen: dict[Column, str] = {}
    for name, column in zip(names, columns, strict=True):
        if column in seen:
            raise UsageError(f"columns has {seen[column]!r} and {name!r}, expected one of them")
        seen[column] = name
    single = [name for name, (kind, _) in zip(names, columns, strict=True) if kind is Kind.NUMBER]
    if single and (Kind.NUMBERS, 0) in seen:
        raise UsageError(f"columns has {DENSE_GROUP!r} and {single[0]!r}, which it includes")


def _refuse_incomplete(columns: Sequence[Column], schema: Schema) -> None:
    missing = [name for i, name in enumerate(schema.slots) if (Kind.SLOT, i) not in columns]
    if (Kind.NUMBERS, 0) not in columns:
        dense = enumerate(schema.dense)
        missing += [column.name for i, column in dense if (Kind.NUMBER, i) not in columns]
    if missing:
        raise UsageError(f"columns lacks {missing[0]!r}, expected every column of the schema")
