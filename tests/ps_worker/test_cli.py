"""The shell of `ps-worker`: how an error ends it."""

import io
import sys

import pytest

from protos.errors import TransportError
from protos.runtime.logs import errors_as_exit_codes


class _Writes(io.StringIO):
    """A stderr that keeps each write apart."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:  # click tries the stream with nothing
        self.writes.append(text)
        return super().write(text)


def test_error_is_one_write_so_that_no_log_line_can_come_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = _Writes()
    monkeypatch.setattr(sys, "stderr", stderr)

    with pytest.raises(SystemExit) as end, errors_as_exit_codes():
        raise TransportError("server 1 is away")

    assert list(filter(None, stderr.writes)) == ["error: server 1 is away\n"]
    assert end.value.code == TransportError.exit_code
