"""Lines of keys, against a writer of TOML that counts lines as it goes."""

import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_worker.job.toml_lines import KeyPath, key_lines

CONFUSING = st.text("'\"\\#=[]{},.ab é\n\t", max_size=12)
NAMES = st.one_of(st.from_regex(r"[A-Za-z0-9_-]{1,3}", fullmatch=True), CONFUSING)
SCALARS = st.sampled_from(
    ["0", "-1_000", "0xff", "1e3", "inf", "true", "1979-05-27 07:32:00", "07:32:00.5"]
)


class Writer:
    """Writes random TOML and notes the line of each key."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.text = ""
        self.lines: dict[KeyPath, int] = {}
        self._draw = draw
        self._is_inline = False  # inside an inline table, which is one line

    def document(self) -> None:
        self._pairs((), self._names(2))
        for name in self._names(3, besides={path[0] for path in self.lines}):
            self._tables((name,))

    def _tables(self, path: KeyPath) -> None:
        """A table or an array of tables, and tables below it, before or after it."""
        if self._draw(st.booleans()):
            for index in range(self._draw(st.integers(1, 3))):
                self._header(path, "[[", "]]", (*path, str(index)))
                self._below(path, (*path, str(index)))
        elif self._draw(st.booleans()):
            early = (*path, "early")
            self._header(early, "[", "]", early)
            self._header(path, "[", "]", path)
            self._pairs(path, self._names(2, besides={"early"}))
        else:
            self._header(path, "[", "]", path)
            self._below(path, path)

    def _below(self, path: KeyPath, at: KeyPath) -> None:
        self._pairs(at, self._names(2, besides={"below"}))
        if self._draw(st.booleans()):
            self._header((*path, "below"), "[", "]", (*at, "below"))
            self._pairs((*at, "below"), self._names(2))

    def _header(self, path: KeyPath, left: str, right: str, at: KeyPath) -> None:
        self._between_lines()
        line = self._line()
        for length in range(1, len(at)):
            self.lines.setdefault(at[:length], line)
        self.lines[at] = line
        space = self._space()
        self.text += left + space + self._dotted(path) + space + right + self._comment() + "\n"

    def _pairs(self, table: KeyPath, names: list[str]) -> None:
        for name in names:
            self._between_lines()
            self.text += self._space()
            self._pair((*table, name), len(table), self._value)
            self.text += self._space() + self._comment() + "\n"

    def _pair(self, path: KeyPath, depth: int, value: Callable[[KeyPath, int], None]) -> None:
        """A key, maybe a dotted one, and a value."""
        if self._draw(st.integers(0, 4)) == 0:
            path = (*path, *self._names(1))
        line = self._line()
        for length in range(depth + 1, len(path) + 1):
            self.lines.setdefault(path[:length], line)
        self.text += self._dotted(path[depth:]) + self._space() + "=" + self._space()
        value(path, 2)

    def _value(self, path: KeyPath, depth: int) -> None:
        kinds = [self._scalar, self._string, self._array, self._inline_table]
        kind = self._draw(st.sampled_from(kinds if depth else kinds[:2]))
        kind(path, depth)

    def _scalar(self, path: KeyPath, depth: int) -> None:
        self.text += self._draw(SCALARS)

    def _string(self, path: KeyPath, depth: int) -> None:
        content = self._draw(CONFUSING)
        if self._is_inline or self._draw(st.booleans()):
            self.text += _quoted(content, is_literal=self._draw(st.booleans()))
        elif self._draw(st.booleans()):
            escaped = content.replace("\\", "\\\\").replace('"""', '""\\"')
            self.text += f'"""{escaped}"""'
        else:
            content = re.sub("'{3,}", "''", content)
            self.text += f"'''{content}'''"

    def _array(self, path: KeyPath, depth: int) -> None:
        self.text += "["
        count = self._draw(st.integers(0, 3))
        for index in range(count):
            self._inside_array()
            element = (*path, str(index))
            self.lines[element] = self._line()
            self._value(element, depth - 1)
            self._inside_array()
            if index + 1 < count or self._draw(st.booleans()):
                self.text += ","
        self._inside_array()
        self.text += "]"

    def _inline_table(self, path: KeyPath, depth: int) -> None:
        was_inline, self._is_inline = self._is_inline, True
        self.text += "{" + self._space()
        for index, name in enumerate(self._names(3)):
            self.text += ("," if index else "") + self._space()
            self._pair((*path, name), len(path), lambda key, _: self._value(key, depth - 1))
            self.text += self._space()
        self.text += "}"
        self._is_inline = was_inline

    def _inside_array(self) -> None:
        self.text += self._space()
        if not self._is_inline and self._draw(st.booleans()):
            self.text += self._comment() + "\n"

    def _between_lines(self) -> None:
        for _ in range(self._draw(st.integers(0, 2))):
            self.text += self._space() + self._comment() + "\n"

    def _comment(self) -> str:
        content = self._draw(CONFUSING).replace("\n", "")
        return f"#{content}" if self._draw(st.booleans()) else ""

    def _space(self) -> str:
        return self._draw(st.sampled_from(["", " ", "\t "]))

    def _names(self, most: int, besides: Collection[str] = ()) -> list[str]:
        names = self._draw(st.lists(NAMES, min_size=1, max_size=most, unique=True))
        return [name for name in names if name not in besides]

    def _dotted(self, path: KeyPath) -> str:
        dot = self._space() + "." + self._space()
        return dot.join(self._key(name) for name in path)

    def _key(self, name: str) -> str:
        is_bare = re.fullmatch(r"[A-Za-z0-9_-]+", name) and self._draw(st.booleans())
        return name if is_bare else _quoted(name, is_literal=self._draw(st.booleans()))

    def _line(self) -> int:
        return len(self.text.split("\n"))


