r"""Paddle's data generators: base classes for user-defined parsing of lines.

    class Clicks(MultiSlotDataGenerator):
        def generate_sample(self, line):
            def samples():
                label, age, *words = line.split()
                keys = [int(word) for word in words]
                yield [("age", [float(age)]), ("words", keys), ("click", [int(label)])]
            return samples

    if __name__ == "__main__":
        Clicks().run_from_stdin()        # cat part-0 | python clicks.py

A line becomes any number of samples, and a sample a row of multi-slot text (`text/multislot.py`) or of a
batch in the same process (`generator_reader.py`). It imports little, because every pipe command loads it.
"""

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.user_code.salted_hash import require_no_salted_hash

Number = int | float
RawSample = Iterable[tuple[str, Sequence[Any]]]
Cells = list[tuple[str, list[Any]]]

T = TypeVar("T")
Produced = Callable[[], Iterable[T]] | Iterable[T]
"""Result of a user's method: an iterable, or as in Paddle a function that returns one."""

_MAX_SHOWN = 60


class DataGenerator(ABC):
    """Samples from lines. Subclasses keep no state of a file, because threads may share an instance."""

    batch_size = 32

    @abstractmethod
    def generate_sample(self, line: str | None) -> Produced[RawSample | None]:
        r"""Returns the samples of a line, or a function that returns them.

        `line` includes "\n", and is None in `run_from_memory`. A sample is [(name, [value, ...]), ...], with
        the same names in the same order each time; None is skipped.
        """

    def generate_batch(self, samples: list[RawSample]) -> Produced[RawSample]:
        """Transforms the samples of a batch; may be overridden, for example to pad them."""
        return samples

    def set_batch(self, batch_size: int) -> None:
        """Sets the number of samples that `generate_batch` gets; its last call gets the remaining ones."""
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size!r}, expected at least 1")
        self.batch_size = batch_size

    def run_from_stdin(self) -> None:
        """Reads lines from stdin and writes their samples to stdout as multi-slot text.

        A DataError names the line and the invalid value, or a function that uses `hash()`.
        """
        self._write_texts(enumerate(sys.stdin.buffer, start=1))

    def run_from_memory(self) -> None:
        """Writes the samples of `generate_sample(None)` to stdout as multi-slot text."""
        self._write_texts([(1, None)])

    @abstractmethod
    def checked_value(self, value: Any) -> Any:
        """Returns a value as a plain Python type; DataError if it is invalid for this generator."""

    def _write_texts(self, lines: Iterable[tuple[int, bytes | None]]) -> None:
        require_no_salted_hash(self, type(self).__qualname__)
        run = GeneratorRun(self)
        number = 0
        try:
            for number, line in lines:  # noqa: B007 number is told in an error
                self._write(run.samples_of(line))
            self._write(run.rest())
            sys.stdout.flush()
        except DataError as error:
            raise DataError(f"line {number}: {error}") from error
        except BrokenPipeError:
            # The reader, such as `head`, has closed the pipe; flushing the buffer at exit would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _write(self, samples: Iterable[Cells]) -> None:
        for cells in samples:
            words = []
            for _, values in cells:
                words.append(str(len(values)))
                # A number as the shortest text that reads back as the same one.
                words.extend(each if isinstance(each, str) else repr(each) for each in values)
            sys.stdout.buffer.write(f"{' '.join(words)}\n".encode())


class MultiSlotDataGenerator(DataGenerator):
    """Samples of numbers: dense columns, the label, and keys of slots. None and nan are missing."""

    def checked_value(self, value: Any) -> Number:
        """Returns a number; see `DataGenerator.checked_value`."""
        if type(value) is int:
            return value
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, Real) or math.isinf(value):
            hint = "; use MultiSlotStringDataGenerator for text" if isinstance(value, str) else ""
            raise DataError(f"{shown(value)}, expected a finite number{hint}")
        return int(value) if isinstance(value, Integral) else float(value)


