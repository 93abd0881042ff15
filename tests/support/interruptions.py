"""Kills and full disks at any call that changes the file system."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def steps_counted(fails: Callable[[int], BaseException | None]) -> Iterator[list[str]]:
    """Counts the calls that change the file system, from 1; raises errors from `fails`."""
    steps: list[str] = []

    def watched(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            steps.append(name)
            error = fails(len(steps))
            if error is not None:
                raise error
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir"):
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield steps


def killed_at(step: int) -> Callable[[int], BaseException | None]:
    """Raises at this call and at all later ones: a killed process makes none."""
    return lambda number: Killed() if number >= step else None


def disk_full_at(step: int) -> Callable[[int], BaseException | None]:
    return lambda number: OSError(28, "No space left on device") if number == step else None
