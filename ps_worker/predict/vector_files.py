"""Files of vectors by value, for and from other programs: Parquet, npy with a list of values, word2vec text.

    parquet    columns value (text), key (uint64), vector (fixed-size list of float32)
    npy        a matrix float32[N, D], and beside it N lines of values
    word2vec   "N D", then a line each: the value, D numbers

npy and word2vec begin with N, which is known at the end only: their vectors wait in a temporary file, so that
memory does not depend on N, and storage that cannot go back in a file will do.

A word of word2vec text ends at any blank or line break that a reader may know: these, and %, are written as
in a URL, so that urllib.parse.unquote gives the value back; the empty value, which is no word, is left out.
Values are text here, and different ones are different texts: bytes that are not UTF-8 are escapes, which have
no blanks, and a backslash is two.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.keys import Keys
from ctr_ps.ps_server.checkpoint.storage.folders import Folder

VectorFormat = Literal["parquet", "npy", "word2vec"]

_SUFFIXES: Mapping[VectorFormat, Sequence[str]] = {
    "parquet": (".parquet",),
    "npy": (".npy", ".values.txt"),
    "word2vec": (".word2vec.txt",),
}
_COPY_BYTES = 1 << 20
_BREAKS_A_WORD = re.compile(r"[\s%]")
_ESCAPE = re.compile(rb"\\(\\|x[0-9a-f]{2})")


WriteVectors = Callable[[Sequence[str], Keys, Values], int]
"""Writes N values with their keys uint64[N] and vectors float32[N, D].

