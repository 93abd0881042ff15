"""Data generators: output that is read back, errors with line numbers."""

import io
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.text.multislot import MultiSlotScanner
from ctr_ps.ps_worker.data.user_code.data_generator import (
    DataGenerator,
    MultiSlotDataGenerator,
    MultiSlotStringDataGenerator,
)

SCHEMA = Schema(
    dense=(DenseColumn(name="age", missing=-9.0), DenseColumn(name="n", missing=-9.0)),
    slots=("user", "words"),
)


class Clicks(MultiSlotDataGenerator):
    """Each line is the Python text of its samples."""

    def generate_sample(self, line: str | None) -> Any:
        def samples() -> Iterator[Any]:
            yield from eval(
                line or "[[('click', [1])]]", {"np": np, "nan": math.nan, "inf": math.inf}
            )

        return samples


class Texts(MultiSlotStringDataGenerator):
    """Likewise."""

    generate_sample = Clicks.generate_sample


class Given(MultiSlotDataGenerator):
    """The samples that it was made of."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def generate_sample(self, line: str | None) -> Any:
        return lambda: iter(self.samples)


class GivenTexts(MultiSlotStringDataGenerator):
    """Likewise."""

    __init__ = Given.__init__
    generate_sample = Given.generate_sample


class Streams:
    """stdin and stdout of a generator that is run by a shell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def run(self, generator: DataGenerator, text: str | bytes) -> str:
        data = text.encode() if isinstance(text, str) else text
        output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        self._monkeypatch.setattr(sys, "stdout", output)
        generator.run_from_stdin()
        return output.buffer.getvalue().decode()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


def test_a_sample_is_a_line_of_counts_and_values(streams: Streams) -> None:
    text = streams.run(
        Clicks(), "[[('age', [0.1]), ('words', [7, 18446744073709551615]), ('click', [0])]]\n"
    )

    assert text == "1 0.1 2 7 18446744073709551615 1 0\n"


def test_a_line_has_any_number_of_samples(streams: Streams) -> None:
    lines = "[[('click', [1])], None, [('click', [0])]]\n[]\n[[('click', [])]]\n"

    assert streams.run(Clicks(), lines) == "1 1\n1 0\n0\n"


def test_numbers_of_numpy_and_missing_ones_are_written(streams: Streams) -> None:
    line = (
        "[[('a', np.float32([0.5, 2])), ('b', [np.int8(3), np.float64(0.1)]), ('c', (None, nan))]]"
    )

    assert streams.run(Clicks(), line) == "2 0.5 2.0 2 3 0.1 2 nan nan\n"


def test_text_is_written_as_it_is(streams: Streams) -> None:
    assert (
        streams.run(Texts(), "[[('a', ['0.10', 'café']), ('b', ['', 'x'])]]")
        == "2 0.10 café 2  x\n"
    )


