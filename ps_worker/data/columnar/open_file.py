"""Opening of columnar files, which need random access."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from protos.errors import DataError
from ps_worker.data.files.listing import is_url, open_file


@contextmanager
def open_columnar(path: str, format_name: str) -> Iterator[pa.NativeFile]:
    """Opens a file for random access; translates Arrow's errors inside the `with` block.

    Raises:
        DataError: Names the file if it cannot be read, or is not a valid file of its format.
    """
    try:
        with pa.PythonFile(open_file(path), "r") if is_url(path) else pa.OSFile(path) as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"cannot read {path!r}: No such file or directory") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a valid {format_name} file, or it cannot be read: copy or write it again ({error})"
        ) from error


def fields_of(path: str, format: str) -> pa.Schema:
    """Returns the columns of a file of format "parquet" or "orc", with its metadata.

    Raises:
        DataError: See `open_columnar`.
    """
    with open_columnar(path, format.capitalize()) as source:
        return (
            pq.ParquetFile(source).schema_arrow
            if format == "parquet"
            else orc.ORCFile(source).schema
        )