Returns how many were written: those that the format can hold.
"""


def vector_file_names(name: str, kind: VectorFormat) -> list[str]:
    """Returns the names of the files for `name`, whose unusual characters become underscores."""
    return [re.sub(r"[^\w.-]", "_", name) + suffix for suffix in _SUFFIXES[kind]]


@contextmanager
def vectors_to(folder: Folder, name: str, dim: int, kind: VectorFormat) -> Iterator[WriteVectors]:
    """Creates the files `vector_file_names` in a folder; they are complete when the block ends.

    An error in the block removes them. Raises UsageError if one of them exists, CheckpointError if one cannot
    be written.
    """
    files = vector_file_names(name, kind)
    for file in files:
        if folder.has(file):
            raise UsageError(f"{folder.url}/{file} exists: remove it, or export elsewhere")
    try:
        with _WRITERS[kind](folder, files, dim) as write:
            yield write
    except BaseException:
        for file in files:
            folder.remove_file(file)
        raise


@dataclass(frozen=True, slots=True)
class Vectors:
    """The content of a file."""

    vectors: Values  # float32[N, D]
    keys: Keys | None = None  # uint64[N]; None: it has values alone
    values: Sequence[bytes] | None = None  # N of them; None: it has keys alone


def vectors_in(file: str) -> Vectors:
    """Reads a file of vectors; its kind is told by its suffix, .parquet, .npy or .txt.

    Parquet has a column `key` or `value`, and `vector` (or `weights`); beside NAME.npy are its keys in
    NAME.keys.npy, or its values in NAME.values.txt. Raises DataError if it cannot be read, or is none.
    """
    suffix = Path(file).suffix
    if suffix not in _READERS:
        raise DataError(f"{file} is not a file of vectors, expected {', '.join(_READERS)}")
    try:
        with np.errstate(over="ignore"):  # what is too large for a float32 is refused below
            read = _READERS[suffix](file)
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read as vectors: {error}") from error
    sizes = [len(names) for names in (read.keys, read.values) if names is not None]
    if read.vectors.ndim != 2 or set(sizes) != {len(read.vectors)}:
        raise DataError(
            f"{file} has vectors of shape {read.vectors.shape}, but the number of keys or values is "
            f"{' and '.join(map(str, sizes))}: give one vector for each"
        )
    if not np.isfinite(read.vectors).all():
        place = int(np.flatnonzero(~np.isfinite(read.vectors).all(axis=1))[0])
        raise DataError(f"{file}: vector {place} has infinite numbers or NaN")
    return read


def _read_parquet(file: str) -> Vectors:
    table = pq.read_table(file)
    name = next(name for name in ("vector", "weights") if name in table.column_names)
    lists = table[name].combine_chunks()
    if lists.null_count or lists.flatten().null_count or len(set(lists.value_lengths())) > 1:
        raise ValueError(f"column {name!r} has missing numbers, or lists of different lengths")
    vectors = lists.flatten().to_numpy().astype(np.float32).reshape(len(lists), -1)
    keys = values = None
    if "key" in table.column_names:
        keys = table["key"].cast(pa.uint64()).to_numpy()
    if "value" in table.column_names:
        values = [_value(each) for each in table["value"].to_pylist()]
    return Vectors(vectors, keys, values)


def _read_npy(file: str) -> Vectors:
    vectors = np.load(file, allow_pickle=False).astype(np.float32)
    stem = file.removesuffix(".npy")
    if Path(f"{stem}.keys.npy").is_file():
        keys = np.load(f"{stem}.keys.npy", allow_pickle=False)
        if keys.dtype != np.uint64 or keys.ndim != 1:
            raise ValueError(f"{stem}.keys.npy has {keys.dtype}{list(keys.shape)}, not uint64[N]")
        return Vectors(vectors, keys=keys)
    lines = Path(f"{stem}.values.txt").read_text(encoding="utf-8").split("\n")[:-1]
    return Vectors(vectors, values=[_value(each) for each in lines])


def _read_word2vec(file: str) -> Vectors:
    with Path(file).open(encoding="utf-8", newline="\n") as lines:
        num_words, dim = map(int, next(lines, "").split())
        words, rows = [], []
        for line in lines:
            word, *numbers = line.split()
            if len(numbers) != dim:
                raise ValueError(f"word {word!r} has {len(numbers)} numbers, expected {dim}")
            words.append(_value(unquote(word)))
            rows.append(np.array(numbers, np.float32))
    if len(words) != num_words:
        raise ValueError(f"it has {len(words)} words, but its header says {num_words}")
    return Vectors(np.array(rows, np.float32).reshape(len(rows), dim), values=words)


def _value(text: str) -> bytes:
    return _ESCAPE.sub(
        lambda found: b"\\" if found[1] == b"\\" else bytes([int(found[1][1:], 16)]), text.encode()
    )


_READERS: Mapping[str, Callable[[str], Vectors]] = {
    ".parquet": _read_parquet,
    ".npy": _read_npy,
    ".txt": _read_word2vec,
}


def text_of_value(value: bytes) -> str:
    """Returns a value as text, different from that of any other."""
    return value.replace(b"\\", rb"\\").decode(errors="backslashreplace")


@contextmanager
def _parquet(folder: Folder, files: Sequence[str], dim: int) -> Iterator[WriteVectors]:
    vector = pa.list_(pa.float32(), dim)
    schema = pa.schema([("value", pa.string()), ("key", pa.uint64()), ("vector", vector)])
    with folder.create(files[0]) as sink, pq.ParquetWriter(sink, schema) as writer:

        def write(values: Sequence[str], keys: Keys, vectors: Values) -> int:
            flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
            lists = pa.FixedSizeListArray.from_arrays(flat, dim)
            arrays = [pa.array(values, pa.string()), pa.array(keys), lists]
            writer.write_table(pa.table(arrays, schema=schema))
            return len(values)

        yield write


@contextmanager
def _npy(folder: Folder, files: Sequence[str], dim: int) -> Iterator[WriteVectors]:
    rows = 0
    with tempfile.TemporaryFile() as body:
        with folder.create(files[1]) as lines:

            def write(values: Sequence[str], keys: Keys, vectors: Values) -> int:
                nonlocal rows
                # Any break that a reader may know: a line too many would shift all values below.
                is_line = np.array([value.splitlines() in ([value], []) for value in values], bool)
                kept = [value for value, fits in zip(values, is_line, strict=True) if fits]
                body.write(np.ascontiguousarray(vectors[is_line], "<f4").tobytes())
                lines.write("".join(f"{value}\n" for value in kept).encode())
                rows += len(kept)
                return len(kept)

            yield write
        with folder.create(files[0]) as sink:
            header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
            np.lib.format.write_array_header_1_0(sink, header)
            _copy(body, sink)


@contextmanager
def _word2vec(folder: Folder, files: Sequence[str], dim: int) -> Iterator[WriteVectors]:
    rows = 0
    with tempfile.TemporaryFile() as body:

        def write(values: Sequence[str], keys: Keys, vectors: Values) -> int:
            nonlocal rows
            # astype(str) gives the fewest digits that parse to the same float32.
            pairs = zip(values, vectors.astype(str).tolist(), strict=True)
            lines = [f"{_word(value)} {' '.join(numbers)}\n" for value, numbers in pairs if value]
            body.write("".join(lines).encode())
            rows += len(lines)
            return len(lines)

        yield write
        with folder.create(files[0]) as sink:
            sink.write(f"{rows} {dim}\n".encode())
            _copy(body, sink)


def _word(value: str) -> str:
    """Returns a value as one word: blanks and % as in a URL, so that different values stay different."""
    return _BREAKS_A_WORD.sub(
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), value
    )


def _copy(body: IO[bytes], sink: pa.NativeFile) -> None:
    body.seek(0)
    shutil.copyfileobj(body, sink, _COPY_BYTES)


_Open = Callable[[Folder, Sequence[str], int], AbstractContextManager[WriteVectors]]
_WRITERS: Mapping[VectorFormat, _Open] = {
    "parquet": _parquet,
    "npy": _npy,
    "word2vec": _word2vec,
}
