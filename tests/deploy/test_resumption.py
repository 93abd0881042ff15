"""From what a restarted job goes on."""

from pathlib import Path

from ctr_ps.deploy.resumption import Resumption, newest
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.publish import write_latest
from ctr_ps.ps_server.store import ParameterStore

RESUMES = ("--set", "checkpoint.resume=true")
STARTS_FRESH = ("--set", "checkpoint.resume=false")


def save(folder: str | Path, name: str) -> None:
    ParameterStore().save(SaveRequest(url=f"{folder}/{name}"))
    write_latest(folder, name)


def test_a_job_resumes_from_the_newest_checkpoint_of_its_run(tmp_path: Path) -> None:
    resumption = Resumption(str(tmp_path), is_asked=False)
    save(tmp_path, "epoch-1")
    save(tmp_path, "step-20")

    point = resumption.look()

    assert point.options == RESUMES
    assert point.text == f"{tmp_path}/step-20"


def test_a_job_without_a_checkpoint_yet_starts_fresh(tmp_path: Path) -> None:
    point = Resumption(f"{tmp_path}/none", is_asked=False).look()

    assert point.options == RESUMES
    assert point.text == f"the start: {tmp_path}/none has no checkpoint yet"


def test_checkpoint_of_an_earlier_run_is_not_resumed_unless_asked(tmp_path: Path) -> None:
    save(tmp_path, "epoch-1")

    unasked = Resumption(str(tmp_path), is_asked=False).look()
    asked = Resumption(str(tmp_path), is_asked=True).look()

    assert unasked.options == STARTS_FRESH
    assert unasked.text == f"the start: epoch-1 in {tmp_path} is of an earlier run"
    assert (asked.options, asked.text) == (RESUMES, f"{tmp_path}/epoch-1")


def test_metrics_of_the_first_start_are_replaced_where_its_checkpoint_is_not_resumed(
    tmp_path: Path,
) -> None:
    save(tmp_path, "epoch-1")
    resumption = Resumption(str(tmp_path), is_asked=False, has_metrics=True)

    assert resumption.look().options == (*STARTS_FRESH, "--set", "run.overwrite=true")
    save(tmp_path, "epoch-2")
    assert resumption.look().options == RESUMES


def test_checkpoint_that_replaced_one_of_an_earlier_run_is_the_runs_own(tmp_path: Path) -> None:
    save(tmp_path, "epoch-1")
    resumption = Resumption(str(tmp_path), is_asked=False)
    save(tmp_path, "epoch-1")

    point = resumption.look()

    assert (point.options, point.text) == (RESUMES, f"{tmp_path}/epoch-1")


def test_checkpoints_are_found_by_url() -> None:
    save("memory://models", "epoch-3")

    found = newest("memory://models")

    assert found is not None
    assert found.name == "epoch-3"


def test_storage_that_cannot_be_reached_has_no_checkpoint() -> None:
    assert newest("nowhere://model") is None
