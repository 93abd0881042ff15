"""Registry of file formats, by name and by suffix."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import PurePath

from ctr_model.schema import Schema
from protos.errors import DataError, UsageError, did_you_mean
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.blocks.reader import Reader
from ps_worker.data.files.content import CODECS, open_content, suffix_of
from ps_worker.data.slot_values import Kind, SlotValues

MakeReader = Callable[[Schema, BadRows], Reader]
Format = str | MakeReader
"""The name of a format in `FORMATS`, or a factory of custom readers."""

DEFAULT = "criteo"

_HEAD_BYTES = 4096

KINDS: dict[str, tuple[Kind, ...]] = {
    "criteo": ("text",),
    "csv": ("text",),
    "libsvm": ("text", "lists"),
    "libffm": ("text",),
    "multislot": ("keys", "lists"),
}
"""What the values of slots are, by format; of the others each file says it."""


def _criteo(schema: Schema, bad_rows: BadRows) -> Reader:
    from ps_worker.data.text.criteo import CriteoReader

    return CriteoReader(schema, bad_rows)


def _csv(schema: Schema, bad_rows: BadRows) -> Reader:
    from ps_worker.data.text.csv_text import CsvReader

    return CsvReader(schema, bad_rows)


def _parquet(schema: Schema, bad_rows: BadRows) -> Reader:
    from ps_worker.data.columnar.parquet import ParquetReader

    return ParquetReader(schema, bad_rows)


def _orc(schema: Schema, bad_rows: BadRows) -> Reader:
    from ps_worker.data.columnar.orc import OrcReader

    return OrcReader(schema, bad_rows)


def _libsvm(schema: Schema, bad_rows: BadRows) -> Reader:
    from ps_worker.data.text.svm import LibsvmReader

    return LibsvmReader(schema, bad_rows)


def _libffm(schema: Schema, bad_rows: BadRows) -> Reader:
    from ps_worker.data.text.svm import LibffmReader

    return LibffmReader(schema, bad_rows)


def _multislot(schema: Schema, bad_rows: BadRows) -> Reader:
    from ps_worker.data.text.multislot import MultiSlotReader

    return MultiSlotReader(schema, bad_rows)


# Readers are imported on use, as some import large packages.
FORMATS: dict[str, MakeReader] = {
    "criteo": _criteo,
    "csv": _csv,
    "parquet": _parquet,
    "orc": _orc,
    "libsvm": _libsvm,
    "libffm": _libffm,
    "multislot": _multislot,
}

SUFFIXES: dict[str, str] = {
    ".tsv": "criteo",
    ".csv": "csv",
    ".parquet": "parquet",
    ".orc": "orc",
    ".svm": "libsvm",
    ".libsvm": "libsvm",
    ".ffm": "libffm",
    ".libffm": "libffm",
    ".multislot": "multislot",
}
"""Formats by suffix, before that of the compression; any other suffix means `DEFAULT`."""


def reader_of(path: str, schema: Schema, bad_rows: BadRows, format: Format | None = None) -> Reader:
    """Returns a reader for a file, which is not opened; its suffix is its format, unless one is given.

    Raises:
        UsageError: If the format is unknown; names the nearest.
    """
    if format is None:
        format = format_of(path)
    if isinstance(format, str):
        require_format(format)
        format = FORMATS[format]
    return format(schema, bad_rows)


def format_of(path: str) -> str:
    """Returns the format that a file's suffix stands for."""
    return SUFFIXES.get(suffix_of(without_codec(path)), DEFAULT)


def doubt_about(path: str, format: Format | None) -> str:
    """Returns why a file may not be of the default format, as which it is read; "" where it is known to be.

    Raises:
        DataError: If the file cannot be read, or has an unknown suffix and is no text.
    """
    suffix = suffix_of(without_codec(path))
    if format is not None or suffix in SUFFIXES:
        return ""
    name = f"{suffix!r} is no known suffix" if suffix else "its name has no suffix"
    fault = f"{name} ({', '.join(SUFFIXES)})"
    head = bytearray(_HEAD_BYTES)
    with open_content(path) as content:
        text = bytes(head[: content.readinto(memoryview(head))])
    if suffix and b"\0" in text:
        raise DataError(
            f"{path}: {fault}, and it is no text: write its rows in one of these formats"
        )
    line = text.partition(b"\n")[0]
    has_commas = line.count(b",") > line.count(b"\t")
    hint = "; its first line has commas: --format csv, of a job data.format" if has_commas else ""
    return f"{fault}{hint}"


def without_codec(path: str) -> str:
    """Returns the name of a file without its folder, and without the suffix of its compression."""
    name = PurePath(path)
    return name.stem if suffix_of(name) in CODECS else name.name


def values_of_files(files: Sequence[str], schema: Schema, format: Format | None) -> SlotValues:
    """Returns what the values of slots are in files, by the first of each format, or as a custom reader says.

    Args:
        files: Of which some may not be there: nothing is known of their values then.
        schema: Has the slots.
        format: None: determined by the suffix.
    """
    found, first = SlotValues(), dict[str, str]()
    if callable(format):
        return getattr(format(schema, BadRows()), "slot_values", found)
    for path in files:
        first.setdefault(format or format_of(path), path)
    for name, path in first.items():
        if name in KINDS:
            found.merge(SlotValues(dict.fromkeys(schema.slots, KINDS[name])))
            continue
        from ps_worker.data.columnar.column_matching import kinds_of_values
        from ps_worker.data.columnar.open_file import fields_of

        with suppress(DataError, KeyError):  # what is wrong with a file, its readers say
            found.merge(kinds_of_values(fields_of(path, name), schema.slots))
    return found


def has_byte_offsets(path: str, format: Format | None) -> bool:
    """Whether blocks of a file begin at offsets in bytes of its content, as those of text do."""
    name = format_of(path) if format is None else format
    return isinstance(name, str) and name not in ("parquet", "orc")


def has_named_columns(path: str, format: Format | None) -> bool:
    """Whether a file has any number of columns, with names."""
    name = format_of(path) if format is None else format
    return name in ("csv", "parquet", "orc")


def require_format(name: str) -> None:
    """Checks the name of a format.

    Raises:
        UsageError: If it is unknown; names the nearest one, and all.
    """
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS)
        raise UsageError(f"unknown format {name!r}{hint} Known formats: {', '.join(FORMATS)}")
