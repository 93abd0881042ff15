"""From what a restarted job goes on, and a last line with further fields; test_launch.py has launches."""

import json
from pathlib import Path

import pytest

from ctr_ps.deploy.launcher import RESUMES, LastLine, Resumption, newest
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.publish import write_latest
from ctr_ps.ps_server.store import ParameterStore

STARTS_FRESH = ("--set", "checkpoint.resume=false")


def save(folder: str | Path, name: str) -> None:
    ParameterStore().save(SaveRequest(url=f"{folder}/{name}"))
    write_latest(folder, name)


def test_a_job_resumes_from_the_newest_checkpoint_of_its_run(tmp_path: Path) -> None:
    resumption = Resumption(str(tmp_path), is_asked=False)
    save(tmp_path, "epoch-1")
    save(tmp_path, "step-20")

    assert resumption.look() == (RESUMES, f"{tmp_path}/step-20")


def test_a_job_without_a_checkpoint_yet_starts_fresh(tmp_path: Path) -> None:
    look = Resumption(f"{tmp_path}/none", is_asked=False).look

    assert look() == (RESUMES, f"the start: {tmp_path}/none has no checkpoint yet")


def test_checkpoint_of_an_earlier_run_is_not_resumed_unless_asked(tmp_path: Path) -> None:
    save(tmp_path, "epoch-1")

    unasked = Resumption(str(tmp_path), is_asked=False)
    asked = Resumption(str(tmp_path), is_asked=True)

    is_earlier = f"the start: epoch-1 in {tmp_path} belongs to an earlier run"
    assert unasked.look() == (STARTS_FRESH, is_earlier)
    assert asked.look() == (RESUMES, f"{tmp_path}/epoch-1")


def test_metrics_of_the_first_start_are_replaced_where_its_checkpoint_is_not_resumed(
    tmp_path: Path,
) -> None:
    save(tmp_path, "epoch-1")
    resumption = Resumption(str(tmp_path), is_asked=False, has_metrics=True)

    assert resumption.look()[0] == (*STARTS_FRESH, "--set", "run.overwrite=true")
    save(tmp_path, "epoch-2")
    assert resumption.look()[0] == RESUMES


def test_checkpoint_that_replaced_one_of_an_earlier_run_is_the_runs_own(tmp_path: Path) -> None:
    save(tmp_path, "epoch-1")
    resumption = Resumption(str(tmp_path), is_asked=False)
    save(tmp_path, "epoch-1")

    assert resumption.look() == (RESUMES, f"{tmp_path}/epoch-1")


def test_checkpoints_are_found_by_url() -> None:
    save("memory://models", "epoch-3")

    name, _ = newest("memory://models") or ("none", "")

    assert name == "epoch-3"


def test_storage_that_cannot_be_reached_has_no_checkpoint() -> None:
    assert newest("nowhere://model") is None


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
