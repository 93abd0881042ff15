"""Python's salted `hash()` in a user's code is noticed, and nothing else is refused."""

import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ctr_model.features import key_of
from ctr_model.schema import Schema
from protos.errors import DataError
from ps_worker.data.blocks.bad_rows import BadRows
from ps_worker.data.files.file_split import FileSplit
from ps_worker.data.user_code import command_probe, salted_hash
from ps_worker.data.user_code.data_generator import MultiSlotDataGenerator
from ps_worker.data.user_code.generator_reader import generated
from ps_worker.data.user_code.pipe import piped
from ps_worker.data.user_code.samples import Sample, SampleLoader

SCHEMA = Schema(dense=(), slots=("user", "ad"))
LINES = "".join(f"user{i} ad{i % 3} {i % 2}\n" for i in range(8))
REFUSED = r"uses hash\(\) of text.*MultiSlotStringDataGenerator.*ctr_model\.features\.key_of"
MASK = 2**63 - 1


class Keyed(MultiSlotDataGenerator):
    """Makes keys by a function of (slot, text)."""

    def __init__(self, key: Callable[[int, str], int]) -> None:
        self.key = key

    def generate_sample(self, line: str | None) -> Any:
        assert line is not None
        user, ad, click = line.split()
        yield [
            ("user", [self.key(1, user)]),
            ("ad", [self.key(2, ad)]),
            ("click", [int(click)]),
        ]


@pytest.fixture(autouse=True)
def _salted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(command_probe, "_probed", set())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines"
    path.write_text(LINES)
    return path


def read(generator: MultiSlotDataGenerator, path: Path) -> list[int]:
    reader = generated(generator)(SCHEMA, BadRows())
    blocks: Iterator[Any] = reader.blocks(FileSplit(str(path)))
    return [int(key) for block in blocks for key in block.rows.keys]


@pytest.mark.parametrize(
    "key",
    [
        lambda slot, text: hash(text) & MASK,
        lambda slot, text: hash((slot, text)) & MASK,
        lambda slot, text: hash(text.encode()) % 1000,
        lambda slot, text: hash(frozenset([slot, text])) & MASK,
        lambda slot, text: slot * 10**6 + hash(f"{slot}:{text}") % 10**6,
    ],
    ids=["text", "tuple", "bytes", "set", "modulo"],
)
def test_keys_by_hash_of_text_are_refused(key: Callable[[int, str], int], file: Path) -> None:
    with pytest.raises(DataError, match=f"lines:1: generate_sample {REFUSED}"):
        read(Keyed(key), file)


def test_stable_keys_are_read_and_the_generator_is_asked_for_little_more(file: Path) -> None:
    lines: list[str] = []
    key_of(1, "")  # now: numba calls hash() of text when it loads a function

    def key(slot: int, text: str) -> int:
        lines.append(text)
        return key_of(slot, text)

    make = generated(Keyed(key))
    keys = [
        int(key)
        for _ in range(3)
        for block in make(SCHEMA, BadRows()).blocks(FileSplit(str(file)))
        for key in block.rows.keys
    ]

    assert keys[:2] == [key_of(1, "user0"), key_of(2, "ad0")]
    assert len(lines) == 2 * (3 * 8 + salted_hash.MAX_LINES)  # once for all passes


