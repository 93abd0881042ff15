"""Registry of file formats, by name and by suffix."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import PurePath

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError, UsageError, did_you_mean
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Reader
from ctr_ps.ps_worker.data.files.content import CODECS, open_content, suffix_of
from ctr_ps.ps_worker.data.files.file_split import SplitFile
from ctr_ps.ps_worker.data.slot_values import Kind, SlotValues

MakeReader = Callable[[Schema, BadRows], Reader]
Format = str | MakeReader
"""The name of a format in `FORMATS`, or a factory of custom readers."""

DEFAULT = "criteo"

_HEAD_BYTES = 4096
_NAME = re.compile(r'"?[^\W\d][^,\t;|"]*"?')


@dataclass(frozen=True, slots=True)
class _Traits:
    """What there is to know of a format before a file is opened."""

    reader: str  # its class in this package, imported on use: some import large packages
    suffixes: tuple[str, ...]
    kinds: tuple[Kind, ...] = ("text",)  # of slot values; empty: they depend on the file
    has_names: bool = False  # columns are found by their names
    is_text: bool = True


_named = partial(_Traits, kinds=(), has_names=True)
_columnar = partial(_named, is_text=False)
_FORMATS = {
    "criteo": _Traits("text.criteo.CriteoReader", (".tsv",)),
    "csv": _named("text.csv_text.CsvReader", (".csv",), kinds=("text",)),
    "parquet": _columnar("columnar.parquet_orc.ParquetReader", (".parquet",)),
    "orc": _columnar("columnar.parquet_orc.OrcReader", (".orc",)),
    "json": _named("text.json_lines.JsonReader", (".jsonl", ".ndjson", ".json")),
    "arrow": _columnar("columnar.parquet_orc.ArrowReader", (".arrow", ".feather", ".ipc")),
    "libsvm": _Traits("text.svm.LibsvmReader", (".svm", ".libsvm"), ("text", "lists")),
    "libffm": _Traits("text.svm.LibffmReader", (".ffm", ".libffm")),
    "paddlerec": _named(
        "text.slot_text.SlotTextReader", (".paddlerec",), kinds=("integers", "text", "lists")
    ),
    "multislot": _Traits("text.multislot.MultiSlotReader", (".multislot",), ("keys", "lists")),
}

FORMATS = tuple(_FORMATS)

NAMED = tuple(name for name, traits in _FORMATS.items() if traits.has_names)
"""Formats of files with named columns."""

SUFFIXES = {suffix: name for name, traits in _FORMATS.items() for suffix in traits.suffixes}
"""Formats by suffix, before that of the compression; any other suffix means `DEFAULT`."""


def reader_of(path: str, schema: Schema, bad_rows: BadRows, format: Format | None = None) -> Reader:
    """Returns a reader of a file, not opened; `format` None: by the suffix. UsageError if none fits."""
    if format is None:
        format = format_of(path)
    if not isinstance(format, str):
        return format(schema, bad_rows)
    require_format(format)
    if schema.split and format not in NAMED:
        raise UsageError(
            f"the schema splits the text of {', '.join(map(repr, schema.split))}, but files of format "
            f"{format!r} have none to split: use a format with names of columns, or a generator "
            "(docs/data.md)"
        )
    module, _, kind = _FORMATS[format].reader.rpartition(".")
    reader: Reader = getattr(import_module(f"{__package__}.{module}"), kind)(schema, bad_rows)
    return reader


def splitter(schema: Schema, format: Format | None = None) -> SplitFile:
    """Returns what splits files of a format, without reading a row of them."""
    return lambda path, num_splits: reader_of(path, schema, BadRows(), format).splits(
        path, num_splits
    )


def format_of(path: str) -> str:
    """Returns the format of a file's suffix."""
    return SUFFIXES.get(suffix_of(without_codec(path)), DEFAULT)


def doubt_about(path: str, format: Format | None) -> str:
    """Returns the doubt about reading a file in the default format; "" without any.

    Raises DataError if the file cannot be read, or has an unknown suffix and is no text.
    """
    suffix = suffix_of(without_codec(path))
    if format is not None or suffix in SUFFIXES:
        return ""
    name = f"{suffix!r} is not a known suffix" if suffix else "its name has no suffix"
    fault = f"{name} ({', '.join(SUFFIXES)})"
    text = _start_of(path)
    if suffix and b"\0" in text:
        raise DataError(
            f"{path}: {fault}, and its content is not text: convert it to a format with one of these suffixes"
        )
    return f"{fault}{header_hint(path)}"


