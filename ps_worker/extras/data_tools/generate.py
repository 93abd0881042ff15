"""Generation of files of synthetic click logs from a known model, with the best possible metrics.

    FOLDER/train/part-000.tsv ...    FOLDER/test/part-000.tsv ...    FOLDER/schema.toml    FOLDER/planted.json

The report is written last, so its presence means that the files are complete. Rows are in Criteo's layout. A
click is drawn with probability

    sigmoid(bias + gain * (sum over slots of weight[slot, value] + sum over numbers of weight * x))

where x is a number as `criteo_schema` scales it (0 where missing) and all weights are normal. Values follow
Zipf's law over vocabularies that grow geometrically from slot to slot, so there are slots of a few values and
slots with a long tail. Bias and gain are set so that for every seed the click rate is `CLICK_RATE` and the
standard deviation of the logit `LOGIT_DEVIATION`. Every model of clicks contains this linear one and none can
beat it, so its own AUC and log loss are the best possible.
"""

import io
import json
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from ctr_ps.ctr_model.metrics import auc_of_histograms
from ctr_ps.ctr_model.schema import criteo_schema
from ctr_ps.protos.errors import UsageError, counted
from ctr_ps.ps_worker.data.files.content import atomic_file, errors_of_writing, write_text

MIN_TEST_ROWS = 100
NUM_SLOTS = 26
ZIPF_EXPONENT = 1.1
CLICK_RATE = 0.22
LOGIT_DEVIATION = 1.5

_SMALLEST_VOCABULARY = 4
_LARGEST_VOCABULARY = 4_000
_MISSING_COLUMNS = 1 / 3  # share of the columns with missing values
_MOST_MISSING = 0.5  # largest share of missing values of such a column
_NUMBER_WEIGHT = 0.5  # standard deviation; 1 for the values of slots
_CALIBRATION_ROWS = 50_000
_CHUNK_ROWS = 20_000
_MAX_ZIPF_EXPONENT = 10.0  # practically all rows have the first value


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedReport:
    """Sizes, and the best possible metrics: those of the true probabilities of the test rows."""

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
    test_rows: int,  # at least `MIN_TEST_ROWS`
    files: int,
    test_files: int,
    seed: int,
    num_slots: int = NUM_SLOTS,
    zipf_exponent: float = ZIPF_EXPONENT,
) -> PlantedReport:
    """Writes synthetic rows to `folder`, replacing those of an earlier call.

    The output is deterministic; the training rows do not depend on the number of test rows.

    Raises:
        UsageError: If a file would have no rows, the exponent is negative or too large, or the folder has
            data that this function did not write.
        DataError: If the folder cannot be written to.
    """
    if not 1 <= files <= rows or not 1 <= test_files <= test_rows:
        raise UsageError(
            f"cannot distribute {counted(rows, 'row')} over {counted(files, 'file')} and "
            f"{counted(test_rows, 'test row')} over {counted(test_files, 'file')}: "
            "every file needs at least one row"
        )
    if not 0 <= zipf_exponent <= _MAX_ZIPF_EXPONENT:  # nor nan
        raise UsageError(f"zipf is {zipf_exponent}, expected 0 to {_MAX_ZIPF_EXPONENT:.0f}")
    model = PlantedModel(seed, num_slots=num_slots, zipf_exponent=zipf_exponent)
    report_path = folder / "planted.json"
    with errors_of_writing(folder):
        is_own = report_path.exists()
        for path in sorted(folder.glob("t*/part-*")):
            if not is_own or not re.fullmatch(r"part-\d{3,}\.tsv", path.name):
                raise UsageError(
                    f"{str(path)!r} was not written by this command, which replaces only files of its own: "
                    f"give an empty folder"
                )
        folder.mkdir(parents=True, exist_ok=True)
        report_path.write_bytes(b"")  # says that the folder is ours, until the report is written
        _write_files(folder / "train", model, [seed, 1], rows, files)
        clicks, probabilities = _write_files(
            folder / "test", model, [seed, 2], test_rows, test_files
        )
        by_prediction = clicks[np.argsort(probabilities)].astype(np.int64)
        report = PlantedReport(
            rows=rows,
            test_rows=test_rows,
            seed=seed,
            click_rate=float(clicks.mean()),
            best_auc=auc_of_histograms(by_prediction, 1 - by_prediction),
            best_log_loss=float(-np.log(np.where(clicks, probabilities, 1 - probabilities)).mean()),
        )
        write_text(folder / "schema.toml", model.schema.to_toml())
        write_text(report_path, f"{json.dumps(asdict(report), indent=2)}\n")
    return report