def test_samples_may_be_zipped_and_come_without_a_function(streams: Streams) -> None:
    class Zipped(MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Iterator[Any]:
            yield zip(["a", "b"], [[1], [2]], strict=True)

    assert streams.run(Zipped(), "x\n") == "1 1 1 2\n"


def test_lines_reach_the_user_with_their_end(streams: Streams) -> None:
    class Lengths(MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            return [[("length", [len(line or "")])]]

    assert streams.run(Lengths(), "é\n\na\rb\n") == "1 2\n1 1\n1 4\n"


def test_run_from_memory_asks_once_for_no_line(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    output = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", output)

    Clicks().run_from_memory()

    assert output.buffer.getvalue() == b"1 1\n"


class Padded(Clicks):
    """Batches that know their size."""

    def generate_batch(self, samples: list[Any]) -> Any:
        return lambda: ([*sample, ("size", [len(samples)])] for sample in samples)


def test_batches_run_on_over_lines_and_the_last_is_what_is_left(streams: Streams) -> None:
    generator = Padded()
    generator.set_batch(3)

    text = streams.run(generator, "[[('click', [1])], [('click', [0])]]\n" * 4)

    assert text == "1 1 1 3\n1 0 1 3\n1 1 1 3\n1 0 1 3\n1 1 1 3\n1 0 1 3\n1 1 1 2\n1 0 1 2\n"


def test_batch_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        Clicks().set_batch(0)


GOOD = "[[('age', [1]), ('click', [1])]]"


@pytest.mark.parametrize(
    ("generator", "line", "message"),
    [
        (Clicks, "[7]", "a sample is 7, expected [(name, [values]), ...]"),
        (Clicks, "['text']", "a sample is 'text', expected [(name, [values]), ...]"),
        (Clicks, "[[]]", "a sample has no columns"),
        (
            Clicks,
            "[[('age', [1], 2)]]",
            "a column of the sample is ('age', [1], 2), expected (name, [values])",
        ),
        (Clicks, "[[(1, [1])]]", "a column of the sample is (1, [1]), expected (name, [values])"),
        (Clicks, "[[('age', 1)]]", "'age' has 1, expected a list of values"),
        (Clicks, "[[('age', 'abc')]]", "'age' has 'abc', expected a list of values"),
        (
            Clicks,
            "[[('age', [1, 'x'])]]",
            "'age' has 'x', expected a finite number; use MultiSlotStringDataGen",
        ),
        (Clicks, "[[('age', [True])]]", "'age' has True, expected a finite number"),
        (Clicks, "[[('age', [inf])]]", "'age' has inf, expected a finite number"),
        (Clicks, "[[('age', [[1]])]]", "'age' has [1], expected a finite number"),
        (
            Texts,
            "[[('age', [1])]]",
            "'age' has 1, expected text; use MultiSlotDataGenerator for numbers",
        ),
        (
            Texts,
            r"[[('age', ['\ud800'])]]",
            r"'age' has '\ud800', which cannot be encoded as UTF-8",
        ),
        (
            Texts,
            "[[('age', ['a b'])]]",
            "'age' has 'a b', expected a value without blanks",
        ),
        (Texts, "[[('age', ['a\\n'])]]", "'age' has 'a\\n', expected a value without blanks"),
        (
            Clicks,
            "[[('click', [1]), ('age', [1])]]",
            "are click, age, expected age, click as in the first sample",
        ),
        (Clicks, "[[('age', [1])]]", "are age, expected age, click as in the first sample"),
        (
            Clicks,
            "1/0",
            "generate_sample raised ZeroDivisionError: division by zero; its argument was '1/0\\n'",
        ),
    ],
)
def test_what_is_wrong_is_told_with_the_number_of_the_line(
    streams: Streams, generator: type[DataGenerator], line: str, message: str
) -> None:
    first = GOOD if generator is Clicks else "[[('age', ['1']), ('click', ['1'])]]"

    with pytest.raises(DataError) as caught:
        streams.run(generator(), f"{first}\n{first}\n{line}\n{first}\n")

    assert str(caught.value).startswith("line 3: ")
    assert message in str(caught.value)


def test_line_that_is_no_text_is_told(streams: Streams) -> None:
    with pytest.raises(DataError, match=r"line 2: the line is not UTF-8: b'\\xff\\n'"):
        streams.run(Clicks(), GOOD.encode() + b"\n\xff\n")


def test_batches_that_fail_are_told(streams: Streams) -> None:
    class Broken(Clicks):
        def generate_batch(self, samples: list[Any]) -> Any:
            raise KeyError("age")

    with pytest.raises(DataError, match="line 1: generate_batch raised KeyError: 'age'"):
        streams.run(Broken(), f"{GOOD}\n")


NUMBERS = st.none() | st.floats(allow_infinity=False, width=32) | st.integers(-(2**24), 2**24)
KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=4)
TEXTS = st.lists(st.text(st.characters(min_codepoint=33, exclude_categories=["Cs"])), max_size=4)


@given(
    rows=st.lists(st.tuples(NUMBERS, NUMBERS, KEYS, KEYS, st.integers(0, 1)), max_size=6),
    is_apart=st.booleans(),
)
def test_numbers_are_read_back_as_they_were(rows: list[Any], is_apart: bool) -> None:
    samples = [
        [("words", words), *([("n", [n]), ("age", [age])] if is_apart else [("dense_input", [age, n])]),
         ("click", [click]), ("user", user)]
        for age, n, user, words, click in rows
    ]  # fmt: skip
    names = ["words", *(["n", "age"] if is_apart else ["dense_input"]), "click", "user"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        text = Streams(monkeypatch).run(Given(samples), "one line\n")

    batch, _, bad_lines = MultiSlotScanner(SCHEMA, names).scan(
        np.frombuffer(text.encode(), np.uint8)
    )

    assert bad_lines == []
    assert batch.labels.tolist() == [click for *_, click in rows]
    assert batch.dense.tolist() == [
        [-9.0 if x is None or math.isnan(x) else x for x in row[:2]] for row in rows
    ]
    assert batch.keys.tolist() == [key for _, _, user, words, _ in rows for key in [*user, *words]]
    counts = [len(keys) for _, _, user, words, _ in rows for keys in (user, words)]
    assert np.diff(batch.offsets).tolist() == counts


@given(rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=6))
def test_texts_are_read_back_as_they_were(rows: list[tuple[list[str], list[str]]]) -> None:
    samples = [
        [("user", user), ("click", ["1"]), ("dense_input", ["0.5", "nan"]), ("words", words)]
        for user, words in rows
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        text = Streams(monkeypatch).run(GivenTexts(samples), "one line\n")

    scanner = MultiSlotScanner(SCHEMA, ["user", "click", "dense_input", "words"], "text")
    batch, _, bad_lines = scanner.scan(np.frombuffer(text.encode(), np.uint8))

    assert bad_lines == []
    assert batch.keys.tolist() == [
        key_of(slot, value)
        for row in rows
        for slot, values in enumerate(row, 1)
        for value in values
    ]
    assert np.diff(batch.offsets).tolist() == [len(values) for row in rows for values in row]
