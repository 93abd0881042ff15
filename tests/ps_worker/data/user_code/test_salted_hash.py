"""Python's salted `hash()` in a user's code is refused, and nothing else is; commands have no salt."""

import builtins
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ctr_ps.ctr_model.features import key_of
from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import DataError
from ctr_ps.ps_worker.data.bad_rows import BadRows
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.user_code.data_generator import MultiSlotDataGenerator
from ctr_ps.ps_worker.data.user_code.generator_reader import generated
from ctr_ps.ps_worker.data.user_code.pipe import piped
from ctr_ps.ps_worker.data.user_code.samples import Sample, SampleLoader
from tests.support.commands import printed_by

SCHEMA = Schema(dense=(), slots=("user", "ad"))
LINES = "".join(f"user{i} ad{i % 3} {i % 2}\n" for i in range(8))
REFUSED = r"uses hash\(\), in .*MultiSlotStringDataGenerator.*ctr_ps\.key_of"
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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines"
    path.write_text(LINES)
    return path


def read(generator: MultiSlotDataGenerator, path: Path) -> list[int]:
    reader = generated(generator)(SCHEMA, BadRows())
    blocks: Iterator[Any] = reader.blocks(FileSplit(str(path)))
    return [int(key) for block in blocks for key in block.rows.keys]


def keyed(text: str) -> int:
    return hash(text) & MASK


@functools.lru_cache
def cached(text: str) -> int:
    return keyed(text)


class Hasher:
    def __init__(self) -> None:
        self.modulus = 1000

    @staticmethod
    def first(text: str) -> int:
        return next(map(hash, [text]))

    @property
    def size(self) -> int:
        return hash(self.modulus)


HASHER = Hasher()
HELPERS = ModuleType("helpers")
HELPERS.key = keyed  # type: ignore[attr-defined]


PARSERS = {1: lambda text: hash(text) & MASK}


def imported(slot: int, text: str) -> int:
    from helpers import key  # type: ignore[import-not-found]

    return int(key(text))


class Partial:
    def made(self, bits: int, slot: int, text: str) -> int:
        return hash(text) & bits

    key = functools.partialmethod(made, MASK)


PARTIAL = Partial()


HASHING = {
    "itself": lambda slot, text: hash((slot, text)) & MASK,
    "function": lambda slot, text: keyed(text),
    "cache": lambda slot, text: cached(text),
    "comprehension": lambda slot, text: sum([keyed(each) for each in text]),
    "builtins": lambda slot, text: builtins.hash(text) & MASK,
    "module": lambda slot, text: HELPERS.key(text),
    "object": lambda slot, text: HASHER.first(text),
    "property": lambda slot, text: HASHER.size,
    "partial": functools.partial(lambda inner, slot, text: inner(text), keyed),
    "method": HASHER.first,
    "values of a dict": lambda slot, text: PARSERS[slot](text),
    "default": lambda slot, text, of=hash: of(text),
    "import in the function": imported,
    "partialmethod": PARTIAL.key,
}


@pytest.mark.parametrize("key", HASHING.values(), ids=HASHING)
def test_generator_that_uses_hash_is_refused_before_it_is_called(
    key: Callable[[int, str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "helpers", HELPERS)

    with pytest.raises(DataError, match=f"^Keyed {REFUSED}"):
        generated(Keyed(key))


def test_error_names_the_function() -> None:
    with pytest.raises(DataError, match=r"uses hash\(\), in keyed: Python salts"):
        generated(Keyed(lambda slot, text: cached(text)))


def test_hash_in_the_functions_of_a_closure_and_of_a_base_class_is_found() -> None:
    def outer(text: str) -> int:
        return inner(text)

    def inner(text: str) -> int:
        return hash(text)

    class Derived(Keyed):
        pass

    class Base(MultiSlotDataGenerator):
        def generate_sample(self, line: str | None) -> Any:
            yield [("user", [hash(line)])]

    class Child(Base):
        pass

    for generator in (Derived(lambda slot, text: outer(text)), Child()):
        with pytest.raises(DataError, match=REFUSED):
            generated(generator)


class User:
    """Its hash finds it in dictionaries, and is no key."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, User) and self.name == other.name


class Own:
    """A hash function of the user's own, as that of a package."""

    def hash(self, text: str) -> int:
        return len(text) + len({User(text)})


def test_other_hashes_are_left_alone(file: Path) -> None:
    own = Own()

    assert read(Keyed(lambda slot, text: own.hash(text)), file)[0] == len("user0") + 1


class Proxy:
    """As objects of web frameworks, which may be asked for nothing outside of a request."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("no request")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no request")


PROXY = Proxy()


def test_objects_that_the_code_refers_to_are_not_asked() -> None:
    generated(Keyed(lambda slot, text: PROXY.keys[text]))


def test_stable_keys_are_read_and_the_generator_is_asked_once(file: Path) -> None:
    lines: list[str] = []

    def key(slot: int, text: str) -> int:
        lines.append(text)
        return key_of(slot, text)

    keys = read(Keyed(key), file)

    assert keys[:2] == [key_of(1, "user0"), key_of(2, "ad0")]
    assert len(lines) == 2 * 8


def test_seed_that_the_user_has_set_is_respected(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")

    assert len(read(Keyed(lambda slot, text: keyed(text)), file)) == 16


@pytest.mark.parametrize("value", ["", "random", "0"])
def test_seed_that_python_takes_for_none_or_was_set_too_late_is_none(
    file: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", value)

    with pytest.raises(DataError, match=REFUSED):
        read(Keyed(lambda slot, text: keyed(text)), file)


SCRIPT = """
import sys
for line in sys.stdin:
    user, ad, click = line.split()
    print(f"1 {hash(user) & (2**63 - 1)} 1 7 1 {click}")
"""


@pytest.mark.parametrize(("seed", "is_kept"), [(None, False), ("random", False), ("7", True)])
def test_commands_print_the_same_keys_in_every_process(
    seed: str | None, is_kept: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    script = file.parent / "clicks.py"
    script.write_text(SCRIPT)
    command = f"{sys.executable} {script}"
    salt = {**os.environ, "PYTHONHASHSEED": "7" if is_kept else "0"}
    expected = printed_by("print(hash('user0') & (2**63 - 1))", environment=salt)

    (block,) = piped(command)(SCHEMA, BadRows()).blocks(FileSplit(str(file)))

    assert block.rows.keys[0] == int(expected)


def test_generator_as_a_command_refuses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = LINES.encode().splitlines(keepends=True)

    monkeypatch.setattr(sys, "stdin", Stdin)

    with pytest.raises(DataError, match=f"^Keyed {REFUSED}"):
        Keyed(lambda slot, text: keyed(text)).run_from_stdin()


def test_function_of_samples_that_uses_hash_is_refused() -> None:
    """As Paddle's own example of a sample generator does."""

    def samples() -> Iterator[Sample]:
        yield 1, [], [hash("user0"), 7]

    with pytest.raises(DataError, match=f"^the function of samples {REFUSED}"):
        SampleLoader(samples, SCHEMA, batch_size=10)
