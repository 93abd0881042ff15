"""Kernels: one process at a time compiles, and the log says so; in CI each checks its indices."""

import itertools
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest

from ctr_ps.protos.errors import UsageError, WaitTimeoutError
from ctr_ps.protos.runtime.jit import compile_lock, kernel
from tests.support.commands import printed_by
from tests.support.needs import IN_CI


def test_lock_is_free_again_after_the_block(tmp_path):
    path = tmp_path / "lock"

    for _ in range(2):
        with compile_lock(path):
            assert path.exists()


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_wait_for_another_is_told_once_and_has_an_end(tmp_path, caplog, monkeypatch):
    """By a clock of seconds that sleeping alone moves on."""
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(now=0.0, told=[], monotonic=lambda: clock.now)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        clock.told.append(len(caplog.records))

    clock.sleep = sleep
    monkeypatch.setattr("ctr_ps.protos.runtime.jit.time", clock)

    with (
        compile_lock(tmp_path / "lock"),
        pytest.raises(WaitTimeoutError, match=r"another process held .* for 5 s"),
        compile_lock(tmp_path / "lock", limit_s=5.0),
    ):
        pass

    assert clock.now == pytest.approx(5.0, abs=0.2)
    assert clock.told[9] == 0  # for a second, as who loads alone is ready before
    assert clock.told[-1] == len(messages(caplog)) == 1


def test_first_kernel_that_is_compiled_is_announced_before_it_is_there(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(monotonic=itertools.count(100, 5).__next__)
    monkeypatch.setattr("ctr_ps.protos.runtime.jit.time", clock)
    seen_while_compiling = []

    def first(x):
        return x + 1

    def second(x):
        return x + 2

    with compile_lock(tmp_path / "lock"):
        assert messages(caplog) == []
        numba.njit(first)(1)
        seen_while_compiling += messages(caplog)
        numba.njit(second)(1)

    assert len(seen_while_compiling) == 1
    assert seen_while_compiling[0].startswith("compiling kernels: ")
    assert messages(caplog)[0] == seen_while_compiling[0]
    assert messages(caplog)[1] == "kernels compiled kernels=2 seconds=5.0"  # since the first
    assert len(messages(caplog)) == 2


def test_nothing_is_announced_when_nothing_is_compiled(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    compiled = numba.njit(lambda x: x)
    compiled(1)
    caplog.clear()

    with compile_lock(tmp_path / "lock"):
        compiled(1)

    assert messages(caplog) == []


def test_lock_is_in_the_folder_of_the_cache(tmp_path):
    script = (
        "import ctr_ps.protos.runtime.jit as m, protos.keys as k;"
        "print(m.default_lock_path()); print(k.mix64.stats.cache_path)"
    )

    def paths(**environment):
        environment = {
            key: v for key, v in os.environ.items() if key != "NUMBA_CACHE_DIR"
        } | environment
        return [Path(line) for line in printed_by(script, environment=environment).split()]

    given, _ = paths(NUMBA_CACHE_DIR=str(tmp_path))
    lock, cache = paths()

    assert given.parent == tmp_path
    assert lock.parent.name == cache.name == "__pycache__"


def test_folder_of_the_cache_is_made_for_this_user_alone(tmp_path):
    with compile_lock(tmp_path / "cache" / "lock"):
        assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "cache/lock").stat().st_mode) == 0o600


def a_link(path):
    path.symlink_to(path.parent / "other")


def a_link_to_a_file(path):
    (path.parent / "other").touch()
    path.symlink_to(path.parent / "other")


def of_another_user(path):
    path.touch()
    os.chown(path, 12345, 12345)


def in_a_folder_of_another_user(path):
    os.chown(path.parent, 12345, 12345)


def in_a_folder_for_all(path):
    path.parent.chmod(0o1777)


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        a_link,
        a_link_to_a_file,
        in_a_folder_for_all,
        *([of_another_user, in_a_folder_of_another_user] if os.geteuid() == 0 else []),
    ],
)
def test_lock_that_is_not_the_users_own_is_refused_at_once(tmp_path, make):
    path = tmp_path / "lock"
    make(path)

    with (
        pytest.raises(UsageError, match=r"lock, .*: remove it, or set NUMBA_CACHE_DIR"),
        compile_lock(path),
    ):
        pass
    assert make is not a_link or not (tmp_path / "other").exists()


@kernel
def read(values: np.ndarray, index: int) -> float:
    return values[index]


@pytest.mark.skipif(not IN_CI, reason="of CI, which sets NUMBA_BOUNDSCHECK")
def test_kernel_that_reads_beyond_its_array_fails() -> None:
    assert read(np.array([1.0, 2.0]), 1) == 2

    with pytest.raises(IndexError):
        read(np.array([1.0, 2.0]), 2)


UPGRADED = """
import sys
from typing import NamedTuple
from ctr_ps.protos.runtime.jit import kernel

class Pair(NamedTuple):
    a: float
    b: float

sys.modules[NAME] = sys.modules["__main__"]
Pair.__module__ = NAME

@kernel
def total(pair):
    return pair.a + pair.b

print(total(Pair(1.0, 2.0)), sum(total.stats.cache_hits.values()))
"""


def test_cache_of_a_version_with_other_modules_is_compiled_anew(tmp_path):
    """Numba unpickles an index, which names the modules of types, before it compares the source."""

    def run(name: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(UPGRADED.replace("NAME", repr(name)))
        done = subprocess.run(
            [sys.executable, script],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("module_before") == "3.0 0\n"
    assert run("module_before") == "3.0 1\n"
    assert run("module_after") == "3.0 0\n"
    assert run("module_after") == "3.0 1\n"
