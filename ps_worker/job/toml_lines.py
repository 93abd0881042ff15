"""Where the keys of a TOML text stand.

The standard library's parser gives no positions. This scanner follows it over a text that it has accepted,
so it checks nothing: it tells keys from values, and strings and comments from what looks like keys in them.
"""

import re
import tomllib

KeyPath = tuple[str, ...]
"""A key from the top on; the elements of an array have their index as key: ("data", "train", "0")."""

_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*'""")
_DOT = re.compile(r"[ \t]*\.[ \t]*")
_EQUALS = re.compile(r"[ \t]*=[ \t]*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
# A multi-line string may have two quotes of its own before the three that end it.
_STRING = re.compile(
    r'''"""(?:\\.|[^\\])*?"""{1,3}|"(?:\\.|[^"\\])*"'''
    r"""|'''.*?'''{1,3}|'[^']*'""",
    re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Returns the line, from 1, of each key and each array element of a valid TOML text.

    A table has the line of its header or key; one that is only named within longer keys, that of the first
    of them.
    """
    scanner = _Scanner(text)
    scanner.scan()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._position = 0
        self._last_index: dict[KeyPath, int] = {}  # of the arrays that `[[headers]]` make

    def scan(self) -> None:
        table: KeyPath = ()
        while self._next():
            if self._next() == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> KeyPath:
        is_array = self._text.startswith("[[", self._position)
        self._position += 1 + is_array
        line = self._line()
        path: KeyPath = ()
        for part in self._key():
            path = (*self._newest(path), part)
            self.lines.setdefault(path, line)
        self._match(_SPACE)
        self._position += 1 + is_array
        if not is_array:
            self.lines[path] = line  # a longer header may have come before
            return path
        self._last_index[path] = self._last_index.get(path, -1) + 1
        path = self._newest(path)
        self.lines[path] = line
        return path

    def _newest(self, path: KeyPath) -> KeyPath:
        """Returns the newest element of an array of tables; other paths as they are."""
        return (*path, str(self._last_index[path])) if path in self._last_index else path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for part in self._key():
            path = (*path, part)
            self.lines.setdefault(path, line)
        self._match(_EQUALS)
        self._value(path)

    def _key(self) -> list[str]:
        self._match(_SPACE)
        parts = [_unquoted(self._match(_KEY))]
        while self._match(_DOT):
            parts.append(_unquoted(self._match(_KEY)))
        return parts

    def _value(self, path: KeyPath) -> None:
        match self._text[self._position]:
            case "[":
                self._array(path)
            case "{":
                self._inline_table(path)
            case '"' | "'":
                self._match(_STRING)
            case _:
                self._match(_SCALAR)

    def _array(self, path: KeyPath) -> None:
        self._position += 1
        index = 0
        while self._next() != "]":
            element = (*path, str(index))
            self.lines[element] = self._line()
            self._value(element)
            self._skip_comma()
            index += 1
        self._position += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._position += 1
        while self._next() != "}":
            self._pair(path)
            self._skip_comma()
        self._position += 1

    def _skip_comma(self) -> None:
        if self._next() == ",":
            self._position += 1

    def _next(self) -> str:
        """Skips space and comments; returns the next character, at the end none."""
        self._match(_SPACE)
        return self._text[self._position : self._position + 1]

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Moves behind what matches here, if anything does, and returns it."""
        found = pattern.match(self._text, self._position)
        if found is None:
            return ""
        self._position = found.end()
        return found[0]

    def _line(self) -> int:
        return self._text.count("\n", 0, self._position) + 1


def _unquoted(key: str) -> str:
    return next(iter(tomllib.loads(f"{key} = 0")))
