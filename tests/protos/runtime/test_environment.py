"""The home folder in what a user gives: settings of jobs, and arguments of commands."""

import sys

import pytest

from protos.runtime.environment import arguments, with_home


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
