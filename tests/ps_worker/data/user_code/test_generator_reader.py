"""Generators in process: the same rows as from their text, errors with file and line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctr_ps.ctr_model.batch import Batch
from ctr_ps.ctr_model.schema import DenseColumn, Schema
from ctr_ps.protos.errors import DataError, UsageError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.blocks import Block
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.text.multislot import MultiSlotScanner
from ctr_ps.ps_worker.data.user_code.data_generator import (
    DataGenerator,
    MultiSlotDataGenerator,
    MultiSlotStringDataGenerator,
)
from ctr_ps.ps_worker.data.user_code.generator_reader import GeneratorReader, generated
from tests.ps_worker.data.user_code.test_data_generator import Streams

SCHEMA = Schema(
    dense=(DenseColumn(name="age", shift=1.0, scale=2.0, missing=-9.0),), slots=("user", "words")
)
NAMES = ["words", "click", "age", "user"]


class Numbers(MultiSlotDataGenerator):
    """From a line "click age user word ...", as many samples as click says, at least one."""

    def generate_sample(self, line: str | None) -> Any:
        click, age, user, *words = (line or "").split()

        def samples() -> Iterator[Any]:
            for _ in range(max(int(click), 1)):
                yield [
                    ("words", [int(word) for word in words]),
                    ("click", [int(click) % 2]),
                    ("age", [] if age == "-" else [float(age)]),
                    ("user", [int(user)]),
                ]

        return samples


class Texts(MultiSlotStringDataGenerator):
    """The same of text."""

    def generate_sample(self, line: str | None) -> Any:
        click, age, user, *words = (line or "").split()
        return [
            [
                ("words", words),
                ("click", [click]),
                ("age", ["nan" if age == "-" else age]),
                ("user", [user]),
            ]
        ]


class Paired(Numbers):
    """Numbers, each sample with the user of the next one in the batch."""

    def generate_batch(self, samples: list[Any]) -> Any:
        users = [sample[3] for sample in samples]
        return lambda: [
            [*sample[:3], user]
            for sample, user in zip(samples, [*users[1:], users[0]], strict=True)
        ]


def joined(blocks: Iterator[Block]) -> list[Any]:
    rows: list[Any] = []
    for block in blocks:
        rows += rows_of(block.rows)
    return rows


def rows_of(batch: Batch) -> list[Any]:
    slots = np.split(batch.keys, batch.offsets[1:-1])
    return [
        (batch.labels[i], batch.dense[i].tolist(), [s.tolist() for s in slots[2 * i : 2 * i + 2]])
        for i in range(batch.size)
    ]


def test_numbers_are_keys_and_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "part-0"
    path.write_text("1 5 7 11 12\n0 - 8\n")

    (block,) = GeneratorReader(Numbers(), SCHEMA).blocks(FileSplit(str(path)))

    assert rows_of(block.rows) == [(1.0, [2.0], [[7], [11, 12]]), (0.0, [-9.0], [[8], []])]


def test_all_numbers_may_come_together_and_the_label_be_left_out(tmp_path: Path) -> None:
    class Grouped(MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            return [[("dense_input", [5]), ("user", [1]), ("words", [2])]]

    path = tmp_path / "part-0"
    path.write_text("\n")

    (block,) = generated(Grouped())(SCHEMA, BadRows(0)).blocks(FileSplit(str(path)))

    assert block.rows.labels is None
    assert (block.rows.dense.tolist(), block.rows.keys.tolist()) == ([[2.0]], [1, 2])


LINES = st.lists(
    st.builds(
        lambda click, age, keys: " ".join([str(click), age, *map(str, keys)]),
        st.integers(0, 3),
        st.sampled_from(["-", "5", "0.25", "-1e3"]),
        st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
    ),
    max_size=8,
)


@pytest.mark.parametrize(("make", "values"), [(Numbers, "keys"), (Paired, "keys"), (Texts, "text")])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES)
def test_rows_are_those_that_are_read_from_the_text(
    tmp_path: Path, make: type[DataGenerator], values: Any, lines: list[str]
) -> None:
    generator = make()
    generator.set_batch(3)
    if make is Texts:
        lines = [f"{int(line[0]) % 2}{line[1:]}" for line in lines]
    content = "".join(f"{line}\n" for line in lines).encode()
    path = tmp_path / "part-0"
    path.write_bytes(content)

    rows = joined(GeneratorReader(generator, SCHEMA).blocks(FileSplit(str(path))))

    with pytest.MonkeyPatch.context() as monkeypatch:
        text = Streams(monkeypatch).run(generator, content).encode()
    read, _, bad_lines = MultiSlotScanner(SCHEMA, NAMES, values).scan(np.frombuffer(text, np.uint8))
    assert bad_lines == []
    assert rows == rows_of(read)


@pytest.mark.parametrize("make", [Numbers, Paired])
def test_reading_goes_on_from_the_offset_of_any_block(
    tmp_path: Path, make: type[DataGenerator]
) -> None:
    path = tmp_path / "part-0"
    path.write_text("".join(f"{n % 4} {n} {n} 1 2\n" for n in range(3000)))
    generator = make()
    generator.set_batch(5)  # most lines end inside a batch
    reader, split = GeneratorReader(generator, SCHEMA), FileSplit(str(path))
    blocks = list(reader.blocks(split))
    assert len(blocks) > 2

    for number, block in enumerate(blocks):
        assert joined(reader.blocks(split, block.offset)) == joined(iter(blocks[number:]))


def test_file_whose_samples_depend_on_each_other_is_not_cut(tmp_path: Path) -> None:
    path = tmp_path / "part-0"
    path.write_text("1 1 1\n" * 100)

    assert len(GeneratorReader(Paired(), SCHEMA).splits(str(path), 4)) == 1


@pytest.mark.parametrize(
    ("make", "line", "message"),
    [
        (Numbers, "x 1 1", "generate_sample raised ValueError: invalid literal for int"),
        (Numbers, "1 1 -7", "slot 1 ('user') has -7, expected text, bytes or a key"),
        (Numbers, "1 inf 7", "'age' has inf, expected a finite number"),
        (Texts, "2 1 7", "the label is 2.0, expected 0, 1 or None"),
        (Texts, "1 x 7", "'age' has 'x', expected a finite number"),
        (Texts, "1 1_0 7", "'age' has '1_0', expected a finite number"),
        (Texts, "1 inf 7", "'age' has 'inf', expected a finite number"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(
    tmp_path: Path, make: type[DataGenerator], line: str, message: str
) -> None:
    path = tmp_path / "part-0"
    path.write_text(f"1 1 1\n1 1 1\n{line}\n")
    split = GeneratorReader(make(), SCHEMA).splits(str(path), 2)[1]

    with pytest.raises(DataError) as caught:
        list(GeneratorReader(make(), SCHEMA).blocks(split))

    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)


def test_last_batch_that_fails_is_told_with_the_last_line(tmp_path: Path) -> None:
    class Broken(Numbers):
        def generate_batch(self, samples: list[Any]) -> Any:
            raise KeyError("age")

    path = tmp_path / "part-0"
    path.write_text("1 1 1\n1 1 1\n")

    with pytest.raises(DataError, match="part-0:2: generate_batch raised KeyError: 'age'"):
        list(GeneratorReader(Broken(), SCHEMA).blocks(FileSplit(str(path))))


def test_wrong_number_of_values_is_told(tmp_path: Path) -> None:
    class Wrong(MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            click, ages = eval(line or "")
            return [[("click", click), ("age", ages), ("user", [1]), ("words", [])]]

    path = tmp_path / "part-0"
    for text, message in [
        ("[1, 0], [2]", "'click' has 2 values, expected 1"),
        ("[], [2]", "'click' has 0 values, expected 1"),
        ("[1], [2, 3]", "'age' has 2 values, expected 0 or 1"),
    ]:
        path.write_text(f"{text}\n")
        with pytest.raises(DataError, match=f"part-0:1: {message}"):
            list(GeneratorReader(Wrong(), SCHEMA).blocks(FileSplit(str(path))))


def test_columns_that_the_schema_does_not_have_are_told(tmp_path: Path) -> None:
    path = tmp_path / "part-0"
    path.write_text("1 1 1\n")
    schema = Schema(dense=SCHEMA.dense, slots=("user", "word"))

    with pytest.raises(UsageError, match="unknown name 'words', did you mean 'word'"):
        list(GeneratorReader(Numbers(), schema).blocks(FileSplit(str(path))))
