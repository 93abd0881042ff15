"""Generation of files of synthetic click logs, with a report of the best possible metrics.

    FOLDER/train/part-000.tsv ...    FOLDER/test/part-000.tsv ...    FOLDER/schema.toml    FOLDER/planted.json

The report is written last, so its presence means that the files are complete.
"""

import io
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from ctr_ps.protos.errors import DataError, UsageError, counted
from ctr_ps.ps_worker.data.files.content import atomic_file
from ctr_ps.ps_worker.extras.data_tools.planted import NUM_SLOTS, ZIPF_EXPONENT, PlantedModel

MIN_TEST_ROWS = 100

_CHUNK_ROWS = 20_000
_MAX_ZIPF_EXPONENT = 10.0  # practically all rows have the first value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedReport:
    """Sizes, and the best possible metrics on the test rows.

    Attributes:
        rows: Training rows.
        test_rows: Test rows.
        seed: Seed of the true model and the rows.
        click_rate: Share of clicks in the test rows.
        best_auc: AUC of the true probabilities on the test rows.
        best_log_loss: Log loss (natural logarithm) of the true probabilities on the test rows.
    """

    rows: int
    test_rows: int
    seed: int
    click_rate: float
    best_auc: float
    best_log_loss: float


def generate(
    folder: Path,
    *,
    rows: int,
    test_rows: int,
    files: int,
    test_files: int,
    seed: int,
    num_slots: int = NUM_SLOTS,
    zipf_exponent: float = ZIPF_EXPONENT,
) -> PlantedReport:
    """Writes synthetic rows to `folder`, replacing those of an earlier call.

    The output is deterministic; the training rows do not depend on the number of test rows.

    Raises:
        UsageError: If a file would have no rows, there are too few test rows or slots, the exponent is
            negative or too large, or the folder has data that this function did not write.
        DataError: If the folder cannot be written to.
    """
    if not 1 <= files <= rows or not 1 <= test_files <= test_rows:
        raise UsageError(
            f"cannot distribute {counted(rows, 'row')} over {counted(files, 'file')} and "
            f"{counted(test_rows, 'test row')} over {test_files}: every file needs at least one row"
        )
    if test_rows < MIN_TEST_ROWS:
        raise UsageError(f"test_rows is {test_rows}, expected at least {MIN_TEST_ROWS}")
    if num_slots < 1 or not 0 <= zipf_exponent <= _MAX_ZIPF_EXPONENT:
        raise UsageError(
            f"slots is {num_slots} and zipf is {zipf_exponent}, expected at least 1 slot and an exponent "
            f"from 0 to {_MAX_ZIPF_EXPONENT:.0f}"
        )
    model = PlantedModel(seed, num_slots=num_slots, zipf_exponent=zipf_exponent)
    report_path = folder / "planted.json"
    try:
        _refuse_files_of_others(folder, is_own=report_path.exists())
        folder.mkdir(parents=True, exist_ok=True)
        report_path.write_bytes(b"")  # says that the folder is ours, until the report is written
        _write_files(folder / "train", model, [seed, 1], rows, files)
        clicks, probabilities = _write_files(
            folder / "test", model, [seed, 2], test_rows, test_files
        )
        report = PlantedReport(
            rows=rows,
            test_rows=test_rows,
            seed=seed,
            click_rate=float(clicks.mean()),
            best_auc=_auc(clicks, probabilities),
            best_log_loss=_log_loss(clicks, probabilities),
        )
        with atomic_file(folder / "schema.toml") as file:
            file.write(model.schema.to_toml().encode())
        with atomic_file(report_path) as file:
            file.write(json.dumps(asdict(report), indent=2).encode() + b"\n")
    except OSError as error:
        raise DataError(f"cannot write to {str(folder)!r}: {error}") from error
    return report


def _refuse_files_of_others(folder: Path, *, is_own: bool) -> None:
    """Raises UsageError if the folder has data that no earlier call wrote."""
    for path in sorted(folder.glob("t*/part-*")):
        if not is_own or not re.fullmatch(r"part-\d{3,}\.tsv", path.name):
            raise UsageError(
                f"{str(path)!r} was not written by this command, which replaces only files of its own: give "
                f"an empty folder"
            )


def _write_files(
    folder: Path, model: PlantedModel, seed: list[int], num_rows: int, num_files: int
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Writes the rows evenly to the files; returns their clicks and true probabilities."""
    folder.mkdir(exist_ok=True)
    for stale in folder.glob("part-*.tsv"):
        stale.unlink()
    clicks, probabilities = [], []
    for index in range(num_files):
        rng = np.random.default_rng([*seed, index])
        left = num_rows * (index + 1) // num_files - num_rows * index // num_files
        with atomic_file(folder / f"part-{index:03d}.tsv") as file:
            while left:
                rows = model.draw(rng, min(left, _CHUNK_ROWS))
                left -= len(rows.clicks)
                clicks.append(rows.clicks)
                probabilities.append(rows.probabilities)
                file.write(criteo_text(rows.clicks, rows.numbers, rows.values))
    return np.concatenate(clicks), np.concatenate(probabilities)


def criteo_text(
    clicks: NDArray[np.bool_], numbers: NDArray[np.float64], values: NDArray[np.int64]
) -> bytes:
    r"""Returns R rows as text: label, numbers, values, separated by "\t" and terminated by "\n".

    Args:
        clicks: bool[R], the labels.
        numbers: float64[R, num_dense], whole numbers in [0, 2^63); nan is missing, an empty field.
        values: int64[R, S], below 2^32, written as 8 hex digits; -1 is missing.
    """
    columns = [pa.array(clicks.astype(np.int8))]
    columns += [pa.array(each, from_pandas=True).cast(pa.int64()) for each in numbers.T]
    digits = values.astype(">u4").tobytes().hex().encode()
    texts = np.frombuffer(digits, "S8").reshape(values.shape)
    columns += [
        pa.array(texts[:, slot], mask=values[:, slot] < 0).cast(pa.string())
        for slot in range(values.shape[1])
    ]
    table = pa.table(columns, names=[str(number) for number in range(len(columns))])
    text = io.BytesIO()
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    csv.write_csv(table, text, options)
    return text.getvalue()


def _auc(clicks: NDArray[np.bool_], probabilities: NDArray[np.float64]) -> float:
    """Returns the AUC, computed from the sum of ranks."""
    num_clicks = int(clicks.sum())
    ranks = np.flatnonzero(clicks[np.argsort(probabilities)]) + 1
    pairs = num_clicks * (len(clicks) - num_clicks)
    return float(ranks.sum() - num_clicks * (num_clicks + 1) / 2) / pairs


def _log_loss(clicks: NDArray[np.bool_], probabilities: NDArray[np.float64]) -> float:
    return float(-np.log(np.where(clicks, probabilities, 1 - probabilities)).mean())