class Numbered(MultiSlotDataGenerator):
    """Numbers values as they come, by a dictionary; and lines, by a counter."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.num_lines = 0

    def generate_sample(self, line: str | None) -> Any:
        assert line is not None
        self.num_lines += 1
        hash(line)
        user, _, click = line.split()
        user_id = self.ids.setdefault(user, len(self.ids))
        yield [("user", [user_id]), ("ad", [self.num_lines]), ("click", [int(click)])]


def test_generator_with_a_state_of_its_own_yields_what_it_would_without_a_probe(
    file: Path,
) -> None:
    file.write_text("".join(f"user{user} ad {user % 2}\n" for user in (3, 1, 3, 2)))

    assert read(Numbered(), file) == [0, 1, 1, 2, 0, 3, 2, 4]


def test_keys_by_hash_are_refused_whatever_else_the_generator_counts(file: Path) -> None:
    class Counting(Numbered):
        def generate_sample(self, line: str | None) -> Any:
            for sample in super().generate_sample(line):
                yield [("user", [hash(line) & MASK]), *sample[1:]]

    with pytest.raises(DataError, match=REFUSED):
        read(Counting(), file)


def test_generator_that_cannot_be_copied_is_not_asked(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Locked(Numbered):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    generator = Locked()
    with caplog.at_level("DEBUG"):
        read(generator, file)

    assert generator.num_lines == 8
    assert "whether Locked uses hash() of text is not checked" in caplog.text


def test_hash_that_no_key_follows_from_is_left_alone(file: Path) -> None:
    cache: dict[int, int] = {}

    def key(slot: int, text: str) -> int:
        cache[hash(text)] = hash(7)  # of a number: the same everywhere
        return key_of(slot, text)

    assert len(read(Keyed(key), file)) == 16


def test_samples_that_differ_each_time_are_left_alone(file: Path) -> None:
    rng = random.Random(1)

    assert len(read(Keyed(lambda slot, text: rng.getrandbits(40) ^ hash(text) & MASK), file)) == 16


def test_seed_that_the_user_has_set_is_respected(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")

    assert len(read(Keyed(lambda slot, text: hash(text) & MASK), file)) == 16


@pytest.mark.parametrize("value", ["", "random"])
def test_seed_that_python_takes_for_none_is_none(
    file: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", value)

    with pytest.raises(DataError, match=REFUSED):
        read(Keyed(lambda slot, text: hash(text) & MASK), file)


def test_error_of_the_generator_is_told_as_ever(file: Path) -> None:
    def key(slot: int, text: str) -> int:
        raise KeyError(text)

    with pytest.raises(DataError, match="lines:1: generate_sample raised KeyError: 'user0'"):
        read(Keyed(key), file)


def test_other_threads_hash_as_ever_meanwhile() -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    rounds = itertools.count()

    def produce() -> int:
        if next(rounds) == 1:  # the second: salted in this thread
            has_begun.set()
            assert may_end.wait(10.0)
        return hash("text")

    def probe() -> None:
        with pytest.raises(DataError):
            salted_hash.require_stable_samples(produce)

    expected = hash("text")
    thread = threading.Thread(target=probe)
    thread.start()
    assert has_begun.wait(10.0)
    assert hash("text") == expected
    may_end.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert "built-in" in repr(hash)


SCRIPT = """
import random
import sys
for line in sys.stdin:
    user, ad, click = line.split()
    print(f"1 {%s} 1 7 1 {click}")
"""


def run_script(expression: str, file: Path) -> list[Any]:
    script = file.parent / "clicks.py"
    script.write_text(SCRIPT % expression)
    command = f"{sys.executable} {script}"
    return list(piped(command)(SCHEMA, BadRows()).blocks(FileSplit(str(file))))


def test_command_of_python_that_prints_salted_hashes_is_refused(file: Path) -> None:
    for _ in range(2):  # not only the first time
        with pytest.raises(DataError, match=rf"lines: the command .*clicks\.py' {REFUSED}"):
            run_script("hash(user) & (2**63 - 1)", file)


@pytest.mark.parametrize("expression", ["len(user)", "random.getrandbits(60)"])
def test_other_commands_are_run(expression: str, file: Path) -> None:
    (block,) = run_script(expression, file)

    assert block.rows.size == 8


def test_generator_of_this_package_as_a_command_refuses_by_itself(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin:
        buffer = LINES.encode().splitlines(keepends=True)

    monkeypatch.setattr(sys, "stdin", Stdin)

    with pytest.raises(DataError, match=f"^line 1: generate_sample {REFUSED}"):
        Keyed(lambda slot, text: hash(text) & MASK).run_from_stdin()


@pytest.mark.parametrize("is_hashed", [True, False])
def test_samples_of_a_function_are_asked_for_twice(is_hashed: bool) -> None:
    """Paddle's own example of a sample generator takes `hash()`."""

    def samples() -> Iterator[Sample]:
        for number in range(20):
            text = f"user{number}"
            yield (
                1,
                [],
                [hash(text) & MASK if is_hashed else text, np.array([number, hash(number)])],
            )

    loader = SampleLoader(samples, SCHEMA, batch_size=10)
    if is_hashed:
        with pytest.raises(DataError, match=f"the function of samples {REFUSED}"):
            next(iter(loader))
    else:
        assert [batch.size for batch in loader] == [10, 10]
