"""What a process runs as, and on: the home folder in what a user gives, connections, freed memory."""

import ctypes
import resource
import sys

import pytest

from ctr_ps.protos.runtime.environment import (
    MAX_CONNECTIONS,
    RESERVED_DESCRIPTORS,
    arguments,
    connection_limit,
    keep_freed_memory,
    with_home,
)


def test_home_is_put_in_place_of_a_tilde_that_begins_a_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    job = {"a": ["~/x", "y~", "~z", 1], "b": {"c": ("~",)}, "d": "s3://~/x", "e": None}

    found = with_home(job)

    expected = {"a": ["/home/me/x", "y~", "~z", 1], "b": {"c": ("/home/me",)}}
    assert found == expected | {"d": "s3://~/x", "e": None}


def test_arguments_have_the_home_folder_as_shells_put_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = ["init", "~/day-*", "--out=~/x", "--set", "data.train=~/x", "--", "-x~", "a=~", "~b"]
    monkeypatch.setattr(sys, "argv", ["ps-data", *words])

    expected = ["init", "/home/me/day-*", "--out=/home/me/x", *words[3:]]
    assert arguments() == expected


@pytest.mark.parametrize(
    ("soft", "hard", "connections"),
    [
        (256, 1024, 1024 - RESERVED_DESCRIPTORS),
        (256, 256, 128),
        (1024, 10**6, MAX_CONNECTIONS),
        (1024, resource.RLIM_INFINITY, MAX_CONNECTIONS),
    ],
)
def test_connections_leave_descriptors_of_the_hard_limit_free(
    soft: int, hard: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = soft, hard
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: raised.append(both))

    assert connection_limit() == connections
    assert raised == [(hard, hard)]


def test_soft_limit_counts_where_it_cannot_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)

    assert connection_limit() == 1024 - RESERVED_DESCRIPTORS


def test_setting_is_accepted_where_there_is_mallopt():
    assert keep_freed_memory() is hasattr(ctypes.CDLL(None), "mallopt")


def test_allocator_without_the_setting_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())

    assert keep_freed_memory() is False