def _quoted(content: str, *, is_literal: bool) -> str:
    if is_literal and not set(content) & set("'\n"):
        return f"'{content}'"
    return json.dumps(content, ensure_ascii=False)


@st.composite
def documents(draw: Callable[..., Any]) -> tuple[str, dict[KeyPath, int]]:
    writer = Writer(draw)
    writer.document()
    return writer.text, writer.lines


def paths_of(value: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = ((str(index), element) for index, element in enumerate(value))
    for name, element in items:
        yield (*path, name)
        yield from paths_of(element, (*path, name))


@settings(max_examples=50)
@given(documents())
def test_each_key_of_a_random_text_is_on_its_line(document: tuple[str, dict[KeyPath, int]]) -> None:
    text, lines = document

    found = key_lines(text)

    assert found == lines
    assert found.keys() == set(paths_of(tomllib.loads(text)))


@pytest.mark.parametrize("path", sorted(Path("examples").glob("*.toml")), ids=str)
def test_each_key_of_an_example_stands_on_its_line(path: Path) -> None:
    text = path.read_text()

    for key, number in key_lines(text).items():
        if not key[-1].isdigit():
            assert key[-1] in text.splitlines()[number - 1]


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a = 1\nb = 2\n", "b", 2),
        ("# b = 1\n\n[a]\n  b = 2", "a.b", 4),
        ('[a]\nx = """\nb = 1\n"""\nb = 2', "a.b", 5),
        ("[a]\nx = '''\nb = 1\n''''' # b = 3\nb = 2", "a.b", 5),
        ('[a]\nx = "\\"\\\\" # "\nb = 2', "a.b", 3),
        ("[a]\nx = [\n  1, # ]\n  2,\n]\nb = 2", "a.b", 6),
        ("[a]\nx = [\n  1,\n  2,\n]", "a.x.1", 4),
        ("[a.b]\nc = 1\n[a]\nd = 2", "a", 3),
        ("[a.b]\nc = 1", "a", 1),
        ("a.b.c = 1\na.b.d = 2", "a.b", 1),
        ("[a]\n\nb = { c = { d = 1 }, e.f = 2 }", "a.b.c.d", 3),
        ("[a]\n\nb = { c = { d = 1 }, e.f = 2 }", "a.b.e.f", 3),
        ("[[a]]\nb = 1\n[[a]]\nb = 2", "a.1.b", 4),
        ("[[a]]\n[[a]]\n[a.b]\nc = 2", "a.1.b.c", 4),
        ('["a" . \'b\']\n"c d" = 1', "a.b.c d", 2),
        ("[a]\r\nb = 1\r\nc = 1979-05-27 07:32:00 # x\r\nd = 2\r\n", "a.d", 4),
        ("[a]\nx = [ { b = 1 }, { b = 2 } ]\nb = 2", "a.b", 3),
        ("[a]\nx = []\ny = {}\nb = 2", "a.b", 4),
    ],
)
def test_key_is_on_its_line(text: str, key: str, line: int) -> None:
    lines = key_lines(text)

    assert lines[tuple(key.split("."))] == line
    assert lines.keys() == set(paths_of(tomllib.loads(text)))


def test_text_without_keys_has_no_lines() -> None:
    assert key_lines("") == key_lines("\n# a = 1") == {}
