"""A last line that gets further fields."""

import json

import pytest

from ctr_ps.deploy.launcher import LastLine


@pytest.mark.parametrize("cuts", [[], [1], [4, 5], [5, 9], [8, 20]], ids=str)
def test_all_but_the_last_line_passes_at_once_and_the_last_gets_fields(cuts: list[int]) -> None:
    """However the output is cut into pieces."""
    output = b'one\ntwo\n{"auc": 0.7}\n'
    passed: list[bytes] = []
    last = LastLine(passed.append)

    for start, end in zip([0, *cuts], [*cuts, len(output)], strict=True):
        last(output[start:end])
    before = b"".join(passed)
    last.end({"restarts": 1})

    assert before == b"one\ntwo\n"
    assert json.loads(b"".join(passed)[len(before) :]) == {"auc": 0.7, "restarts": 1}


@pytest.mark.parametrize("held", [b"trained\n", b"trained", b"7\n"])
def test_last_line_that_is_no_object_stays_and_fields_follow(held: bytes) -> None:
    passed: list[bytes] = []
    last = LastLine(passed.append)
    last(held)

    last.end({"restarts": 1})

    assert b"".join(passed) == held.rstrip() + b'\n{"restarts": 1}\n'


def test_no_output_leaves_the_fields_alone() -> None:
    passed: list[bytes] = []

    LastLine(passed.append).end({"restarts": 1})

    assert b"".join(passed) == b'{"restarts": 1}\n'