def doubt_about_rows(path: str, format: Format | None) -> str:
    """Returns why all rows of a file may be malformed, to end a message; "" if nothing tells."""
    if doubt := doubt_about(path, format):
        return f"; {doubt}"
    return header_hint(path) if format is None and format_of(path) == DEFAULT else ""


def guessed_format(path: str) -> str | None:
    """Returns the format of text that has its names in each line, by the first one; None: by the suffix."""
    words = _start_of(path).partition(b"\n")[0].split() if format_of(path) == DEFAULT else []
    is_slot_text = len(words) > 1 and all(0 < word.find(b":") < len(word) - 1 for word in words)
    return "paddlerec" if is_slot_text else None


def header_hint(path: str) -> str:
    """Returns that a file of text seems to have a header, to end a message; "" if not."""
    if guess := guessed_format(path):
        return f"; its first line has words of name:value: --format {guess}, of a job data.format"
    line = _start_of(path).partition(b"\n")[0].decode(errors="replace")
    names = re.split(r"[,\t;|]", line.strip())
    is_header = len(names) > 1 and all(_NAME.fullmatch(name) for name in names)
    what = "looks like a header" if is_header else "has commas"
    if not is_header and line.count(",") <= line.count("\t"):
        return ""
    return f"; its first line {what}: --format csv, of a job data.format"


def _start_of(path: str) -> bytes:
    head = bytearray(_HEAD_BYTES)
    with open_content(path) as content:
        return bytes(head[: content.readinto(memoryview(head))])


def without_codec(path: str) -> str:
    """Returns a file's name without its folder and the suffix of its compression."""
    name = PurePath(path)
    return name.stem if suffix_of(name) in CODECS else name.name


def values_of_files(files: Sequence[str], schema: Schema, format: Format | None) -> SlotValues:
    """Returns the kinds of slot values in files, by the first of each format, or from a custom reader."""
    found, first = SlotValues(), dict[str, str]()
    if callable(format):
        return getattr(format(schema, BadRows()), "slot_values", found)
    for path in files:
        first.setdefault(format or format_of(path), path)
    for name, path in first.items():
        if kinds := _FORMATS[name].kinds:
            found.merge(SlotValues(dict.fromkeys(schema.slots, kinds)))
            found.merge(SlotValues(dict.fromkeys(schema.split, ("lists",))))
            continue
        from ctr_ps.ps_worker.data.columnar.column_matching import kinds_of_values
        from ctr_ps.ps_worker.data.columnar.record_batches import ColumnReader

        with suppress(DataError):  # readers report the faults of a file
            reader = reader_of(path, schema, BadRows(), name)
            assert isinstance(reader, ColumnReader)
            fields = reader.fields(path)
            slots = [slot for slot in schema.slots if slot in fields.names]
            found.merge(kinds_of_values(fields, slots, schema.split))
    for slot in schema.slots:
        if slot.endswith((".hour", ".weekday")):  # of a time, a whole number
            found.note(slot, "integers")
    return found


def values_of_messages(schema: Schema, format: str) -> SlotValues:
    """Returns the kinds of slot values in messages of a format: in JSON and Arrow text and whole numbers."""
    found = SlotValues(dict.fromkeys(schema.slots, _FORMATS[format].kinds or ("text", "integers")))
    found.merge(SlotValues(dict.fromkeys(schema.split, ("lists",))))
    return found


def has_byte_offsets(path: str, format: Format | None) -> bool:
    """Whether offsets of blocks in a file are in bytes of its content, as in text."""
    name = format_of(path) if format is None else format
    return isinstance(name, str) and _FORMATS[name].is_text


def has_named_columns(path: str, format: Format | None) -> bool:
    """Whether a file has named columns."""
    name = format_of(path) if format is None else format
    return name in NAMED


def require_format(name: str) -> None:
    """Raises a UsageError for an unknown format, with the nearest one and all."""
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS, likeness=0)
        raise UsageError(f"unknown format {name!r}{hint} Known formats: {', '.join(FORMATS)}")
