"""What worker 0 saves when it is told to end, and what a process in its place knows of the folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctr_ps.ps_worker.job import Job, override_job
from ctr_ps.ps_worker.run.training_job import checkpoints
from ctr_ps.ps_worker.run.training_job.checkpoints import JobCheckpoints, Start


def checkpoints_of(job: Job, monkeypatch: pytest.MonkeyPatch, **run: Any) -> tuple[Any, Any]:
    """Returns the checkpoints of a run, and what it saves."""
    saved: Any = SimpleNamespace(names=[])
    saved.save_within = lambda step, begin: saved.names.append(step)
    saved.wait = lambda: None

    def saver(*_: object, **known: Any) -> Any:
        saved.known = known
        return saved

    monkeypatch.setattr(checkpoints, "Saver", saver)
    monkeypatch.setattr(checkpoints, "values_of_job", lambda *_: None)
    store = SimpleNamespace(status=lambda: SimpleNamespace(num_examples=10))
    ours: Any = {"is_first": True, "store": store, "progress": SimpleNamespace(steps=5), **run}
    plan: Any = SimpleNamespace(job=job, schema=None, train_files=())
    none: Any = None
    return JobCheckpoints(plan, SimpleNamespace(**ours), none, Start(files="", claim=None)), saved


@pytest.mark.parametrize("is_repeating", [False, True])
def test_a_process_that_repeats_barriers_saves_nothing_when_it_is_told_to_end(
    is_repeating: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = override_job({}, [f"checkpoint.dir={tmp_path}", "checkpoint.every_s=1"], source="test")
    run = {"is_repeating": is_repeating, "is_replacement": True}
    found, saved = checkpoints_of(job, monkeypatch, **run)

    found.save_when_told(SimpleNamespace(number=1))

    assert saved.names == ([] if is_repeating else [5])


@pytest.mark.parametrize("num_examples", [0, 10])
def test_a_pass_of_a_stream_that_had_no_row_yet_is_not_saved(
    num_examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"checkpoint.dir={tmp_path}", "data.stream=redis://host/clicks", "data.train=[]"]
    job = override_job({}, settings, source="test")
    store = SimpleNamespace(status=lambda: SimpleNamespace(num_examples=num_examples))
    run = {"is_repeating": False, "is_replacement": False, "store": store}
    found, saved = checkpoints_of(job, monkeypatch, **run)
    saved.save = lambda name, *_, **__: saved.names.append(name)
    monkeypatch.setattr(found, "_attachments", lambda *_, **__: {})

    found.save_after(SimpleNamespace(number=3), is_best=False, is_published=False)

    assert saved.names == (["epoch-3"] if num_examples else [])


@pytest.mark.parametrize("is_replacement", [False, True])
def test_a_process_in_the_place_of_worker_0_knows_the_checkpoints_of_its_run(
    is_replacement: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = override_job({}, [f"checkpoint.dir={tmp_path}"], source="test")
    monkeypatch.setattr(checkpoints, "checkpoints_of_runs", lambda _: ("step-5",))

    _, saved = checkpoints_of(job, monkeypatch, is_replacement=is_replacement)

    assert saved.known["own"] == (("step-5",) if is_replacement else ())