class MultiSlotStringDataGenerator(DataGenerator):
    """Samples of text. Readers of its output hash slot values with values="text", else parse them as keys."""

    def checked_value(self, value: Any) -> str:
        """Returns a text; see `DataGenerator.checked_value`."""
        if not isinstance(value, str):
            raise DataError(
                f"{shown(value)}, expected text; use MultiSlotDataGenerator for numbers"
            )
        if value and min(value) <= " ":
            raise DataError(
                f"{shown(value)}, expected a value without blanks, as multi-slot text needs"
            )
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{shown(value)}, which cannot be encoded as UTF-8") from error
        return value


class GeneratorRun:
    """One pass of a generator over lines. For one thread."""

    def __init__(self, generator: DataGenerator) -> None:
        self._generator = generator
        self._waiting: list[RawSample] | None = [] if has_batches(generator) else None
        self.names: tuple[str, ...] | None = None  # columns of the first sample

    @property
    def is_between_batches(self) -> bool:
        """Whether all samples of the lines so far were yielded."""
        return not self._waiting

    def samples_of(self, line: bytes | None) -> Iterator[Cells]:
        """Yields the checked samples of a line, or of the batch that it completes.

        A DataError names the invalid column and value, or the error of the user's code.
        """
        try:
            text = None if line is None else line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"the line is not UTF-8: {shown(line)}") from error
        for sample in _produced("generate_sample", self._generator.generate_sample, text):
            if sample is None:
                continue
            if self._waiting is None:
                yield self._checked(sample)
                continue
            self._waiting.append(sample)
            if len(self._waiting) == self._generator.batch_size:
                yield from self.rest()

    def rest(self) -> Iterator[Cells]:
        """Yields the checked samples of an incomplete batch; errors as for `samples_of`."""
        if self._waiting:
            samples, self._waiting = self._waiting, []
            for sample in _produced("generate_batch", self._generator.generate_batch, samples):
                yield self._checked(sample)

    def _checked(self, sample: RawSample) -> Cells:
        cells = [self._checked_cell(cell) for cell in _cells(sample)]
        names = tuple(name for name, _ in cells)
        if self.names is None:
            self.names = names
        if names != self.names:
            raise DataError(
                f"the columns of the sample are {', '.join(names)}, expected {', '.join(self.names)} as "
                f"in the first sample"
            )
        return cells

    def _checked_cell(self, cell: Any) -> tuple[str, list[Any]]:
        match cell:
            case (str() as name, values):
                pass
            case _:
                raise DataError(
                    f"a column of the sample is {shown(cell)}, expected (name, [values])"
                )
        if hasattr(values, "tolist"):  # a numpy array
            values = values.tolist()
        if not isinstance(values, list | tuple):
            raise DataError(f"{name!r} has {shown(values)}, expected a list of values")
        try:
            return name, [self._generator.checked_value(value) for value in values]
        except DataError as error:
            raise DataError(f"{name!r} has {error}") from error


def has_batches(generator: DataGenerator) -> bool:
    """Returns whether `generate_batch` is overridden, so that a sample may depend on others."""
    return type(generator).generate_batch is not DataGenerator.generate_batch


def shown(value: object) -> str:
    """Returns a value for a message, truncated."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _cells(sample: RawSample) -> list[Any]:
    if isinstance(sample, str | bytes) or not isinstance(sample, Iterable):
        raise DataError(f"a sample is {shown(sample)}, expected [(name, [values]), ...]")
    cells = list(sample)
    if not cells:
        raise DataError("a sample has no columns, expected [(name, [values]), ...]")
    return cells


def _produced(name: str, method: Callable[[Any], Produced[T]], argument: object) -> Iterator[T]:
    """Yields the results of a user's method; translates its errors to `DataError`."""
    try:
        produced = method(argument)
        yield from produced() if callable(produced) else produced
    except Exception as error:  # user code may raise anything
        raise DataError(
            f"{name} raised {type(error).__name__}: {error}; its argument was {shown(argument)}"
        ) from error