def _write_files(
    folder: Path, model: "PlantedModel", seed: list[int], num_rows: int, num_files: int
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedRows:
    """R rows and their click probabilities."""

    clicks: NDArray[np.bool_]  # bool[R]
    probabilities: NDArray[np.float64]  # float64[R], of a click
    numbers: NDArray[np.float64]  # float64[R, num_dense], whole numbers; nan is missing
    values: NDArray[np.int64]  # int64[R, S], 32 bits each; -1 is missing


@dataclass(frozen=True, slots=True)
class _Slot:
    """Distribution and weights of a slot's values."""

    cumulative: NDArray[np.float64]  # [V], cumulative probabilities
    values: NDArray[np.int64]  # [V]
    weights: NDArray[np.float64]  # [V]


class PlantedModel:
    """The true model for one seed, with the schema of its rows. Immutable."""

    def __init__(
        self, seed: int, *, num_slots: int = NUM_SLOTS, zipf_exponent: float = ZIPF_EXPONENT
    ) -> None:
        """Draws the weights, and computes bias and gain.

        Value k of a slot C1, C2, ..., from 1, has a probability proportional to k ** -zipf_exponent.
        """
        rng = np.random.default_rng([seed, 0])
        slots = tuple(f"C{slot}" for slot in range(1, num_slots + 1))
        self.schema = replace(criteo_schema(), slots=slots)
        num_dense = len(self.schema.dense)
        vocabularies = np.geomspace(_SMALLEST_VOCABULARY, _LARGEST_VOCABULARY, num_slots)
        self._slots = [
            _draw_slot(rng, round(vocabulary), zipf_exponent) for vocabulary in vocabularies
        ]
        self._missing_rates = np.array([_draw_missing_rate(rng) for _ in range(num_dense)])
        self._number_weights = rng.normal(0.0, _NUMBER_WEIGHT, num_dense)
        _, _, scores = self._draw_features(rng, _CALIBRATION_ROWS)
        self._gain = LOGIT_DEVIATION / scores.std()
        self._bias = _bias_for(self._gain * scores, CLICK_RATE)

    def draw(self, rng: np.random.Generator, num_rows: int) -> PlantedRows:
        """Returns `num_rows` new rows."""
        numbers, values, scores = self._draw_features(rng, num_rows)
        probabilities = _sigmoid(self._bias + self._gain * scores)
        return PlantedRows(
            clicks=rng.random(num_rows) < probabilities,
            probabilities=probabilities,
            numbers=numbers,
            values=values,
        )

    def _draw_features(
        self, rng: np.random.Generator, num_rows: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
        """Returns numbers, values and scores."""
        numbers = self._draw_numbers(rng, num_rows)
        scores = self.schema.scale_dense(numbers) @ self._number_weights
        values = np.empty((num_rows, len(self._slots)), np.int64)
        for index, slot in enumerate(self._slots):
            drawn = np.searchsorted(slot.cumulative, rng.random(num_rows))
            values[:, index] = slot.values[drawn]
            scores += slot.weights[drawn]
        return numbers, values, scores

    def _draw_numbers(self, rng: np.random.Generator, num_rows: int) -> NDArray[np.float64]:
        """Returns counts that the schema transforms to about the standard normal distribution."""
        shift = np.array([column.shift for column in self.schema.dense])
        scale = np.array([column.scale for column in self.schema.dense])
        logarithms = rng.normal(shift, scale, (num_rows, len(shift)))
        numbers = np.maximum(np.rint(np.expm1(logarithms)), 0.0)
        numbers[rng.random(numbers.shape) < self._missing_rates] = np.nan
        return numbers


def _draw_slot(rng: np.random.Generator, vocabulary: int, zipf_exponent: float) -> _Slot:
    missing = _draw_missing_rate(rng)
    probabilities = np.arange(1, vocabulary + 1) ** -zipf_exponent
    cumulative = np.cumsum(probabilities) * (1 - missing) / probabilities.sum()
    values = rng.integers(0, 2**32, vocabulary)
    weights = rng.normal(size=vocabulary + 1)
    return _Slot(np.append(cumulative, 1.0), np.append(values, -1), weights)


def _draw_missing_rate(rng: np.random.Generator) -> float:
    rate = rng.uniform(0.0, _MOST_MISSING)
    return rate if rng.random() < _MISSING_COLUMNS else 0.0


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-logits))


def _bias_for(logits: NDArray[np.float64], click_rate: float) -> float:
    """Returns the bias for a mean probability of `click_rate`, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if _sigmoid(logits + middle).mean() < click_rate:
            low = middle
        else:
            high = middle
    return middle
